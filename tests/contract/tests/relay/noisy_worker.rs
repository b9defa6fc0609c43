//! Workers that send too much: in the log, about their models, in the heads of responses.

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, openai_error, wait_for_model};

#[tokio::test]
async fn flood_of_reports_makes_few_log_lines() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for number in 0..500 {
        worker.send(&json!({"type": "error", "code": "noise", "message": format!("report {number}")})).await;
    }
    worker.send(&json!({"type": "models_update", "models": ["n"], "current_load": 0})).await;
    wait_for_model(&relay, "n", true).await;
    let lines = relay.log().count_of("worker reported an error");
    assert!((1..50).contains(&lines), "{lines} lines for 500 reports");
}

#[tokio::test]
async fn flood_of_updates_ends_with_last_one() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for number in 0..20 {
        let models = json!(["m", format!("n{number}")]);
        worker.send(&json!({"type": "models_update", "models": models, "current_load": 0})).await;
    }
    wait_for_model(&relay, "n19", true).await;
    let lines = relay.log().count_of("models updated");
    assert!(lines < 15, "{lines} lines for 20 updates");
}

#[tokio::test]
async fn too_many_response_headers_fail_that_response() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for (count, size) in [(129, 1), (2, 40_000)] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        let names: Vec<String> = (0..count).map(|number| format!("openai-note-{number}")).collect();
        let value = "x".repeat(size);
        let headers: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
        worker.answer_with(&job, 200, &headers, b"{}").await;
        openai_error(&pending.reply().await, 502, "server_error", "bad_answer");
        worker.expect_cancel(&job.id).await;
    }
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"still": "there"})).await;
    assert_eq!(pending.reply().await.with_status(200).json(), json!({"still": "there"}));
}
