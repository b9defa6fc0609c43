//! Browser access to the routes for clients.

use modelrelay_harness::{
    client::{Reply, Request},
    relay::{ADMIN_TOKEN, Relay},
};
use serde_json::json;

use crate::support::{chat, chat_stream};

const CHAT: &str = "/v1/chat/completions";
const APP: &str = "https://chat.example";

/// A preflight request of a page with this origin, for a POST of JSON.
fn preflight(origin: &str) -> Request {
    Request::new("OPTIONS", CHAT)
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-os")
}

fn error_code(reply: &Reply) -> String {
    reply.json()["error"]["code"].as_str().expect("a code").to_owned()
}

/// A relay that allows pages of these origins.
async fn open_to(origins: &str) -> Relay {
    Relay::builder().env("ALLOWED_ORIGINS", origins).start().await
}

#[tokio::test]
async fn worker_response_cannot_be_rendered() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let steering = [
        ("service-worker-allowed", "/"),
        ("set-cookie", "a=1"),
        ("x-accel-redirect", "/internal"),
        ("location", "/dashboard"),
        ("access-control-allow-origin", "*"),
        ("content-security-policy", "script-src *"),
    ];
    let headers = [&[("content-type", "text/html")], steering.as_slice()].concat();
    worker.answer_with(&job, 200, &headers, b"<script>0</script>").await;
    let reply = pending.reply().await.with_status(200);
    assert_eq!(reply.text(), "<script>0</script>");
    assert_eq!(reply.headers.all("content-type"), ["text/plain; charset=utf-8"]);
    let policy = "sandbox; default-src 'none'; frame-ancestors 'none'";
    assert_eq!(reply.headers.all("content-security-policy"), [policy]);
    assert_eq!(reply.header("x-content-type-options").as_deref(), Some("nosniff"));
    for name in ["service-worker-allowed", "set-cookie", "x-accel-redirect", "location", "access-control-allow-origin"]
    {
        assert_eq!(reply.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn stream_that_began_before_its_head_is_confined() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "0.05").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let response = relay.send(chat_stream("m")).await;
    assert_eq!(response.headers.all("x-content-type-options"), ["nosniff"]);
    assert_eq!(response.headers.all("content-security-policy").len(), 1);
    drop(worker.expect_request().await);
}

#[tokio::test]
async fn page_frame_and_script_requests_are_refused() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["m"], 1).await;
    for (name, value) in [
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
        ("sec-fetch-dest", "iframe"),
        ("sec-fetch-dest", "script"),
        ("sec-fetch-dest", "serviceworker"),
        ("sec-fetch-dest", "image"),
    ] {
        let reply = relay.fetch(chat("m").header(name, value)).await.with_status(403);
        assert_eq!(error_code(&reply), "cross_origin", "{name}: {value}");
        let stored = Request::get("/v1/responses/resp_1").header(name, value);
        assert_eq!(error_code(&relay.fetch(stored).await.with_status(403)), "cross_origin", "{name}: {value}");
    }
}

#[tokio::test]
async fn same_origin_fetch_is_served() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let request = chat("m").header("sec-fetch-mode", "cors").header("sec-fetch-dest", "empty");
    let pending = relay.begin(request.header("sec-fetch-site", "same-origin"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    pending.reply().await.with_status(200);
}

#[tokio::test]
async fn cross_site_post_needs_allowed_origin() {
    let relay = open_to(APP).await;
    let mut worker = relay.worker(&["m"], 1).await;
    let cross = |origin: &str| chat("m").header("origin", origin).header("sec-fetch-site", "cross-site");
    let reply = relay.fetch(cross("https://evil.example")).await.with_status(403);
    assert!(reply.text().contains("ALLOWED_ORIGINS"), "{}", reply.text());
    let pending = relay.begin(cross(APP));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    assert_eq!(pending.reply().await.with_status(200).header("access-control-allow-origin").as_deref(), Some(APP));
}

#[tokio::test]
async fn allowed_origin_may_not_open_responses_as_pages() {
    let relay = open_to("*").await;
    let _worker = relay.worker(&["m"], 1).await;
    let form = chat("m").header("origin", APP).header("sec-fetch-mode", "navigate");
    assert_eq!(error_code(&relay.fetch(form).await.with_status(403)), "cross_origin");
}

#[tokio::test]
async fn preflight_of_allowed_origin_needs_no_key() {
    let relay = Relay::builder().env("ALLOWED_ORIGINS", APP).env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let reply = relay.fetch(preflight(APP)).await.with_status(204);
    assert_eq!(reply.header("access-control-allow-origin").as_deref(), Some(APP));
    assert_eq!(reply.header("access-control-allow-methods").as_deref(), Some("GET, POST"));
    let allowed = reply.header("access-control-allow-headers");
    assert_eq!(allowed.as_deref(), Some("authorization,content-type,x-stainless-os"));
    assert!(reply.headers.all("vary").contains(&"origin".to_owned()));
    let other = relay.fetch(preflight("https://evil.example")).await.with_status(403);
    assert_eq!((error_code(&other).as_str(), other.header("access-control-allow-origin")), ("cross_origin", None));
}

#[tokio::test]
async fn error_is_readable_for_allowed_origin() {
    let relay = Relay::builder().env("ALLOWED_ORIGINS", "*").env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    for request in [chat("m"), Request::get("/v1/models"), Request::new("DELETE", CHAT)] {
        let reply = relay.fetch(request.header("origin", APP)).await;
        assert!(reply.status >= 400, "{}", reply.status);
        assert_eq!(reply.header("access-control-allow-origin").as_deref(), Some("*"), "{}", reply.status);
    }
}

#[tokio::test]
async fn admin_routes_are_never_shared() {
    let relay = open_to("*").await;
    let request = Request::get("/admin/workers").bearer(ADMIN_TOKEN).header("origin", APP);
    assert_eq!(relay.fetch(request).await.with_status(200).header("access-control-allow-origin"), None);
    let preflight = Request::new("OPTIONS", "/admin/workers").header("origin", APP);
    let reply = relay.fetch(preflight.header("access-control-request-method", "GET")).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (403, None));
}

#[tokio::test]
async fn without_origins_nothing_is_shared() {
    let relay = Relay::start().await;
    let reply = relay.fetch(preflight(APP)).await.with_status(403);
    assert_eq!((error_code(&reply).as_str(), reply.header("access-control-allow-origin")), ("cross_origin", None));
}

#[tokio::test]
async fn unknown_host_of_loopback_relay_is_refused() {
    let relay = Relay::start().await;
    for host in ["evil.example", "evil.example:8080", "localhost.evil.example"] {
        for request in [Request::get("/v1/models"), chat("m"), preflight(APP)] {
            let reply = relay.fetch(request.header("host", host)).await.with_status(421);
            assert_eq!(error_code(&reply), "unknown_host", "{host}");
        }
    }
    for host in [
        "localhost:8080",
        "LOCALHOST",
        "app.localhost",
        "127.0.0.1:1",
        "[::1]:8080",
        "192.168.1.9",
        "gpu-box",
        "host.docker.internal",
    ] {
        relay.fetch(Request::get("/v1/models").header("host", host)).await.with_status(200);
    }
}

#[tokio::test]
async fn configured_host_is_known() {
    let relay = Relay::builder().env("PUBLIC_URL", "https://relay.example/").env("ALLOWED_HOSTS", "relay.lan, gpu.lab");
    let relay = relay.start().await;
    for host in ["relay.example", "Relay.Lan:8080", "gpu.lab"] {
        relay.fetch(Request::get("/v1/models").header("host", host)).await.with_status(200);
    }
    relay.fetch(Request::get("/v1/models").header("host", "lan.lab")).await.with_status(421);
}

#[tokio::test]
async fn keys_make_every_host_known() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    relay.fetch(Request::get("/v1/models").header("host", "relay.example")).await.with_status(401);
}

#[tokio::test]
async fn further_response_header_is_passed_on() {
    let relay = Relay::builder().env("RESPONSE_HEADERS", "X-Build").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer_with(&job, 200, &[("x-build", "7"), ("x-other", "1")], b"{}").await;
    let reply = pending.reply().await;
    assert_eq!((reply.header("x-build").as_deref(), reply.header("x-other")), (Some("7"), None));
}

#[tokio::test]
async fn settings_that_weaken_protection_are_refused() {
    for (name, value, allowed) in [
        ("RESPONSE_HEADERS", "set-cookie", "control a browser"),
        ("ALLOWED_ORIGINS", "chat.example", "https://chat.example"),
        ("ALLOWED_HOSTS", "relay.example:8080", "without ports"),
    ] {
        let (status, log) = Relay::builder().env(name, value).start_and_exit().await;
        assert!(!status.success() && log.contains(name) && log.contains(allowed), "{}", log.dump());
    }
}

#[tokio::test]
async fn client_websocket_is_426_at_once() {
    let relay = Relay::start().await;
    let request = Request::get("/v1/responses").header("connection", "upgrade").header("upgrade", "websocket");
    let reply = relay.fetch(request).await.with_status(426);
    assert_eq!(error_code(&reply), "no_websocket");
}

#[tokio::test]
async fn odd_path_spellings_reach_their_route() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = json!({"model": "m", "messages": []});
    for path in [
        "//v1/chat/completions?a=1",
        "/v1/chat/completions/?a=1",
        "/chat/completions?a=1",
        "/v1/v1/chat/completions?a=1",
    ] {
        let pending = relay.begin(Request::post(path, &body));
        let job = worker.expect_request().await;
        assert_eq!(job.path(), "/v1/chat/completions?a=1", "{path}");
        worker.answer(&job, &json!({})).await;
        pending.reply().await.with_status(200);
    }
    relay.fetch(Request::get("/models/")).await.with_status(200);
    let error = relay.fetch(Request::post("/openai/v1/messages", &body)).await.with_status(404).text();
    assert!(error.contains("did you mean /v1/messages?"), "{error}");
}

#[tokio::test]
async fn allow_header_lists_methods_of_path() {
    let relay = Relay::start().await;
    for (method, path, allowed) in [
        ("GET", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
    ] {
        let allow = relay.fetch(Request::new(method, path)).await.with_status(405).header("allow").expect("Allow");
        let methods: Vec<&str> = allow.split(',').map(str::trim).collect();
        assert!(methods.contains(&allowed) && !methods.contains(&method), "{method} {path}: {allow}");
    }
}
