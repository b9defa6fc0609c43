//! `/v1/models`, which the relay serves itself.

use modelrelay_harness::{client::Request, relay::Relay};

use crate::support::{anthropic_error, model_ids, openai_error, wait_for_model};

#[tokio::test]
async fn model_list_is_sorted_without_duplicates() {
    let relay = Relay::start().await;
    let _one = relay.worker(&["zeta", "llama3.2:3b"], 1).await;
    let _two = relay.worker(&["Qwen/Qwen3-8B", "zeta"], 1).await;
    let list = relay.get("/v1/models").await.with_status(200).json();
    assert_eq!(list["object"], "list");
    let mut ids = model_ids(&list);
    assert_eq!(ids.len(), 3, "{list}");
    let listed = ids.clone();
    ids.sort();
    assert_eq!(listed, ids);
    for model in list["data"].as_array().expect("data") {
        assert_eq!(model["object"], "model");
        assert!(model["created"].is_u64(), "{model}");
        assert!(model["owned_by"].is_string(), "{model}");
    }
}

#[tokio::test]
async fn anthropic_model_list_extends_openai_list() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["a", "b"], 1).await;
    let reply = relay.fetch(Request::get("/v1/models").header("anthropic-version", "2023-06-01")).await;
    let list = reply.with_status(200).json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["has_more"], false);
    assert_eq!(list["first_id"], "a");
    assert_eq!(list["last_id"], "b");
    for model in list["data"].as_array().expect("data") {
        assert_eq!(model["type"], "model");
        assert_eq!(model["object"], "model");
        assert_eq!(model["display_name"], model["id"]);
        let created_at = model["created_at"].as_str().expect("created_at");
        assert!(created_at.len() >= 20 && created_at.contains('T'), "RFC 3339: {created_at}");
    }
}

#[tokio::test]
async fn empty_model_list_is_valid() {
    let relay = Relay::start().await;
    let list = relay.fetch(Request::get("/v1/models").header("anthropic-version", "2023-06-01")).await.json();
    assert_eq!(model_ids(&list), Vec::<String>::new());
    assert_eq!(list["has_more"], false);
    assert!(list["first_id"].is_null() && list["last_id"].is_null(), "{list}");
}

#[tokio::test]
async fn model_id_with_slash_or_colon_is_found() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["Qwen/Qwen3-8B", "llama3.2:3b"], 1).await;
    for (path, id) in [
        ("/v1/models/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/v1/models/Qwen%2FQwen3-8B", "Qwen/Qwen3-8B"),
        ("/v1/models/llama3.2:3b", "llama3.2:3b"),
        ("/v1/models/llama3.2%3A3b", "llama3.2:3b"),
    ] {
        let model = relay.get(path).await.with_status(200).json();
        assert_eq!(model["id"], id);
        assert_eq!(model["object"], "model");
    }
}

#[tokio::test]
async fn unserved_model_is_404_in_both_dialects() {
    let relay = Relay::start().await;
    openai_error(&relay.get("/v1/models/nope").await, 404, "invalid_request_error", "model_not_found");
    let request = Request::get("/v1/models/nope").header("anthropic-version", "2023-06-01");
    anthropic_error(&relay.fetch(request).await, 404, "not_found_error");
}

#[tokio::test]
async fn model_list_follows_connected_workers() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["a"], 1).await;
    wait_for_model(&relay, "a", true).await;
    worker.update_models(&["b"]).await;
    wait_for_model(&relay, "b", true).await;
    wait_for_model(&relay, "a", false).await;
    worker.vanish();
    wait_for_model(&relay, "b", false).await;
}
