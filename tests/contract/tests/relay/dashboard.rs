//! The basis of the pages: logins by cookie, the live stream, and the data of the page "Add a machine".

use std::net::SocketAddr;

use modelrelay_harness::client::{Piece, Reply, Request, Response};
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay, WORKER_SECRET};
use modelrelay_harness::worker::slot;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::support::chat;

async fn log_in(relay: &Relay, token: &str) -> Reply {
    relay.fetch(login(token)).await
}

fn login(token: &str) -> Request {
    Request::post("/dashboard/login", &json!({ "token": token })).header("x-modelrelay-dashboard", "1")
}

/// Returns the cookie of a successful login, as a browser sends it back.
async fn cookie(relay: &Relay) -> String {
    let reply = log_in(relay, ADMIN_TOKEN).await.with_status(204);
    let set = reply.header("set-cookie").expect("a login sets a cookie");
    set.split(';').next().expect("a name and a value").to_owned()
}

fn as_page(method: &str, target: &str, cookie: &str) -> Request {
    Request::new(method, target).header("cookie", cookie).header("x-modelrelay-dashboard", "1")
}

/// The live stream of a page.
struct Live {
    stream: Response,
    unread: String,
}

impl Live {
    async fn open(relay: &Relay, cookie: &str) -> Self {
        let stream = relay.send(Request::get("/admin/live").header("cookie", cookie)).await;
        assert_eq!(stream.status, 200);
        assert_eq!(stream.headers.first("content-type").as_deref(), Some("text/event-stream; charset=utf-8"));
        assert_eq!(stream.headers.first("x-accel-buffering").as_deref(), Some("no"));
        Self { stream, unread: String::new() }
    }

    /// Returns the data of the next event, which must have this name.
    async fn next(&mut self, name: &str) -> Value {
        while !self.unread.contains("\n\n") {
            let Piece::Data(data) = self.stream.next_piece().await else { panic!("it ended: {:?}", self.unread) };
            self.unread.push_str(std::str::from_utf8(&data).expect("text"));
        }
        let (text, rest) = self.unread.split_once("\n\n").expect("a whole event");
        let (text, rest) = (text.to_owned(), rest.to_owned());
        self.unread = rest;
        let data = text.strip_prefix(&format!("event: {name}\ndata: "));
        let data = data.unwrap_or_else(|| panic!("no {name}: {text:?}"));
        serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"))
    }

    /// Returns the next change in which `find` finds a value.
    async fn change_with<T>(&mut self, find: impl Fn(&Value) -> Option<T>) -> T {
        loop {
            if let Some(found) = find(&self.next("change").await) {
                return found;
            }
        }
    }
}

#[tokio::test]
async fn login_cookie_admits_and_is_protected() {
    let relay = Relay::start().await;
    let reply = log_in(&relay, ADMIN_TOKEN).await.with_status(204);
    let set = reply.header("set-cookie").expect("a cookie");
    for part in ["; HttpOnly", "; SameSite=Strict", "; Path=/"] {
        assert!(set.contains(part), "{set}");
    }
    assert!(!set.contains("Secure"), "without TLS a browser would not send it back: {set}");
    assert!(!set.contains(ADMIN_TOKEN));
    let cookie = set.split(';').next().unwrap();
    let session = relay.get("/dashboard/session").await.with_status(200).json();
    assert_eq!((&session["logged_in"], &session["admin_enabled"]), (&json!(false), &json!(true)));
    let session = relay.fetch(as_page("GET", "/dashboard/session", cookie)).await.with_status(200).json();
    assert_eq!(session["logged_in"], true);
    let _ = relay.fetch(Request::get("/admin/stats").header("cookie", cookie)).await.with_status(200);
    let other = cookie.replace('=', "=9");
    let _ = relay.fetch(as_page("GET", "/admin/stats", &other)).await.with_status(403);
    let out = relay.fetch(as_page("POST", "/dashboard/logout", cookie)).await.with_status(204);
    assert!(
        out.header("set-cookie")
            .is_some_and(|set| set.starts_with("modelrelay_session=;") && set.contains("Max-Age=0"))
    );
}

#[tokio::test]
async fn cookie_is_secure_behind_tls() {
    let relay = Relay::start().await;
    let reply = relay.fetch(login(ADMIN_TOKEN).header("x-forwarded-proto", "https")).await.with_status(204);
    let set = reply.header("set-cookie").expect("a login sets a cookie");
    assert!(set.starts_with("__Host-modelrelay_session=") && set.ends_with("; Secure"), "{set}");
    let cookie = set.split(';').next().expect("a cookie");
    let stats = relay.fetch(as_page("GET", "/admin/stats", cookie)).await.with_status(200);
    assert_eq!(stats.header("cache-control").as_deref(), Some("no-store"));
    assert_eq!(stats.header("x-content-type-options").as_deref(), Some("nosniff"));
}

#[tokio::test]
async fn cross_site_change_with_cookie_is_403() {
    let relay = Relay::start().await;
    let cookie = cookie(&relay).await;
    let forged = Request::post("/admin/keys", &json!({ "name": "x" })).header("cookie", &cookie);
    let reply = relay.fetch(forged).await.with_status(403);
    assert!(reply.text().contains("x-modelrelay-dashboard"), "{}", reply.text());
    assert_eq!(relay.admin_json("/admin/keys").await["keys"], json!([]));
    let request = as_page("POST", "/admin/keys", &cookie).body(json!({ "name": "x" }).to_string());
    let _ = relay.fetch(request).await.with_status(201);
}

#[tokio::test]
async fn cross_site_login_and_logout_are_403() {
    let relay = Relay::start().await;
    for _ in 0..9 {
        let forged = Request::post("/dashboard/login", &json!({ "token": "a-wrong-token" }));
        let _ = relay.fetch(forged).await.with_status(403);
    }
    let cookie = cookie(&relay).await;
    let out = relay.fetch(Request::new("POST", "/dashboard/logout").header("cookie", &cookie)).await.with_status(403);
    assert_eq!(out.header("set-cookie"), None);
}

#[tokio::test]
async fn token_guesses_are_always_audited() {
    let relay = Relay::builder().env("AUDIT_LOG_FILE", "audit.jsonl").start().await;
    // The validity of a token is not revealed where attempts are not counted.
    let request = Request::get("/dashboard/session").bearer(ADMIN_TOKEN);
    assert_eq!(relay.fetch(request).await.with_status(200).json()["logged_in"], false);
    // A cookie signed with a guess is treated as a login attempt.
    let guessed = "modelrelay_session=9999999999.00.0000000000000000000000000000000000000000000000000000000000000000";
    let _ = relay.fetch(Request::get("/admin/stats").header("cookie", guessed)).await.with_status(403);
    relay.eventually("an event", || async { relay.read_file("audit.jsonl").contains(r#""action":"login""#) }).await;
    assert!(relay.metric("modelrelay_auth_failures_total{realm=\"admin\"}").await >= 1.0);
}

#[tokio::test]
async fn proxy_password_does_not_override_cookie() {
    let relay = Relay::start().await;
    let cookie = cookie(&relay).await;
    let behind = as_page("GET", "/admin/stats", &cookie).header("authorization", "Basic dXNlcjpwYXNz");
    let _ = relay.fetch(behind).await.with_status(200);
}

#[tokio::test]
async fn wrong_tokens_lock_out_logins_of_address() {
    let relay = Relay::start().await;
    let before = cookie(&relay).await;
    for _ in 0..5 {
        let _ = log_in(&relay, "a-wrong-token").await.with_status(403);
    }
    let reply = log_in(&relay, ADMIN_TOKEN).await.with_status(429);
    let seconds: u64 = reply.header("retry-after").and_then(|seconds| seconds.parse().ok()).expect("a number");
    assert!((1..=60).contains(&seconds) && reply.json()["error"]["code"] == "too_many_logins");
    // Existing sessions stay valid, and programs with the token are not affected.
    let _ = relay.fetch(as_page("GET", "/admin/stats", &before)).await.with_status(200);
    let _ = relay.admin("GET", "/admin/stats").await.with_status(200);
}

#[tokio::test]
async fn login_without_configured_token_is_403() {
    let relay = Relay::builder().without_env("MODELRELAY_ADMIN_TOKEN").start().await;
    for token in ["", ADMIN_TOKEN] {
        let reply = log_in(&relay, token).await.with_status(403);
        assert!(reply.text().contains("MODELRELAY_ADMIN_TOKEN"), "{}", reply.text());
    }
    let session = relay.get("/dashboard/session").await.with_status(200).json();
    assert_eq!((&session["logged_in"], &session["admin_enabled"]), (&json!(false), &json!(false)));
}

#[tokio::test]
async fn new_token_ends_logins_and_streams() {
    let relay = Relay::builder()
        .without_env("MODELRELAY_ADMIN_TOKEN")
        .env("MODELRELAY_ADMIN_TOKEN_FILE", "token")
        .file("token", ADMIN_TOKEN)
        .start()
        .await;
    let cookie = cookie(&relay).await;
    let stream = Live::open(&relay, &cookie).await;
    relay.replace_file("token", "another-admin-token");
    relay.log().wait_for_line("admin token reloaded").await;
    let reply = relay.fetch(as_page("GET", "/admin/stats", &cookie)).await.with_status(403);
    assert!(reply.text().contains("log in again"), "{}", reply.text());
    // A change through which the stream notices it.
    let _worker = relay.worker(&["m"], 1).await;
    let rest = stream.stream.read_to_end().await;
    assert!(!rest.text().contains("event: change"), "{}", rest.text());
}

#[tokio::test]
async fn page_receives_snapshot_followed_by_changes() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "7").start().await;
    let cookie = cookie(&relay).await;
    let mut stream = Live::open(&relay, &cookie).await;
    let snapshot = stream.next("snapshot").await;
    assert_eq!(
        (&snapshot["workers"], &snapshot["requests"], &snapshot["requests_total"]),
        (&json!([]), &json!([]), &json!(0))
    );
    assert_eq!(
        (&snapshot["relay"]["phase"], &snapshot["providers"][0]["queue_capacity"]),
        (&json!("running"), &json!(7))
    );
    assert_eq!(snapshot["history"], json!({ "interval_ms": 10_000, "points": [] }));

    let mut worker = relay.core1_worker(&["m"], 2).await;
    let joined = stream.change_with(|change| Some(change["workers"][0].clone()).filter(Value::is_object)).await;
    assert_eq!(
        (&joined["name"], &joined["models"], &joined["capacity"]),
        (&json!("hand-played"), &json!(["m"]), &json!(2))
    );
    assert_eq!((&joined["worker_id"], &joined["slots"]), (&json!(worker.worker_id), &json!(null)));
    let _running = relay.begin(chat("m").header("x-request-id", "seen"));
    worker.expect_request().await;
    let running = stream.change_with(|change| {
        change["requests"].as_array()?.iter().find(|request| request["state"] == "dispatched").cloned()
    });
    let running = running.await;
    assert_eq!((&running["request_id"], &running["worker"]), (&json!("seen"), &joined["worker_id"]));
    let cancel = as_page("POST", "/admin/requests/seen/cancel", &cookie);
    let _ = relay.fetch(cancel).await.with_status(202);
    stream.change_with(|change| (change["gone_requests"] == json!(["seen"])).then_some(())).await;
    drop(worker);
    let id = joined["worker_id"].clone();
    stream.change_with(|change| (change["gone_workers"] == json!([id])).then_some(())).await;
}

#[tokio::test]
async fn waiting_requests_are_shown_with_position() {
    let relay = Relay::start().await;
    let cookie = cookie(&relay).await;
    let mut stream = Live::open(&relay, &cookie).await;
    assert_eq!(stream.next("snapshot").await["positions"], json!({}));
    let _first = relay.begin(chat("m").header("x-request-id", "first"));
    relay.wait_for_queue_depth("local", 1).await;
    let _second = relay.begin(chat("m").header("x-request-id", "second"));
    stream.change_with(|change| (change["positions"] == json!({"first": 1, "second": 2})).then_some(())).await;
    let mut worker = relay.worker(&["m"], 1).await;
    worker.expect_request().await;
    stream.change_with(|change| (change["positions"] == json!({"second": 1})).then_some(())).await;
}

#[tokio::test]
async fn slots_are_shown_with_state_and_target() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut gpu = slot("gpu0", "loading", &["m", "n"]);
    gpu["target"] = json!("m");
    gpu["eta_ms"] = json!(9_000);
    worker.register_slots1(&["m", "n"], &[gpu]).await;
    let mut stream = Live::open(&relay, &cookie(&relay).await).await;
    let snapshot = stream.next("snapshot").await;
    let shown = &snapshot["workers"][0]["slots"][0];
    assert_eq!((&shown["id"], &shown["state"], &shown["target"]), (&json!("gpu0"), &json!("loading"), &json!("m")));
    let (now, eta) = (snapshot["at"].as_u64().unwrap(), shown["eta"].as_u64().unwrap());
    assert!((now..now + 10_000).contains(&eta), "{now} {eta}");
    assert_eq!(shown["models"].as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn event_log_is_independent_of_log_level() {
    let relay = Relay::builder().env("LOG_LEVEL", "error,modelrelay_relay::app=info").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    let mut stream = Live::open(&relay, &cookie(&relay).await).await;
    let snapshot = stream.next("snapshot").await;
    let journal = snapshot["journal"].as_array().expect("a list");
    let of = |message: &str| journal.iter().find(|entry| entry["message"] == message);
    let registered = of("worker registered").unwrap_or_else(|| panic!("{journal:?}"));
    assert_eq!((&registered["level"], &registered["fields"]["provider"]), (&json!("info"), &json!("local")));
    assert!(!relay.log().contains("worker registered"), "LOG_LEVEL must stay in effect for the log");
    assert!(of("request dispatched").is_none(), "such lines would crowd out all others");
}

#[tokio::test]
async fn streams_end_with_relay() {
    let mut relay = Relay::start().await;
    let cookie = cookie(&relay).await;
    let stream = Live::open(&relay, &cookie).await;
    relay.process().terminate().await;
    let _ = stream.stream.read_to_end().await;
    assert!(relay.process().wait_exit().await.success());
}

#[tokio::test]
async fn setup_returns_address_reachable_from_network() {
    let relay = Relay::builder().env("LISTEN_ADDR", "0.0.0.0:0").start().await;
    let port = relay.addr().port();
    // The browser may have come through a tunnel.
    let request = |cookie: &str| as_page("GET", "/admin/setup", cookie).header("host", "localhost:9999");
    let setup = relay.fetch(request(&cookie(&relay).await)).await.with_status(200).json();
    assert_eq!(setup["relay_url"], "http://localhost:9999");
    // A machine without a network has none.
    if let Some(url) = setup["network_url"].as_str() {
        let address = url.strip_prefix("http://").expect("plain HTTP").parse().expect("an address and a port");
        assert!(!SocketAddr::ip(&address).is_loopback() && address.port() == port);
        TcpStream::connect(address).await.expect("the address has a listener");
    }
    // A Pod's own address is of no use outside the cluster.
    let relay =
        Relay::builder().env("LISTEN_ADDR", "0.0.0.0:0").env("KUBERNETES_SERVICE_HOST", "10.0.0.1").start().await;
    let setup = relay.fetch(request(&cookie(&relay).await)).await.with_status(200).json();
    assert_eq!(setup["network_url"], Value::Null);
}

#[tokio::test]
async fn setup_returns_address_and_worker_secret() {
    let relay = Relay::builder().env("AUDIT_LOG_FILE", "audit.jsonl").start().await;
    let cookie = cookie(&relay).await;
    let setup =
        relay.fetch(as_page("GET", "/admin/setup", &cookie).header("host", "relay.example")).await.with_status(200);
    let setup = setup.json();
    assert_eq!(setup["relay_url"], "http://relay.example");
    assert_eq!(setup["network_url"], Value::Null, "the relay listens only on loopback");
    assert_eq!(setup["providers"], json!([{ "name": "local", "enabled": true, "has_secret": true }]));
    let request = as_page("POST", "/admin/setup/secret", &cookie).body(json!({ "provider": "local" }).to_string());
    let reply = relay.fetch(request).await.with_status(200);
    assert_eq!(reply.json(), json!({ "provider": "local", "secret": WORKER_SECRET }));
    assert_eq!(reply.header("cache-control").as_deref(), Some("no-store"));
    let audited = r#""action":"secret.show","outcome":"ok","status":200,"subject":"local""#;
    relay.eventually("an event", || async { relay.read_file("audit.jsonl").contains(audited) }).await;
    let other = as_page("POST", "/admin/setup/secret", &cookie).body(json!({ "provider": "x" }).to_string());
    let _ = relay.fetch(other).await.with_status(404);
    let _ = relay.fetch(as_page("POST", "/admin/setup/secret", &cookie).body("{")).await.with_status(400);
}

#[tokio::test]
async fn provider_without_secret_is_409_naming_setting() {
    let relay = Relay::builder().config("providers:\n- name: local\n").start().await;
    let request = Request::post("/admin/setup/secret", &json!({ "provider": "local" })).bearer(ADMIN_TOKEN);
    let reply = relay.fetch(request).await.with_status(409);
    assert!(reply.text().contains("workerSecrets in relay.yaml"), "{}", reply.text());
}

#[tokio::test]
async fn setup_returns_public_url() {
    let relay = Relay::builder().env("PUBLIC_URL", "https://llm.example/").start().await;
    assert_eq!(relay.admin_json("/admin/setup").await["relay_url"], "https://llm.example");
}

#[tokio::test]
async fn root_redirects_only_browsers_to_dashboard() {
    let relay = Relay::start().await;
    let browser = Request::get("/").header("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
    let reply = relay.fetch(browser).await.with_status(303);
    assert_eq!(reply.header("location").as_deref(), Some("/dashboard"));
    let _ = relay.get("/").await.with_status(404);
}

#[tokio::test]
async fn dashboard_is_served_on_admin_listener_only() {
    let relay = Relay::builder().env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").start().await;
    assert_eq!(relay.get("/dashboard/session").await.status, 404);
    let admin = relay.admin_addr().await;
    let reply = Request::get("/dashboard/session").fetch(admin, relay.log()).await;
    assert_eq!(reply.status, 200);
}
