//! Placement by cache: later turns of a conversation, and where an operator sees why a request went to its worker.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::Relay;
use serde_json::{Value, json};

use crate::support::chat;

/// Returns the next turn of a conversation whose prompt is long enough to be recognized as one.
fn turn(turns: usize) -> Request {
    let mut messages = vec![json!({"role": "user", "content": "a long first message ".repeat(100)})];
    for number in 1..turns {
        messages.push(json!({"role": "assistant", "content": format!("answer {number}")}));
        messages.push(json!({"role": "user", "content": format!("question {number}")}));
    }
    Request::post("/v1/chat/completions", &json!({"model": "m", "messages": messages}))
}

async fn placements(relay: &Relay, decision: &str) -> f64 {
    relay.metric(&format!("modelrelay_placement_total{{decision=\"{decision}\",provider=\"local\",reason=\"\"}}")).await
}

/// Returns the placements of the unfinished requests.
async fn live_placements(relay: &Relay) -> Vec<Value> {
    let reply = relay.admin_json("/admin/requests").await;
    reply["requests"].as_array().expect("a list").iter().map(|request| request["placement"].clone()).collect()
}

#[tokio::test]
async fn later_turns_reach_same_worker_in_cache_mode() {
    let relay = Relay::builder().env("PLACEMENT", "cache").start().await;
    let mut one = relay.worker(&["m"], 2).await;
    let mut two = relay.worker(&["m"], 2).await;
    let mut turns = [0, 0];
    for number in 1..=6 {
        let pending = relay.begin(turn(number));
        let expected = if number == 1 { "new" } else { "home" };
        tokio::select! {
            job = one.expect_request() => {
                assert_eq!(live_placements(&relay).await, [expected]);
                turns[0] += 1;
                one.answer(&job, &json!({})).await;
            }
            job = two.expect_request() => {
                assert_eq!(live_placements(&relay).await, [expected]);
                turns[1] += 1;
                two.answer(&job, &json!({})).await;
            }
        }
        let _ = pending.reply().await.with_status(200);
    }
    assert!(turns == [6, 0] || turns == [0, 6], "{turns:?}");
    let (new, home) = (placements(&relay, "new").await, placements(&relay, "home").await);
    assert!((new - 1.0).abs() < 0.1 && (home - 5.0).abs() < 0.1, "{new} new, {home} home");
}

#[tokio::test]
async fn request_without_conversation_counts_as_least_load() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    assert_eq!(live_placements(&relay).await, ["least_load"]);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    let counted = placements(&relay, "least_load").await;
    assert!((counted - 1.0).abs() < 0.1, "{counted}");
}

#[tokio::test]
async fn response_names_its_worker_only_if_set() {
    for (wanted, expected) in [("true", Some("hand-played")), ("false", None)] {
        let relay = Relay::builder().env("WORKER_HEADER", wanted).start().await;
        let mut worker = relay.worker(&["m"], 1).await;
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.answer_with(&job, 200, &[("x-modelrelay-worker", "forged")], b"{}").await;
        let reply = pending.reply().await.with_status(200);
        assert_eq!(reply.header("x-modelrelay-worker").as_deref(), expected, "{wanted}");
    }
}

#[tokio::test]
async fn worker_shows_share_of_cached_prompts() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let hit_rate = async || relay.admin_json("/admin/workers").await["workers"][0]["cache_hit_rate"].clone();
    assert_eq!(hit_rate().await, json!(null));
    for (tokens, expected) in [
        (json!({"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901}), json!(null)),
        (json!({"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101, "cached_tokens": 50}), json!(0.5)),
        (json!({"prompt_tokens": 300, "completion_tokens": 1, "total_tokens": 301, "cached_tokens": 250}), json!(0.75)),
    ] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        let complete = json!({"type": "response_complete", "request_id": job.id, "status_code": 200, "headers": {},
            "body": "{}", "token_counts": tokens});
        worker.send(&complete).await;
        let _ = pending.reply().await.with_status(200);
        assert_eq!(hit_rate().await, expected);
    }
}
