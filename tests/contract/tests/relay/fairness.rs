//! Fair shares of a provider's workers between API keys, and the classes of requests.

use modelrelay_harness::client::{Pending, Request};
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::worker::{FakeWorker, Job};
use serde_json::json;

use crate::support::{anthropic_error, chat, check_retry_after, messages, one_provider, openai_error, tag_of, tagged};

fn strict() -> RelayBuilder {
    Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true")
}

async fn new_key(relay: &Relay, name: &str) -> String {
    let key = relay.admin_post("/admin/keys", &json!({"name": name})).await.with_status(201).json();
    key["secret"].as_str().expect("a secret").to_owned()
}

/// A worker with one slot, which a request uses.
struct Busy {
    worker: FakeWorker,
    running: Option<Job>,
    clients: Vec<Pending>,
}

impl Busy {
    async fn start(relay: &Relay, first: Request) -> Self {
        let mut worker = relay.worker(&["m"], 1).await;
        let clients = vec![relay.begin(first)];
        let running = Some(worker.expect_request().await);
        Self { worker, running, clients }
    }

    /// Sends a request that has to wait.
    async fn wait(&mut self, relay: &Relay, request: Request) {
        let before = relay.admin_json("/admin/requests").await["requests"].as_array().expect("a list").len();
        self.clients.push(relay.begin(request));
        let is_there = async || {
            relay.admin_json("/admin/requests").await["requests"].as_array().expect("a list").len() == before + 1
        };
        relay.eventually("the request waits", is_there).await;
    }

    /// Ends the running request, which has used these tokens, and returns the tag of the next one.
    async fn next(&mut self, (input, output): (u64, u64)) -> String {
        let job = self.running.take().expect("a request runs");
        let counts = json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output});
        let complete = json!({"type": "response_complete", "request_id": job.id, "status_code": 200,
            "headers": {}, "body": "{}", "token_counts": counts});
        self.worker.send(&complete).await;
        let job = self.worker.expect_request().await;
        let tag = tag_of(&job);
        self.running = Some(job);
        tag
    }

    /// Returns the tags of the next requests, each of which uses the same tokens.
    async fn order(&mut self, count: usize) -> Vec<String> {
        let mut order = Vec::new();
        for _ in 0..count {
            order.push(self.next((100, 10)).await);
        }
        order
    }
}

#[tokio::test]
async fn busy_key_does_not_delay_another_key() {
    let relay = strict().start().await;
    let (busy, light) = (new_key(&relay, "busy").await, new_key(&relay, "light").await);
    let mut play = Busy::start(&relay, tagged("m", "0").bearer(&busy)).await;
    for number in 1..=20 {
        play.wait(&relay, tagged("m", &number.to_string()).bearer(&busy)).await;
    }
    play.wait(&relay, tagged("m", "light").bearer(&light)).await;
    assert_eq!(play.order(3).await, ["light", "1", "2"]);
}

#[tokio::test]
async fn reported_usage_decides_between_keys() {
    let relay = strict().start().await;
    let (long, short) = (new_key(&relay, "long").await, new_key(&relay, "short").await);
    let mut play = Busy::start(&relay, tagged("m", "long 0").bearer(&long)).await;
    for number in 1..=7 {
        play.wait(&relay, tagged("m", &format!("long {number}")).bearer(&long)).await;
        play.wait(&relay, tagged("m", &format!("short {number}")).bearer(&short)).await;
    }
    assert_eq!(play.next((10, 10)).await, "short 1");
    assert_eq!(play.next((10, 10)).await, "long 1");
    // It has used as much as four short ones, although its body has the same size.
    assert_eq!(play.next((40, 60)).await, "short 2");
    assert_eq!(play.next((10, 10)).await, "short 3");
    assert_eq!(play.next((10, 10)).await, "short 4");
}

#[tokio::test]
async fn stream_cut_by_time_limit_is_charged() {
    let relay = strict().env("REQUEST_TIMEOUT_SECS", "4").start().await;
    let (talker, quiet) = (new_key(&relay, "talker").await, new_key(&relay, "quiet").await);
    let mut play = Busy::start(&relay, tagged("m", "quiet 0").bearer(&quiet)).await;
    let body = json!({"model": "m", "stream": true, "messages": [], "user": "talker 0"});
    play.wait(&relay, Request::post("/v1/chat/completions", &body).bearer(&talker)).await;
    // Two hundred tokens, more than the body of a request and less than the stream.
    assert_eq!(play.next((100, 50)).await, "talker 0");
    let job = play.running.take().expect("a request runs");
    play.worker.start_stream(&job, &"data: 1\n\n".repeat(300)).await;
    let mut stream = play.clients.pop().expect("its client").response().await;
    stream.read_until("data: 1\n\n").await;
    // Else a late timer would end them with it: their limit is the same.
    #[expect(clippy::disallowed_methods, reason = "the elapsed time is what differs")]
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    play.wait(&relay, tagged("m", "talker 1").bearer(&talker)).await;
    play.wait(&relay, tagged("m", "quiet 1").bearer(&quiet)).await;
    assert_eq!(play.worker.expect_cancel(&job.id).await["reason"], "timeout");
    assert_eq!(tag_of(&play.worker.expect_request().await), "quiet 1");
}

#[tokio::test]
async fn fifo_keeps_arrival_order_of_keys() {
    let relay = strict().env("FAIRNESS_MODE", "fifo").start().await;
    let (busy, light) = (new_key(&relay, "busy").await, new_key(&relay, "light").await);
    let mut play = Busy::start(&relay, tagged("m", "0").bearer(&busy)).await;
    for number in 1..=3 {
        play.wait(&relay, tagged("m", &number.to_string()).bearer(&busy).header("x-modelrelay-class", "batch")).await;
    }
    play.wait(&relay, tagged("m", "light").bearer(&light)).await;
    assert_eq!(play.order(4).await, ["1", "2", "3", "light"]);
}

#[tokio::test]
async fn requests_without_key_keep_arrival_order() {
    let relay = Relay::start().await;
    let mut play = Busy::start(&relay, tagged("m", "0")).await;
    for number in 1..=5 {
        play.wait(&relay, tagged("m", &number.to_string())).await;
    }
    assert_eq!(play.order(5).await, ["1", "2", "3", "4", "5"]);
}

#[tokio::test]
async fn class_header_lowers_and_cannot_raise() {
    let relay = Relay::start().await;
    let classed = |tag: &str, class| tagged("m", tag).header("x-modelrelay-class", class);
    let mut play = Busy::start(&relay, tagged("m", "0")).await;
    play.wait(&relay, classed("batch", "batch")).await;
    play.wait(&relay, tagged("m", "first")).await;
    play.wait(&relay, classed("not raised", "interactive")).await;
    assert_eq!(play.order(3).await, ["first", "not raised", "batch"]);
    let job = play.running.take().expect("a request runs");
    assert_eq!(job.header("x-modelrelay-class"), None, "the header is for the relay");
}

#[tokio::test]
async fn invalid_class_is_400_with_allowed_ones() {
    let relay = Relay::start().await;
    let reply = relay.fetch(chat("m").header("x-modelrelay-class", "urgent")).await;
    let message = openai_error(&reply, 400, "invalid_request_error", "invalid_class");
    assert!(message.contains("\"urgent\"") && message.contains("interactive, normal or batch"), "{message}");
    let reply = relay.fetch(messages("m").header("x-modelrelay-class", "Batch")).await;
    anthropic_error(&reply, 400, "invalid_request_error");
}

#[tokio::test]
async fn displaced_request_is_429_with_its_code() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "2").start().await;
    let mut play = Busy::start(&relay, tagged("m", "0")).await;
    let batch = |tag: &str| tagged("m", tag).header("x-modelrelay-class", "batch");
    play.wait(&relay, batch("older")).await;
    let youngest = relay.begin(batch("youngest"));
    relay.wait_for_queue_depth("local", 2).await;
    play.clients.push(relay.begin(tagged("m", "normal")));
    let reply = youngest.reply().await;
    let message = openai_error(&reply, 429, "rate_limit_error", "displaced");
    assert!(message.contains("higher class"), "{message}");
    check_retry_after(&reply);
    // Not by its own class.
    openai_error(&relay.fetch(batch("late")).await, 429, "rate_limit_error", "queue_full");
    assert_eq!(play.order(2).await, ["normal", "older"]);
    let displaced =
        "modelrelay_requests_total{code=\"429\",endpoint=\"chat_completions\",model=\"m\",outcome=\"displaced\"";
    assert_eq!(relay.metric(displaced).await, 1.0);
}

#[tokio::test]
async fn promoted_batch_passes_busier_key() {
    let relay = strict().env("PROMOTE_AFTER_SECS", "0.001").start().await;
    let (chats, jobs) = (new_key(&relay, "chats").await, new_key(&relay, "jobs").await);
    let mut play = Busy::start(&relay, tagged("m", "0").bearer(&chats)).await;
    play.wait(&relay, tagged("m", "job").bearer(&jobs).header("x-modelrelay-class", "batch")).await;
    for number in 1..=3 {
        play.wait(&relay, tagged("m", &number.to_string()).bearer(&chats)).await;
    }
    assert_eq!(play.order(2).await, ["job", "1"]);
}

#[tokio::test]
async fn waiting_requests_show_their_position() {
    let relay = strict().start().await;
    let (busy, light) = (new_key(&relay, "busy").await, new_key(&relay, "light").await);
    let mut play = Busy::start(&relay, chat("m").bearer(&busy)).await;
    for key in [&busy, &busy, &light] {
        play.wait(&relay, chat("m").bearer(key)).await;
    }
    let listed = relay.admin_json("/admin/requests").await;
    let positions: Vec<_> = listed["requests"].as_array().expect("a list").iter().map(|it| &it["position"]).collect();
    assert_eq!(positions, [&json!(null), &json!(2), &json!(3), &json!(1)]);
}

#[tokio::test]
async fn reload_changes_mode_for_later_requests() {
    let relay = strict().config(one_provider("  fairness: {mode: fifo}")).start().await;
    let (busy, light) = (new_key(&relay, "busy").await, new_key(&relay, "light").await);
    let hash = async || relay.admin_json("/admin/state").await["config_hash"].clone();
    let before = hash().await;
    relay.replace_file("relay.yaml", &one_provider("  fairness: {mode: shared, promoteAfter: 5s}"));
    relay.eventually("the new configuration is in force", async || hash().await != before).await;
    let mut play = Busy::start(&relay, tagged("m", "0").bearer(&busy)).await;
    for number in 1..=2 {
        play.wait(&relay, tagged("m", &number.to_string()).bearer(&busy)).await;
    }
    play.wait(&relay, tagged("m", "light").bearer(&light)).await;
    assert_eq!(play.order(3).await, ["light", "1", "2"]);
}

/// A worker with one slot, for which streams of two keys wait.
struct Streams {
    relay: Relay,
    worker: FakeWorker,
    clients: Vec<Pending>,
}

impl Streams {
    /// `count` streams of each of two keys wait behind a request of a third one.
    async fn start(count: usize) -> (Self, Job) {
        let relay = strict().start().await;
        let keys = [new_key(&relay, "other").await, new_key(&relay, "a").await, new_key(&relay, "b").await];
        let mut worker = relay.core1_worker(&["m"], 1).await;
        let stream = |tag: &str, key: &str| {
            let body = json!({"model": "m", "stream": true, "messages": [], "user": tag});
            Request::post("/v1/chat/completions", &body).bearer(key)
        };
        let mut clients = vec![relay.begin(stream("other", &keys[0]))];
        let first = worker.expect_request().await;
        for number in 0..count {
            for (tag, key) in [("a", &keys[1]), ("b", &keys[2])] {
                clients.push(relay.begin(stream(tag, key)));
                relay.wait_for_queue_depth("local", clients.len() as u64 - 1).await;
            }
            assert_eq!(clients.len(), 3 + 2 * number);
        }
        worker.start_stream(&first, "data: {}\n\n").await;
        (Self { relay, worker, clients }, first)
    }

    /// Begins the response to a request with this number of tokens, of one event each.
    async fn generate(&mut self, job: &Job, tokens: u64) {
        self.worker.start_stream(job, &"data: {}\n\n".repeat(tokens as usize)).await;
    }

    /// Ends a response, with or without a report of its usage. Returns the next request.
    async fn next(&mut self, job: &Job, used: Option<u64>) -> Job {
        let mut complete = json!({"type": "response_complete", "request_id": job.id});
        if let Some(output) = used {
            let input = job.body.len() as u64 / 4;
            complete["token_counts"] =
                json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output});
        }
        self.worker.send(&complete).await;
        self.worker.expect_request().await
    }

    /// Returns the keys of the next requests, each of which generates this number of tokens and reports them.
    async fn order(&mut self, mut job: Job, count: usize, tokens: u64) -> String {
        let mut order = String::new();
        for _ in 0..count {
            order.push_str(&tag_of(&job));
            self.generate(&job, tokens).await;
            job = self.next(&job, Some(tokens)).await;
        }
        order
    }
}

#[tokio::test]
async fn stream_without_usage_is_charged_its_output() {
    let (mut play, first) = Streams::start(10).await;
    let mut job = play.next(&first, None).await;
    let mut order = String::new();
    for _ in 0..12 {
        let tag = tag_of(&job);
        play.generate(&job, 50).await;
        job = play.next(&job, (tag == "a").then_some(50)).await;
        order.push_str(&tag);
    }
    assert_eq!(order, "ab".repeat(6));
}

#[tokio::test]
async fn cancelled_stream_is_charged_its_output() {
    let (mut play, first) = Streams::start(8).await;
    let job = play.next(&first, None).await;
    assert_eq!(tag_of(&job), "a");
    play.generate(&job, 200).await;
    let mut client = play.clients.remove(1).response().await;
    client.read_until("data").await;
    drop(client);
    play.worker.expect_cancel(&job.id).await;
    let job = play.worker.expect_request().await;
    assert_eq!(play.order(job, 5, 50).await, "bbbba");
}

#[tokio::test]
async fn stream_of_lost_worker_is_charged_its_output() {
    let (mut play, first) = Streams::start(8).await;
    let job = play.next(&first, None).await;
    play.generate(&job, 200).await;
    let mut client = play.clients.remove(1).response().await;
    client.read_until("data").await;
    let next = play.relay.core1_worker(&["m"], 0).await;
    std::mem::replace(&mut play.worker, next).vanish();
    play.relay.wait_for_workers(1).await;
    play.worker.grant(1).await;
    let job = play.worker.expect_request().await;
    assert_eq!(play.order(job, 5, 50).await, "bbbba");
}
