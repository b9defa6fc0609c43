//! Stored Responses live inside one worker: requests that refer to them go only there.

use modelrelay_harness::{
    client::Request,
    relay::Relay,
    worker::{FakeWorker, Job, core1_registration, new_instance_id},
};
use serde_json::{Value, json};

use crate::support::{chat, openai_error, two_providers};

fn responses(more: Value) -> Request {
    let mut body = json!({"model": "m", "input": "hi"});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    Request::post("/v1/responses", &body)
}

/// Completes a Responses request so that the relay learns the id.
async fn answer_with_id(worker: &mut FakeWorker, job: &Job, id: &str) {
    worker.response_start(job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(job, json!({"id": id, "object": "response"}).to_string().as_bytes()).await;
    worker.send(&json!({"type": "response_complete", "request_id": job.id, "response_id": id})).await;
}

/// Two workers of the same model; the first has created response `resp_1`.
async fn scene() -> (Relay, FakeWorker, FakeWorker) {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "3").start().await;
    let mut maker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(responses(json!({})));
    let job = maker.expect_request().await;
    let other = relay.core1_worker(&["m"], 4).await;
    answer_with_id(&mut maker, &job, "resp_1").await;
    let _ = pending.reply().await.with_status(200);
    (relay, maker, other)
}

#[tokio::test]
async fn follow_up_goes_to_worker_of_its_response() {
    let (relay, mut maker, mut other) = scene().await;
    for _ in 0..3 {
        let pending = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
        let job = maker.expect_request().await;
        maker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    other.expect_quiet().await;
}

#[tokio::test]
async fn follow_up_waits_for_its_busy_worker() {
    let (relay, mut maker, mut other) = scene().await;
    let running = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
    let first = maker.expect_request().await;
    let waiting = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
    relay.wait_for_queue_depth("local", 1).await;
    other.expect_quiet().await;
    maker.answer(&first, &json!({})).await;
    let second = maker.expect_request().await;
    maker.answer(&second, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    let _ = waiting.reply().await.with_status(200);
}

/// Another relay's request may take the slot first, and a gate may close: nothing was sent, so nothing is lost.
#[tokio::test]
async fn follow_up_refused_at_capacity_waits_again() {
    let (relay, mut maker, mut other) = scene().await;
    let pending = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
    for _ in 0..5 {
        let job = maker.expect_request().await;
        maker.grant_of(0, 1, 1, 2).await;
        maker.fail(&job.id, "at_capacity", "full").await;
        relay.wait_for_queue_depth("local", 1).await;
        maker.grant_of(1, 0, 1, 2).await;
    }
    let job = maker.expect_request().await;
    maker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    other.expect_quiet().await;
}

#[tokio::test]
async fn response_is_read_and_cancelled_at_its_worker() {
    let (relay, mut maker, mut other) = scene().await;
    for (method, path) in [("GET", "/v1/responses/resp_1?include=x"), ("POST", "/v1/responses/resp_1/cancel")] {
        let pending = relay.begin(Request::new(method, path));
        let job = maker.expect_request().await;
        assert_eq!(job.path(), path);
        assert_eq!(job.message["method"].as_str().unwrap_or("POST"), method);
        assert_eq!(job.message["content_length"], 0);
        maker.answer(&job, &json!({"id": "resp_1"})).await;
        assert_eq!(pending.reply().await.with_status(200).json()["id"], "resp_1");
    }
    other.expect_quiet().await;
}

#[tokio::test]
async fn unknown_response_is_404() {
    let (relay, mut maker, mut other) = scene().await;
    let reply = relay.get("/v1/responses/resp_unknown").await;
    openai_error(&reply, 404, "invalid_request_error", "previous_response_not_found");
    let reply = relay.fetch(responses(json!({"previous_response_id": "resp_unknown"}))).await;
    openai_error(&reply, 404, "invalid_request_error", "previous_response_not_found");
    maker.expect_quiet().await;
    other.expect_quiet().await;
}

#[tokio::test]
async fn unknown_response_goes_to_sole_worker_of_model() {
    let relay = Relay::start().await;
    let mut sole = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(responses(json!({"previous_response_id": "resp_before_a_restart"})));
    let job = sole.expect_request().await;
    sole.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

/// The older link finishes a long response meanwhile.
#[tokio::test]
async fn sole_worker_changing_links_is_one_worker() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut older = relay.dial().open().await;
    let ack = older.register_with(core1_registration(&["m"], 2, &instance)).await;
    older.grant(2).await;
    let long = relay.begin(chat("m"));
    let held = older.expect_request().await;
    let mut newer = relay.dial().open().await;
    let mut registration = core1_registration(&["m"], 2, &instance);
    registration["succeeds"] = json!([ack["relay_id"]]);
    newer.register_with(registration).await;
    newer.grant(1).await;
    assert_eq!(older.expect("graceful_shutdown").await["reason"], "succeeded");
    for probe in ["/health", "/readyz"] {
        assert_eq!(relay.get(probe).await.json()["workers_connected"], 1, "{probe}");
    }
    for _ in 0..2 {
        let pending = relay.begin(Request::get("/v1/responses/resp_before_a_restart"));
        let job = newer.expect_request().await;
        newer.answer(&job, &json!({"id": "resp_before_a_restart"})).await;
        let _ = pending.reply().await.with_status(200);
    }
    older.answer(&held, &json!({})).await;
    let _ = long.reply().await.with_status(200);
}

/// Whatever the request is for, the id is unknown: it must not cause a swap.
#[tokio::test]
async fn unknown_response_loads_no_model() {
    let relay = Relay::start().await;
    let mut sole = relay.slots1_worker(&["a", "b"]).await;
    let reply = relay.get("/v1/responses/resp_before_a_restart").await;
    openai_error(&reply, 404, "invalid_request_error", "previous_response_not_found");
    sole.expect_quiet().await;
    sole.open_gates(&[("b", 4)]).await;
    sole.expect_quiet().await;
    let pending = relay.begin(Request::get("/v1/responses/resp_before_a_restart"));
    let job = sole.expect_request().await;
    assert_eq!(job.message["model"], "b");
    sole.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn unknown_response_is_requested_with_allowed_model() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let mut sole = relay.core1_worker(&["a", "b"], 1).await;
    let key = async |models: Value| {
        let settings = json!({"name": "k", "models": models});
        let key = relay.admin_post("/admin/keys", &settings).await.with_status(201).json();
        key["secret"].as_str().expect("a secret").to_owned()
    };
    let of_b = key(json!(["b"])).await;
    let pending = relay.begin(Request::get("/v1/responses/resp_before_a_restart").bearer(&of_b));
    let job = sole.expect_request().await;
    assert_eq!(job.message["model"], "b");
    sole.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    let of_c = key(json!(["c"])).await;
    let reply = relay.fetch(Request::get("/v1/responses/resp_before_a_restart").bearer(&of_c)).await;
    assert_eq!(reply.status, 403);
}

#[tokio::test]
async fn unknown_response_with_two_workers_is_404() {
    let relay = Relay::start().await;
    let mut workers = [relay.core1_worker(&["m"], 1).await, relay.core1_worker(&["m"], 1).await];
    assert_eq!(relay.get("/health").await.json()["workers_connected"], 2);
    let reply = relay.get("/v1/responses/resp_before_a_restart").await;
    openai_error(&reply, 404, "invalid_request_error", "previous_response_not_found");
    for worker in &mut workers {
        worker.expect_quiet().await;
    }
}

#[tokio::test]
async fn follow_up_is_never_sent_to_another_worker() {
    let (relay, mut maker, mut other) = scene().await;
    let pending = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
    maker.expect_request().await;
    maker.vanish();
    let reply = pending.reply().await;
    assert!((400..=599).contains(&reply.status), "status {}", reply.status);
    other.expect_quiet().await;
    let plain = relay.begin(chat("m"));
    let job = other.expect_request().await;
    other.answer(&job, &json!({})).await;
    let _ = plain.reply().await.with_status(200);
}

#[tokio::test]
async fn streamed_response_id_is_recorded_from_completion() {
    let relay = Relay::start().await;
    let mut maker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(responses(json!({"stream": true})));
    let job = maker.expect_request().await;
    let mut other = relay.core1_worker(&["m"], 4).await;
    maker.start_stream(&job, "event: response.created\ndata: {}\n\n").await;
    maker.send(&json!({"type": "response_complete", "request_id": job.id, "response_id": "resp_s"})).await;
    let _ = pending.reply().await.with_status(200);
    let pending = relay.begin(Request::get("/v1/responses/resp_s"));
    let job = maker.expect_request().await;
    maker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    other.expect_quiet().await;
}

#[tokio::test]
async fn another_provider_cannot_take_over_response_id() {
    let relay = Relay::builder().config(two_providers("  models: [{id: a}]", "  models: [{id: b}]")).start().await;
    let mut maker = relay.core1_worker(&["a"], 1).await;
    let mut thief = relay.dial().provider("other").open().await;
    thief.register_core1(&["b"], 1).await;
    thief.grant(1).await;
    for (model, worker) in [("a", &mut maker), ("b", &mut thief)] {
        let pending = relay.begin(Request::post("/v1/responses", &json!({"model": model, "input": "hi"})));
        let job = worker.expect_request().await;
        answer_with_id(worker, &job, "resp_1").await;
        let _ = pending.reply().await.with_status(200);
    }
    let follow_up = json!({"model": "a", "input": "hi", "previous_response_id": "resp_1"});
    for request in [Request::get("/v1/responses/resp_1"), Request::post("/v1/responses", &follow_up)] {
        let pending = relay.begin(request);
        let job = maker.expect_request().await;
        maker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    let pending = relay.begin(Request::get("/v1/responses/resp_1").header("x-modelrelay-provider", "other"));
    let job = thief.expect_request().await;
    thief.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn another_worker_cannot_take_over_response_id() {
    let (relay, mut maker, mut other) = scene().await;
    let busy = relay.begin(responses(json!({"previous_response_id": "resp_1"})));
    let held = maker.expect_request().await;
    let pending = relay.begin(responses(json!({})));
    let job = other.expect_request().await;
    answer_with_id(&mut other, &job, "resp_1").await;
    let _ = pending.reply().await.with_status(200);
    maker.answer(&held, &json!({})).await;
    let _ = busy.reply().await.with_status(200);
    let pending = relay.begin(Request::get("/v1/responses/resp_1"));
    let job = maker.expect_request().await;
    maker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    other.expect_quiet().await;
}

#[tokio::test]
async fn stored_response_is_unknown_to_other_keys() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let mut maker = relay.core1_worker(&["m"], 1).await;
    let key = async |name: &str| {
        let key = relay.admin_post("/admin/keys", &json!({"name": name})).await.with_status(201).json();
        key["secret"].as_str().expect("a secret").to_owned()
    };
    let (owner, other) = (key("owner").await, key("other").await);
    let pending = relay.begin(responses(json!({})).bearer(&owner));
    let job = maker.expect_request().await;
    answer_with_id(&mut maker, &job, "resp_1").await;
    let _ = pending.reply().await.with_status(200);
    let follow_up = json!({"previous_response_id": "resp_1"});
    let requests = || {
        let by_id = [("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")];
        let by_id = by_id.map(|(method, path)| Request::new(method, path));
        by_id.into_iter().chain([responses(follow_up.clone())])
    };
    for request in requests() {
        let reply = relay.fetch(request.bearer(&other)).await;
        let message = openai_error(&reply, 404, "invalid_request_error", "previous_response_not_found");
        assert_eq!(message, "no connected worker has this response");
    }
    maker.expect_quiet().await;
    for request in requests() {
        let pending = relay.begin(request.bearer(&owner));
        let job = maker.expect_request().await;
        maker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
}
