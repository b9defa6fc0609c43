//! `relay.yaml` changes while the relay runs: applied without dropping a connection, or not at all.

use modelrelay_harness::{client::Request, relay::Relay};
use serde_json::json;

use crate::support::{chat, chat_stream, model_ids, one_provider, openai_error, two_providers};

/// Waits until the state's configuration hash differs from `before`.
async fn wait_for_new_hash(relay: &Relay, before: &str) {
    relay.eventually("the new configuration is in force", || async { config_hash(relay).await != before }).await;
}

async fn config_hash(relay: &Relay) -> String {
    let state = relay.admin_json("/admin/state").await;
    let hash = ["config_hash", "configuration_hash"].iter().find_map(|key| state[key].as_str());
    hash.unwrap_or_else(|| panic!("no hash of the configuration in {state}")).to_owned()
}

#[tokio::test]
async fn new_provider_serves_at_once() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    assert_eq!(relay.dial().provider("other").refused().await.status, 404);
    let before = config_hash(&relay).await;
    relay.replace_file("relay.yaml", &two_providers("", ""));
    wait_for_new_hash(&relay, &before).await;
    let mut worker = relay.dial().provider("other").open().await;
    worker.register(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn disabled_provider_fails_queue_and_finishes_running_requests() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    relay.replace_file("relay.yaml", &one_provider("  enabled: false"));
    openai_error(&waiting.reply().await, 503, "service_unavailable_error", "provider_disabled");
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    openai_error(&relay.fetch(chat("m")).await, 503, "service_unavailable_error", "provider_disabled");
    worker.expect_quiet().await;
    let disabled = config_hash(&relay).await;
    relay.replace_file("relay.yaml", &one_provider("  enabled: true"));
    wait_for_new_hash(&relay, &disabled).await;
    let again = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = again.reply().await.with_status(200);
}

#[tokio::test]
async fn removed_provider_fails_queue_and_closes_workers() {
    let relay = Relay::builder().config(two_providers("", "  models: [{id: m}]")).start().await;
    let mut worker = relay.dial().provider("other").open().await;
    worker.register(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("other", 1).await;
    relay.replace_file("relay.yaml", &one_provider(""));
    openai_error(&waiting.reply().await, 503, "service_unavailable_error", "provider_deleted");
    worker.expect("graceful_shutdown").await;
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    assert_eq!(worker.expect_close().await.0, 1000);
    assert_eq!(relay.dial().provider("other").refused().await.status, 404);
}

#[tokio::test]
async fn broken_file_keeps_previous_configuration() {
    let relay = Relay::builder().config(one_provider("  models: [{id: good}]")).start().await;
    let before = config_hash(&relay).await;
    for broken in ["providers: [", "providers:\n- name: local\n  nonsense: 1\n", "providers:\n- name: UPPER\n"] {
        relay.replace_file("relay.yaml", broken);
        relay
            .eventually("the failed reload is shown", || async {
                metric(&relay, "modelrelay_config_last_reload_successful").await == Some("0".into())
            })
            .await;
        assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["good"], "{broken}");
        assert_eq!(config_hash(&relay).await, before);
    }
    let _worker = relay.dial().open().await;
    relay.replace_file("relay.yaml", &one_provider("  models: [{id: better}]"));
    wait_for_new_hash(&relay, &before).await;
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["better"]);
    assert_eq!(metric(&relay, "modelrelay_config_last_reload_successful").await, Some("1".into()));
}

/// Returns the value of the first sample of that name.
async fn metric(relay: &Relay, name: &str) -> Option<String> {
    let text = relay.admin("GET", "/metrics").await.with_status(200).text();
    let line = text.lines().find(|line| line.starts_with(name) && !line[name.len()..].starts_with('_'))?;
    line.rsplit(' ').next().map(str::to_owned)
}

#[tokio::test]
async fn lower_queue_length_evicts_no_request() {
    let relay = Relay::builder().config(one_provider("  queue: {maxLength: 3}")).start().await;
    let clients: Vec<_> = (0..3).map(|_| relay.begin(chat("m"))).collect();
    relay.wait_for_queue_depth("local", 3).await;
    let before = config_hash(&relay).await;
    relay.replace_file("relay.yaml", &one_provider("  queue: {maxLength: 1}"));
    wait_for_new_hash(&relay, &before).await;
    assert_eq!(relay.fetch(chat("m")).await.status, 429);
    let mut worker = relay.worker(&["m"], 3).await;
    for _ in 0..3 {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    }
    for client in clients {
        let _ = client.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn new_timeout_applies_to_later_requests() {
    let relay = Relay::builder().config(one_provider("  queue: {timeout: 1h}")).start().await;
    let early = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let before = config_hash(&relay).await;
    relay.replace_file("relay.yaml", &one_provider("  queue: {timeout: 500ms}"));
    wait_for_new_hash(&relay, &before).await;
    assert_eq!(relay.fetch(chat("m")).await.status, 504);
    assert!(!early.is_answered());
}

#[tokio::test]
async fn reload_disturbs_no_stream_and_no_worker() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let mut response = pending.response().await;
    response.read_until("data: 1").await;
    let before = config_hash(&relay).await;
    relay.replace_file("relay.yaml", &one_provider("  requestTimeout: 10m\n  queue: {maxLength: 5}"));
    wait_for_new_hash(&relay, &before).await;
    worker.stream_on(&job, "data: 2\n\n").await;
    worker.end_stream(&job).await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: 1\n\ndata: 2\n\n", false));
    worker.expect_quiet().await;
}

#[tokio::test]
async fn key_requirement_changes_without_restart() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    assert_eq!(relay.get("/v1/models").await.status, 200);
    relay.replace_file("relay.yaml", &format!("requireApiKeys: true\n{}", one_provider("")));
    relay.eventually("keys are required", || async { relay.get("/v1/models").await.status == 401 }).await;
    relay.replace_file("relay.yaml", &format!("requireApiKeys: false\n{}", one_provider("")));
    relay.eventually("keys are not required", || async { relay.get("/v1/models").await.status == 200 }).await;
}

#[tokio::test]
async fn new_api_key_keeps_configuration_hash() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    let before = config_hash(&relay).await;
    let _ = relay.admin_post("/admin/keys", &json!({"name": "k"})).await.with_status(201);
    let _ = relay.fetch(Request::get("/v1/models")).await.with_status(200);
    assert_eq!(config_hash(&relay).await, before);
}

#[tokio::test]
async fn worker_registering_for_removed_provider_is_closed() {
    let relay = Relay::builder().config(two_providers("", "")).start().await;
    let mut worker = relay.dial().provider("other").open().await;
    relay.replace_file("relay.yaml", &one_provider(""));
    relay.log().wait_for_line("provider removed").await;
    worker.register_core1(&["m"], 1).await;
    worker.expect("graceful_shutdown").await;
    assert_eq!(worker.expect_close().await.0, 1000);
}

#[tokio::test]
async fn worker_registering_with_removed_secret_is_closed() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    let mut worker = relay.dial().open().await;
    let other = "providers: [{name: local, workerSecrets: [{value: another-secret-of-the-tests}]}]";
    relay.replace_file("relay.yaml", other);
    relay.log().wait_for_line("configuration applied").await;
    worker.register_core1(&["m"], 1).await;
    worker.expect("graceful_shutdown").await;
    assert_eq!(worker.expect_close().await.0, 1008);
}

#[tokio::test]
async fn admin_cancels_running_request_of_removed_provider() {
    let relay = Relay::builder().config(two_providers("", "")).start().await;
    let mut worker = relay.dial().provider("other").open().await;
    worker.register(&["m"], 1).await;
    let pending = relay.begin(chat("m").header("x-modelrelay-provider", "other").header("x-request-id", "mine"));
    let job = worker.expect_request().await;
    relay.replace_file("relay.yaml", &one_provider(""));
    relay.log().wait_for_line("provider removed").await;
    worker.expect("graceful_shutdown").await;
    let _ = relay.admin("POST", "/admin/requests/mine/cancel").await.with_status(202);
    worker.expect_cancel(&job.id).await;
    let _ = pending.reply().await.with_status(503);
}
