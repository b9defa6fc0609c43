//! `slots1`: the requests that a worker with a multiplexer may receive, and the handling of requests for models that it
//! does not hold.

use modelrelay_harness::{
    relay::Relay,
    worker::{core1_registration, new_instance_id, slot, slots1_registration},
};
use serde_json::json;

use crate::support::{
    anthropic_error, chat, chat_stream, check_retry_after, messages, messages_stream, model_ids, openai_error,
};

#[tokio::test]
async fn capability_is_acknowledged_with_core1_and_load_timeout() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut message = slots1_registration(&["a"], &[], &new_instance_id());
    message["capabilities"] = json!(["slots1"]);
    let ack = worker.register_with(message).await;
    assert_eq!(ack["capabilities"], json!(["core1", "slots1"]));
    assert_eq!(ack["limits"]["cold_timeout_ms"], 600_000);
    let mut plain = relay.dial().open().await;
    let ack = plain.register_core1(&["a"], 1).await;
    assert_eq!(ack["capabilities"], json!(["core1"]));
    assert_eq!(ack["limits"]["cold_timeout_ms"], 30_000);
}

#[tokio::test]
async fn slots_and_gates_without_capability_are_ignored() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut message = core1_registration(&["a", "b"], 4, &new_instance_id());
    message["slots"] = json!([slot("gpu0", "quarantined", &["a", "b"])]);
    worker.register_with(message).await;
    worker.send_slots(&[slot("gpu0", "quarantined", &["a", "b"])]).await;
    worker.send(&json!({"type": "grant", "slots": 1, "others": 0, "capacity": 1, "links": 1, "models": []})).await;
    let pending = relay.begin(chat("b"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn unloaded_model_waits_longer_than_queue_timeout() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.slots1_worker(&["a", "b"]).await;
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["a", "b"]);
    let pending = relay.begin(chat("b"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.open_gates(&[("a", 1)]).await;
    let _running = relay.begin(chat("a"));
    assert_eq!(worker.expect_request().await.message["model"], "a");
    // It arrives later, and its model is loaded.
    let late = relay.fetch(chat("a")).await;
    openai_error(&late, 504, "timeout_error", "queue_timeout");
    worker.expect_quiet().await;
    worker.open_gates(&[("b", 4)]).await;
    let job = worker.expect_request().await;
    assert_eq!(job.message["model"], "b");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn grant_limits_each_model_separately() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a", "b"]).await;
    let models = json!([{"id": "a", "slots": 1, "others": 0, "capacity": 1}, {"id": "b", "slots": 2, "others": 0, "capacity": 2}]);
    worker.send(&json!({"type": "grant", "slots": 0, "others": 9, "capacity": 0, "links": 1, "models": models})).await;
    let clients: Vec<_> = ["a", "a", "b", "b", "b"].into_iter().map(|model| relay.begin(chat(model))).collect();
    let mut sent = Vec::new();
    for _ in 0..3 {
        sent.push(worker.expect_request().await.message["model"].as_str().unwrap_or_default().to_owned());
    }
    sent.sort();
    assert_eq!(sent, ["a", "b", "b"]);
    relay.wait_for_queue_depth("local", 2).await;
    worker.expect_quiet().await;
    drop(clients);
}

#[tokio::test]
async fn grant_without_models_opens_no_gate() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    worker.grant(4).await;
    let _waiting = relay.begin(chat("a"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
}

#[tokio::test]
async fn request_refused_at_shut_gate_spends_no_attempt() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let pending = relay.begin(chat("a"));
    for _ in 0..6 {
        worker.open_gates(&[("a", 4)]).await;
        let job = worker.expect_request().await;
        worker.open_gates(&[]).await;
        worker.fail(&job.id, "at_capacity", "the gate is shut").await;
        relay.wait_for_queue_depth("local", 1).await;
        worker.expect_quiet().await;
    }
    worker.open_gates(&[("a", 4)]).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn request_severed_before_response_is_requeued_three_times() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    for request in [chat("a"), messages("a")] {
        let pending = relay.begin(request);
        for left in (0..4).rev() {
            worker.open_gates(&[("a", 4)]).await;
            let job = worker.expect_request().await;
            worker.open_gates(&[]).await;
            worker.fail(&job.id, "severed_by_swap", "the model was swapped out").await;
            relay.wait_for_queue_depth("local", u64::from(left > 0)).await;
        }
        let reply = pending.reply().await;
        check_retry_after(&reply);
        if reply.json()["type"] == "error" {
            anthropic_error(&reply, 503, "overloaded_error");
        } else {
            openai_error(&reply, 503, "service_unavailable_error", "severed_by_swap");
        }
    }
    let severed = relay.metric("modelrelay_requeues_total{provider=\"local\",reason=\"severed_by_swap\"}").await;
    assert!((severed - 6.0).abs() < 0.1, "{severed} requeues by a swap");
}

/// A severed swap and a loss use attempts of different kinds: three of each are survived.
#[tokio::test]
async fn severed_swaps_and_lost_workers_spend_separate_attempts() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let pending = relay.begin(chat("a"));
    for _ in 0..3 {
        worker.open_gates(&[("a", 4)]).await;
        let job = worker.expect_request().await;
        worker.open_gates(&[]).await;
        worker.fail(&job.id, "severed_by_swap", "the model was swapped out").await;
        relay.wait_for_queue_depth("local", 1).await;
    }
    for _ in 0..3 {
        worker.open_gates(&[("a", 4)]).await;
        worker.expect_request().await;
        worker.vanish();
        relay.wait_for_queue_depth("local", 1).await;
        worker = relay.slots1_worker(&["a"]).await;
    }
    worker.open_gates(&[("a", 4)]).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn severed_stream_ends_with_error_frame() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    worker.open_gates(&[("a", 4)]).await;
    for request in [chat_stream("a"), messages_stream("a")] {
        let pending = relay.begin(request);
        let job = worker.expect_request().await;
        worker.start_stream(&job, "data: {\"x\":1}\n\n").await;
        let mut response = pending.response().await;
        response.read_until("\n\n").await;
        worker.fail(&job.id, "severed_by_swap", "the model was swapped out").await;
        let reply = response.read_to_end().await;
        let text = reply.broken_stream();
        let frame = text.strip_prefix("data: {\"x\":1}\n\n").expect("the received frame stays");
        let (event, data) = frame.split_once("data: ").expect("an error frame");
        let data: serde_json::Value = serde_json::from_str(data.trim()).expect("JSON");
        if event.is_empty() {
            assert_eq!(data["error"]["code"], "severed_by_swap", "{text}");
        } else {
            assert_eq!((event, &data["error"]["type"]), ("event: error\n", &json!("overloaded_error")), "{text}");
        }
    }
    worker.expect_quiet().await;
}

#[tokio::test]
async fn load_timeout_is_503_with_remaining_time() {
    let relay = Relay::builder().env("COLD_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.dial().open().await;
    let mut loading = slot("gpu0", "loading", &["a"]);
    (loading["target"], loading["eta_ms"]) = (json!("a"), json!(21_000));
    worker.register_slots1(&["a"], &[loading]).await;
    let reply = relay.fetch(chat("a")).await;
    let message = openai_error(&reply, 503, "service_unavailable_error", "model_loading");
    // 21 s less the second that was waited, and less the delay of a busy machine.
    let left: u64 = reply.header("retry-after").and_then(|left| left.parse().ok()).expect("a number");
    assert!((5..=20).contains(&left), "{left} s");
    assert!(message.contains('a') && message.contains(&format!("{left} s")), "{message}");
    anthropic_error(&relay.fetch(messages("a")).await, 503, "overloaded_error");
    let series =
        "modelrelay_requests_total{code=\"503\",endpoint=\"chat_completions\",model=\"a\",outcome=\"model_loading\"";
    assert!((relay.metric(series).await - 1.0).abs() < 0.1, "outcome model_loading");
}

#[tokio::test]
async fn lost_multiplexers_request_is_requeued() {
    let relay = Relay::start().await;
    let mut one = relay.slots1_worker(&["a"]).await;
    one.open_gates(&[("a", 4)]).await;
    let pending = relay.begin(chat("a"));
    one.expect_request().await;
    let mut two = relay.slots1_worker(&["a"]).await;
    one.vanish();
    two.expect_demand("a", 1).await;
    two.open_gates(&[("a", 4)]).await;
    let job = two.expect_request().await;
    two.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn invalid_slots_are_refused_without_harm() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let many: Vec<_> = (0..65).map(|number| slot(&format!("gpu{number}"), "empty", &["a"])).collect();
    let ack = worker.register_with(slots1_registration(&["a"], &many, &new_instance_id())).await;
    let warnings = ack["warnings"].to_string();
    assert!(warnings.contains("slots"), "{warnings}");
    let long = "x".repeat(300);
    let nonsense = [
        many,
        vec![slot("", "empty", &["a"])],
        vec![slot("same", "empty", &["a"]), slot("same", "empty", &["a"])],
        vec![slot("gpu0", "empty", &["a", "a"])],
        vec![slot("gpu0", "empty", &[&long])],
        vec![slot(&long, "empty", &["a"])],
    ];
    worker.send_slots(&[slot("good", "empty", &["a"])]).await;
    for slots in nonsense {
        worker.send_slots(&slots).await;
    }
    worker.expect_quiet().await;
    let listed = relay.workers().await.remove(0);
    assert_eq!(listed["slots"][0]["id"], "good", "the last that made sense: {listed}");
    let logged = relay.log().wait_for_line("invalid slot report").await;
    assert!(logged.contains("65 slots"), "with the reason: {logged}");
    worker.send_slots(&[slot("", "empty", &["a"])]).await;
    worker.expect_quiet().await;
    assert_eq!(relay.log().count_of("invalid slot report"), 1, "invalid reports must be logged once a minute");
    worker.open_gates(&[("a", 4)]).await;
    let pending = relay.begin(chat("a"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn invalid_gates_are_refused_and_shut_all() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let entry = |id: &str| json!({"id": id, "slots": 1, "others": 0, "capacity": 1});
    let many: Vec<_> = (0..300).map(|number| entry(&format!("m{number}"))).collect();
    for models in [json!([entry("a"), entry("a")]), json!(many)] {
        worker.open_gates(&[("a", 1)]).await;
        worker.send(&json!({"type": "grant", "slots": 1, "links": 1, "models": models})).await;
        worker.expect_quiet().await;
        let waiting = relay.begin(chat("a"));
        relay.wait_for_queue_depth("local", 1).await;
        worker.expect_quiet().await;
        waiting.abandon();
        relay.wait_for_queue_depth("local", 0).await;
    }
}
