//! A relay below a path of its proxy: `PUBLIC_URL` has the path, and the proxy strips it or keeps it.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay};
use modelrelay_harness::worker_process::{Stack, wait_for_model};
use serde_json::json;

use crate::support::anthropic_error;

/// The path as the relay receives it: from a proxy that strips it, and from one that keeps it.
const STRIPPED_OR_KEPT: [&str; 2] = ["", "/llm"];

async fn relay() -> Relay {
    Relay::builder().env("PUBLIC_URL", "https://host.example/llm/").start().await
}

fn browser(target: &str) -> Request {
    Request::get(target).header("accept", "text/html,*/*;q=0.8").header("host", "host.example")
}

#[tokio::test]
async fn routes_work_with_base_path_stripped_or_kept() {
    let relay = relay().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for base in STRIPPED_OR_KEPT {
        for path in ["/health", "/v1/models", "/models", "/props?model=m", "/metrics", "/dashboard", "/setup"] {
            relay.fetch(browser(&format!("{base}{path}"))).await.with_status(200);
        }
        relay.fetch(Request::get(&format!("{base}/admin/state")).bearer(ADMIN_TOKEN)).await.with_status(200);
        let chat = Request::post(&format!("{base}/v1/chat/completions"), &json!({"model": "m", "messages": []}));
        let pending = relay.begin(chat.header("host", "host.example"));
        let job = worker.expect_request().await;
        assert_eq!(job.path(), "/v1/chat/completions");
        worker.answer(&job, &json!({})).await;
        pending.reply().await.with_status(200);
        let nameless = relay.fetch(Request::post(&format!("{base}/v1/messages"), &json!({"messages": []}))).await;
        anthropic_error(&nameless, 400, "invalid_request_error");
    }
}

#[tokio::test]
async fn worker_connects_below_base_path() {
    let relay = relay().await;
    let backend = FakeBackend::start().await;
    let _worker = Stack::worker_of(&relay, &backend).relay(format!("{}/llm", relay.url())).start().await;
    wait_for_model(&relay, "m").await;
}

#[tokio::test]
async fn path_with_similar_prefix_is_not_stripped() {
    let relay = relay().await;
    for path in ["/llmfoo/v1/models", "/llmfoo", "/LLM/v1/models", "/llm/llm/v1/models"] {
        relay.get(path).await.with_status(404);
    }
    let without = Relay::start().await;
    without.get("/llm/v1/models").await.with_status(404);
}

#[tokio::test]
async fn redirect_leads_below_base_path() {
    let relay = relay().await;
    for path in ["/", "/llm", "/llm/"] {
        let reply = relay.fetch(browser(path)).await.with_status(303);
        assert_eq!(reply.header("location").as_deref(), Some("/llm/dashboard"), "{path}");
    }
}

#[tokio::test]
async fn setup_returns_addresses_with_base_path() {
    let relay = relay().await;
    let setup = relay.admin_json("/llm/admin/setup").await;
    assert_eq!(
        (&setup["relay_url"], &setup["worker_url"]),
        (&json!("https://host.example/llm"), &json!("https://host.example/llm"))
    );
}

#[tokio::test]
async fn login_rules_apply_below_base_path() {
    let relay = relay().await;
    let login = || Request::post("/llm/dashboard/login", &json!({"token": ADMIN_TOKEN}));
    relay.fetch(login()).await.with_status(403);
    let reply = relay.fetch(login().header("x-modelrelay-dashboard", "1")).await.with_status(204);
    let cookie = reply.header("set-cookie").expect("a login sets a cookie");
    assert!(cookie.contains("; Path=/; "), "{cookie}");
    let cookie = cookie.split(';').next().expect("a name and a value");
    relay.fetch(Request::get("/llm/admin/state").header("cookie", cookie)).await.with_status(200);
    let change = |request: Request| request.header("cookie", cookie);
    relay.fetch(change(Request::post("/llm/admin/keys", &json!({"name": "n"})))).await.with_status(403);
    let foreign = Request::post("/llm/v1/chat/completions", &json!({})).header("sec-fetch-site", "cross-site");
    relay.fetch(foreign.header("origin", "https://other.example")).await.with_status(403);
    relay.fetch(Request::get("/llm/v1/models").header("host", "other.example")).await.with_status(421);
}

#[tokio::test]
async fn unusable_base_path_is_refused() {
    for path in ["admin", "dashboard/llm", "/llm"] {
        let builder = Relay::builder().env("PUBLIC_URL", &format!("https://host.example/{path}"));
        let (status, log) = builder.start_and_exit().await;
        assert!(!status.success() && log.contains("PUBLIC_URL") && log.contains("/dashboard"), "{}", log.dump());
    }
}
