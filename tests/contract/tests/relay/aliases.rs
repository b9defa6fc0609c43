//! Catalogues and aliases of `relay.yaml`.

use modelrelay_harness::{client::Request, relay::Relay};
use serde_json::json;

use crate::support::{chat, model_ids, one_provider, openai_error, post_bytes};

const CATALOGUE: &str = "  models:\n  - {id: org/big-model, aliases: [small, claude-sonnet-4-5]}\n  - {id: plain}\n";

async fn relay_with_catalogue() -> Relay {
    Relay::builder().config(one_provider(CATALOGUE)).start().await
}

#[tokio::test]
async fn alias_is_replaced_without_changing_other_bytes() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.worker(&["org/big-model"], 1).await;
    let sent = " {\"a\": {\"model\":\"small\"} ,\t\"model\" :  \"small\" , \"s\":\"\\\"model\\\":\\\"small\\\"\"}\n";
    let expected =
        " {\"a\": {\"model\":\"small\"} ,\t\"model\" :  \"org/big-model\" , \"s\":\"\\\"model\\\":\\\"small\\\"\"}\n";
    let pending = relay.begin(post_bytes("/v1/chat/completions", sent));
    let job = worker.expect_request().await;
    assert_eq!(String::from_utf8_lossy(&job.body), expected);
    assert_eq!(job.message["model"], "org/big-model");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn escaped_alias_is_replaced() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.core1_worker(&["org/big-model"], 1).await;
    let pending = relay.begin(post_bytes("/v1/chat/completions", r#"{"model":"sm\u0061ll","x":1}"#));
    let job = worker.expect_request().await;
    assert_eq!(String::from_utf8_lossy(&job.body), r#"{"model":"org/big-model","x":1}"#);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn body_without_alias_is_unchanged() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.worker(&["org/big-model"], 1).await;
    let sent = r#"{ "model" : "org\/big-model" , "x":1 }"#;
    let pending = relay.begin(post_bytes("/v1/chat/completions", sent));
    let job = worker.expect_request().await;
    assert_eq!(String::from_utf8_lossy(&job.body), sent);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn form_field_alias_is_replaced_leaving_other_bytes() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.core1_worker(&["org/big-model"], 1).await;
    let form = |model: &str| {
        format!(
            "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--b\r\n\
             Content-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nsmall\r\n--b--\r\n"
        )
    };
    let request = Request::new("POST", "/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=b")
        .body(form("small"));
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    assert_eq!(String::from_utf8_lossy(&job.body), form("org/big-model"));
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn model_list_sorts_catalogue_and_aliases() {
    let relay = relay_with_catalogue().await;
    let list = relay.get("/v1/models").await.json();
    assert_eq!(model_ids(&list), ["claude-sonnet-4-5", "org/big-model", "plain", "small"]);
    assert_eq!(relay.get("/v1/models/small").await.status, 200);
}

#[tokio::test]
async fn advertised_model_outside_catalogue_is_404() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.dial().open().await;
    let ack = worker.register(&["plain", "secret-other"], 1).await;
    assert_eq!(ack["models"], json!(["plain"]));
    assert!(ack["warnings"].to_string().contains("secret-other"), "{ack}");
    openai_error(&relay.fetch(chat("secret-other")).await, 404, "invalid_request_error", "model_not_found");
    worker.expect_quiet().await;
}

#[tokio::test]
async fn alias_advertised_by_worker_is_not_accepted() {
    let relay = relay_with_catalogue().await;
    let mut worker = relay.dial().open().await;
    let ack = worker.register(&["small", "plain"], 1).await;
    assert_eq!(ack["models"], json!(["plain"]), "an alias is not a model of the catalogue");
}
