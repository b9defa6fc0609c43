//! Limits of the tokens that an API key may use within a minute and a day.

use modelrelay_harness::client::{Reply, Request};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker::FakeWorker;
use serde_json::{Value, json};

use crate::keys_update::change;
use crate::support::{anthropic_error, chat, chat_stream, check_retry_after, messages, openai_error};
use crate::usage::{finish, new_key, stored, wait_for_requests, wait_for_stored, with_keys};

/// One client with a limited key, and one worker.
struct Limited {
    relay: Relay,
    worker: FakeWorker,
    id: String,
    secret: String,
    /// The requests so far.
    sent: u64,
}

impl Limited {
    async fn start(limits: Value) -> Self {
        let relay = with_keys(stored()).start().await;
        let worker = relay.core1_worker(&["m"], 4).await;
        let mut settings = json!({"name": "k"});
        settings.as_object_mut().expect("an object").extend(limits.as_object().expect("limits").clone());
        let (id, secret) = new_key(&relay, &settings).await;
        Self { relay, worker, id, secret, sent: 0 }
    }

    fn chat(&self) -> Request {
        chat("m").bearer(&self.secret)
    }

    /// Sends a request that uses these tokens of prompt and response. Returns once it is settled, with the estimate of
    /// its prompt.
    async fn accepted(&mut self, prompt: u64, completion: u64) -> (Reply, u64) {
        let pending = self.relay.begin(self.chat());
        let job = self.worker.expect_request().await;
        self.worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
        self.worker.pieces(&job, b"{}").await;
        finish(&mut self.worker, &job, [prompt, 0, completion]).await;
        let reply = pending.reply().await.with_status(200);
        self.settled().await;
        (reply, estimate(job.body.len()))
    }

    /// Sends a request that is rejected. Returns the response and its message.
    async fn rejected(&mut self) -> (Reply, String) {
        let reply = self.relay.fetch(self.chat()).await;
        let message = openai_error(&reply, 429, "rate_limit_error", "token_limit");
        check_retry_after(&reply);
        self.settled().await;
        (reply, message)
    }

    /// Waits until one more request is counted, and so settled.
    async fn settled(&mut self) {
        self.sent += 1;
        wait_for_requests(&self.relay, self.sent).await;
    }

    async fn change(&self, limits: Value) {
        let _ = change(&self.relay, &self.id, limits).await.with_status(200);
    }
}

fn estimate(body_bytes: usize) -> u64 {
    (body_bytes as u64).div_ceil(4)
}

/// The limit and the free tokens that a response reports.
fn reported(reply: &Reply) -> Option<(u64, u64)> {
    let [limit, remaining, reset] = ["limit", "remaining", "reset"].map(|name| {
        let values = reply.headers.all(&format!("x-ratelimit-{name}-tokens"));
        assert!(values.len() <= 1, "{name} is repeated: {values:?}");
        values.into_iter().next()
    });
    assert_eq!((limit.is_some(), remaining.is_some()), (reset.is_some(), reset.is_some()));
    Some((limit?.parse().expect("a number"), remaining?.parse().expect("a number")))
}

fn reset(reply: &Reply) -> String {
    reply.header("x-ratelimit-reset-tokens").expect("a time")
}

#[tokio::test]
async fn key_beyond_tokens_per_minute_is_429() {
    let mut key = Limited::start(json!({"tokens_per_minute": 60})).await;
    key.accepted(500, 160).await;
    let (reply, message) = key.rejected().await;
    assert!(message.contains("60 tokens per minute (tokens_per_minute)") && message.contains("again in "), "{message}");
    assert_eq!(reported(&reply), Some((60, 0)));
    // It refills one token per second. Until one is free, 601 seconds pass; more than clients wait for.
    let reset = reset(&reply);
    assert!(reset.starts_with("10m") || reset == "11m0s", "{reset}");
    assert_eq!(reply.header("retry-after").as_deref(), Some("60"));
    let reply = key.relay.fetch(messages("m").bearer(&key.secret)).await;
    anthropic_error(&reply, 429, "rate_limit_error");
    assert_eq!(reported(&reply), Some((60, 0)));
    let series = "modelrelay_requests_total{code=\"429\",endpoint=\"chat_completions\",model=\"unknown\",outcome=\"client_error\"";
    assert_eq!(key.relay.metric(series).await, 1.0);
    // A higher limit applies at once.
    key.sent += 1;
    key.change(json!({"tokens_per_minute": 1_000_000})).await;
    let (reply, _) = key.accepted(1, 1).await;
    assert_eq!(reported(&reply).map(|(limit, _)| limit), Some(1_000_000));
}

#[tokio::test]
async fn tokens_per_day_are_counted_exactly() {
    let mut key = Limited::start(json!({"tokens_per_day": 1000})).await;
    let (reply, estimate) = key.accepted(700, 200).await;
    assert_eq!(reported(&reply), Some((1000, 1000 - estimate)));
    let (reply, estimate) = key.accepted(60, 40).await;
    assert_eq!(reported(&reply), Some((1000, 100 - estimate)));
    let (reply, message) = key.rejected().await;
    assert!(message.contains("1000 tokens per day (tokens_per_day)"), "{message}");
    assert_eq!(reported(&reply), Some((1000, 0)));
    assert!(reply.header("x-should-retry").is_some_and(|value| value == "false"), "a day is too long to retry");
    // The tighter limit is reported.
    key.change(json!({"tokens_per_day": 1100, "tokens_per_minute": 1_000_000})).await;
    let (reply, estimate) = key.accepted(1, 0).await;
    assert_eq!(reported(&reply), Some((1100, 100 - estimate)));
}

#[tokio::test]
async fn removed_limit_forgets_no_tokens() {
    let mut key = Limited::start(json!({"tokens_per_day": 100})).await;
    key.accepted(90, 20).await;
    key.rejected().await;
    key.change(json!({"tokens_per_day": null})).await;
    let (reply, _) = key.accepted(5, 5).await;
    assert_eq!(reported(&reply), None);
    key.change(json!({"tokens_per_day": 120})).await;
    key.rejected().await;
}

#[tokio::test]
async fn tokens_of_day_survive_kill() {
    let mut key = Limited::start(json!({"tokens_per_day": 1000})).await;
    key.accepted(600, 100).await;
    wait_for_stored(&key.relay, 1).await;
    key.relay = key.relay.restart_after_kill().await;
    key.worker = key.relay.core1_worker(&["m"], 4).await;
    let (reply, estimate) = key.accepted(290, 10).await;
    assert_eq!(reported(&reply), Some((1000, 300 - estimate)));
    key.rejected().await;
}

#[tokio::test]
async fn request_that_reached_no_worker_is_refunded() {
    let mut key = Limited::start(json!({"tokens_per_day": 1000})).await;
    key.worker.vanish();
    key.relay.wait_for_workers(0).await;
    let large = json!({"model": "m", "messages": [{"role": "user", "content": "word ".repeat(1000)}]});
    let waiting = key.relay.begin(Request::post("/v1/chat/completions", &large).bearer(&key.secret));
    key.relay.wait_for_queue_depth("local", 1).await;
    let reply = key.relay.fetch(chat("m").bearer(&key.secret)).await;
    openai_error(&reply, 429, "rate_limit_error", "token_limit");
    waiting.abandon();
    key.relay.wait_for_queue_depth("local", 0).await;
    key.worker = key.relay.core1_worker(&["m"], 4).await;
    key.sent += 1;
    key.settled().await;
    let (reply, estimate) = key.accepted(1, 0).await;
    assert_eq!(reported(&reply), Some((1000, 1000 - estimate)));
}

#[tokio::test]
async fn request_without_route_is_refunded() {
    let mut key = Limited::start(json!({"tokens_per_day": 1000})).await;
    let large = json!({"model": "missing", "messages": [{"role": "user", "content": "word ".repeat(1000)}]});
    let reply = key.relay.fetch(Request::post("/v1/chat/completions", &large).bearer(&key.secret)).await;
    openai_error(&reply, 404, "invalid_request_error", "model_not_found");
    key.settled().await;
    let (reply, estimate) = key.accepted(1, 0).await;
    assert_eq!(reported(&reply), Some((1000, 1000 - estimate)));
}

#[tokio::test]
async fn stream_without_counts_is_charged_by_estimate() {
    let mut key = Limited::start(json!({"tokens_per_day": 1000})).await;
    let pending = key.relay.begin(chat_stream("m").bearer(&key.secret));
    let job = key.worker.expect_request().await;
    key.worker.start_stream(&job, "data: 1\n\ndata: 2\n\n").await;
    key.worker.stream_on(&job, "data: [DONE]\n\n").await;
    key.worker.send(&json!({"type": "response_complete", "request_id": job.id})).await;
    let reply = pending.reply().await.with_status(200);
    // The relay has requested the usage.
    let used = estimate(job.body.len() - "\"stream_options\":{\"include_usage\":true},".len());
    assert_eq!(reported(&reply), Some((1000, 1000 - used)));
    key.settled().await;
    let (reply, estimate) = key.accepted(1, 0).await;
    assert_eq!(reported(&reply), Some((1000, 1000 - used - 3 - estimate)));
}

#[tokio::test]
async fn limit_of_key_replaces_that_of_backend() {
    let mut key = Limited::start(json!({})).await;
    let limits = [("x-ratelimit-limit-tokens", "8"), ("x-ratelimit-remaining-tokens", "7")];
    let limits = [limits[0], limits[1], ("x-ratelimit-reset-tokens", "6s"), ("x-ratelimit-limit-requests", "5")];
    let mut replies = Vec::new();
    for limit in [Value::Null, json!(1000)] {
        key.change(json!({"tokens_per_day": limit})).await;
        let pending = key.relay.begin(key.chat());
        let job = key.worker.expect_request().await;
        key.worker.response_start(&job, 200, &limits).await;
        finish(&mut key.worker, &job, [0, 0, 0]).await;
        replies.push((pending.reply().await.with_status(200), estimate(job.body.len())));
        key.settled().await;
    }
    let [(without, _), (with, estimate)] = &replies[..] else { panic!("two replies") };
    assert_eq!((reported(without), reset(without)), (Some((8, 7)), "6s".to_owned()));
    assert_eq!(reported(with), Some((1000, 1000 - estimate)));
    assert_eq!(with.header("x-ratelimit-limit-requests").as_deref(), Some("5"));
}

#[tokio::test]
async fn key_without_limit_gets_no_headers() {
    let mut key = Limited::start(json!({"max_in_flight": 9})).await;
    let (reply, _) = key.accepted(100_000, 100_000).await;
    assert_eq!(reported(&reply), None);
    let (reply, _) = key.accepted(1, 1).await;
    assert_eq!(reported(&reply), None);
}
