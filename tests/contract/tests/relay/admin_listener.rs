//! The pages if admins and workers have their own listeners: test boxes send requests to the admins' listener, which
//! serves no other clients, and commands name the workers' listener.

use std::net::SocketAddr;

use modelrelay_harness::client::{Reply, Request};
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay, RelayBuilder};
use modelrelay_harness::tls::Certificates;
use serde_json::{Value, json};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";
const ASKED: &str = r#"{"model": "m", "messages": []}"#;

/// A relay with such a listener, and a browser that is logged in there.
struct Site {
    relay: Relay,
    admin: SocketAddr,
    cookie: String,
}

impl Site {
    async fn start(builder: RelayBuilder) -> Self {
        let relay = builder.env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").start().await;
        let admin = relay.admin_addr().await;
        let login = Request::post("/dashboard/login", &json!({ "token": ADMIN_TOKEN }));
        let reply = login.header("x-modelrelay-dashboard", "1").fetch(admin, relay.log()).await.with_status(204);
        let set = reply.header("set-cookie").expect("a login sets a cookie");
        let cookie = set.split(';').next().expect("a name and a value").to_owned();
        Self { relay, admin, cookie }
    }

    async fn send_request(&self, request: Request) -> Reply {
        request.fetch(self.admin, self.relay.log()).await
    }

    fn as_page(&self, method: &str, target: &str) -> Request {
        Request::new(method, target).header("cookie", &self.cookie).header("x-modelrelay-dashboard", "1")
    }
}

#[tokio::test]
async fn logged_in_page_can_send_test_requests() {
    let site = Site::start(Relay::builder()).await;
    let mut worker = site.relay.worker(&["m"], 1).await;
    let session = site.send_request(site.as_page("GET", "/dashboard/session")).await.with_status(200).json();
    assert_eq!(session["clients_elsewhere"], true);
    let listed = site.send_request(site.as_page("GET", "/v1/models")).await.with_status(200).json();
    assert_eq!(listed["data"][0]["id"], "m");
    // A browser adds the credentials of a proxy in front of the relay, which no backend must see.
    let request = site.as_page("POST", CHAT).header("authorization", "Basic dXNlcjpwYXNz").body(ASKED);
    let request = request.start(site.admin, site.relay.log());
    let job = worker.expect_request().await;
    assert_eq!(job.header("authorization"), None);
    assert_eq!((job.path(), job.header("cookie"), job.header("x-modelrelay-dashboard")), (CHAT, None, None));
    worker.answer(&job, &json!({ "said": "hello" })).await;
    assert_eq!(request.reply().await.with_status(200).json()["said"], "hello");
}

#[tokio::test]
async fn client_routes_on_admin_listener_require_login() {
    let site = Site::start(Relay::builder()).await;
    let mut worker = site.relay.worker(&["m"], 1).await;
    // The routes do not exist for programs, whatever credentials they send.
    let wrong_method = Request::get(CHAT);
    for request in [Request::new("POST", CHAT).body(ASKED), Request::get("/v1/models"), wrong_method] {
        let _ = site.send_request(request.clone()).await.with_status(404);
        let _ = site.send_request(request.bearer(ADMIN_TOKEN)).await.with_status(404);
    }
    // Another site's page may send the cookie along, but not the custom header.
    let forged = Request::new("POST", CHAT).header("cookie", &site.cookie).body(ASKED);
    assert!(site.send_request(forged).await.with_status(403).text().contains("x-modelrelay-dashboard"));
    // A cookie signed with a guess is treated as a login attempt.
    let tries = async || {
        let metrics = site.send_request(Request::get("/metrics")).await.with_status(200).text();
        let line = metrics.lines().find(|line| line.starts_with("modelrelay_auth_failures_total{realm=\"admin\"}"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    let before = tries().await;
    let guess = site.cookie.replace('=', "=9");
    let guessed = Request::new("POST", CHAT).header("cookie", guess).header("x-modelrelay-dashboard", "1").body(ASKED);
    let _ = site.send_request(guessed).await.with_status(403);
    assert_eq!(tries().await, before + 1.0);
    // It serves what the pages need, and is no second entrance for clients; nor is a login valid at the clients'
    // listener.
    let _ = site.send_request(site.as_page("POST", "/v1/embeddings").body(ASKED)).await.with_status(404);
    let _ = site.relay.fetch(site.as_page("GET", "/dashboard/session")).await.with_status(404);
    worker.expect_quiet().await;
}

#[tokio::test]
async fn login_does_not_replace_required_api_key() {
    let site = Site::start(Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true")).await;
    let mut worker = site.relay.worker(&["m"], 1).await;
    let made = site.as_page("POST", "/admin/keys").body(json!({ "name": "test box" }).to_string());
    let key = site.send_request(made).await.with_status(201).json()["secret"].as_str().expect("a secret").to_owned();
    let _ = site.send_request(site.as_page("POST", CHAT).body(ASKED)).await.with_status(401);
    let _ = site.send_request(site.as_page("GET", "/v1/models")).await.with_status(401);
    let _ = site.send_request(Request::new("POST", CHAT).bearer(&key).body(ASKED)).await.with_status(404);
    let request = site.as_page("POST", CHAT).bearer(&key).body(ASKED).start(site.admin, site.relay.log());
    let job = worker.expect_request().await;
    assert_eq!(job.header("authorization"), None);
    worker.answer(&job, &json!({})).await;
    let _ = request.reply().await.with_status(200);
}

#[tokio::test]
async fn shared_listener_requires_no_client_login() {
    let relay = Relay::start().await;
    let session = relay.get("/dashboard/session").await.with_status(200).json();
    assert_eq!(session["clients_elsewhere"], false);
    let _ = relay.get("/v1/models").await.with_status(200);
}

/// Returns the setup of a relay whose address in the browser is `relay.example`.
async fn setup(relay: &Relay, admin: SocketAddr) -> Value {
    let request = Request::get("/admin/setup").bearer(ADMIN_TOKEN).header("host", "relay.example:9");
    request.fetch(admin, relay.log()).await.with_status(200).json()
}

#[tokio::test]
async fn setup_returns_worker_and_client_listener_addresses() {
    let builder = Relay::builder().env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").env("WORKER_LISTEN_ADDR", "0.0.0.0:0");
    let relay = builder.start().await;
    let workers = relay.worker_addr().await.port();
    let addresses = setup(&relay, relay.admin_addr().await).await;
    assert_eq!(addresses["relay_url"], format!("http://relay.example:{}", relay.addr().port()));
    assert_eq!(addresses["worker_url"], format!("http://relay.example:{workers}"));
    assert_eq!(addresses["listen_with"], format!("WORKER_LISTEN_ADDR=0.0.0.0:{workers}"));
    // A machine without a network has none.
    if let Some(url) = addresses["network_url"].as_str() {
        let address: SocketAddr = url.strip_prefix("http://").expect("plain HTTP").parse().expect("an address");
        assert!(!address.ip().is_loopback() && address.port() == workers, "{url}");
        TcpStream::connect(address).await.expect("the address has a listener");
    }

    let relay = Relay::builder().env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").start().await;
    let clients = relay.addr().port();
    let addresses = setup(&relay, relay.admin_addr().await).await;
    assert_eq!(addresses["worker_url"], format!("http://relay.example:{clients}"));
    assert_eq!(addresses["listen_with"], format!("LISTEN_ADDR=0.0.0.0:{clients}"));
    assert_eq!(addresses["network_url"], Value::Null, "the relay listens only on loopback");
}

#[tokio::test]
async fn worker_listener_scheme_follows_relays_own_tls() {
    let request = || Request::get("/admin/setup").bearer(ADMIN_TOKEN).header("host", "relay.example");
    let builder = Relay::builder().env("WORKER_LISTEN_ADDR", "127.0.0.1:0").env("WORKERS_ON_CLIENT_PORT", "false");
    let relay = builder.start().await;
    let port = relay.worker_addr().await.port();
    let addresses = relay.fetch(request().header("x-forwarded-proto", "https")).await.with_status(200).json();
    assert_eq!(addresses["relay_url"], "https://relay.example");
    assert_eq!(addresses["worker_url"], format!("http://relay.example:{port}"));

    let certificates = Certificates::make();
    let relay = Relay::builder().tls(&certificates).env("WORKER_LISTEN_ADDR", "0.0.0.0:0").start().await;
    let port = relay.worker_addr().await.port();
    let addresses = relay.fetch(request()).await.with_status(200).json();
    assert_eq!(addresses["worker_url"], format!("https://relay.example:{port}"));
    assert_eq!(addresses["network_url"], Value::Null, "a certificate is for a name");
}

#[tokio::test]
async fn worker_url_prefers_encrypting_proxy() {
    let relay = Relay::builder().env("WORKER_LISTEN_ADDR", "127.0.0.1:0").start().await;
    let request = || Request::get("/admin/setup").bearer(ADMIN_TOKEN).header("host", "relay.example");
    let addresses = relay.fetch(request().header("x-forwarded-proto", "https")).await.with_status(200).json();
    assert_eq!(
        addresses["worker_url"], "https://relay.example",
        "an HTTPS proxy takes precedence because workers send their secret there"
    );
    let addresses = relay.fetch(request()).await.with_status(200).json();
    assert_eq!(addresses["worker_url"], format!("http://relay.example:{}", relay.worker_addr().await.port()));
}

#[tokio::test]
async fn configured_public_urls_are_returned_by_setup() {
    let builder = Relay::builder().env("PUBLIC_URL", "https://llm.example").env("WORKER_LISTEN_ADDR", "0.0.0.0:0");
    let relay = builder.start().await;
    let addresses = setup(&relay, relay.addr()).await;
    assert_eq!(
        (&addresses["relay_url"], &addresses["worker_url"]),
        (&json!("https://llm.example"), &json!("https://llm.example"))
    );
    assert_eq!(addresses["network_url"], Value::Null);

    let builder = Relay::builder().env("PUBLIC_URL", "https://llm.example");
    let relay = builder.env("WORKER_PUBLIC_URL", "https://workers.example:8443/").start().await;
    let addresses = setup(&relay, relay.addr()).await;
    assert_eq!(addresses["relay_url"], "https://llm.example");
    assert_eq!(addresses["worker_url"], "https://workers.example:8443");
    assert_eq!(addresses["network_url"], Value::Null);
}
