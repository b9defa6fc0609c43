//! The names of models: for clients, which may use aliases, and for backends, whose names clients need not know.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend, Head};
use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::rig::{LONG, Rig, gate, slots1, worker_with};

/// One slot: `qwen`, whose backend uses another name, and `b`.
fn yaml(qwen: &FakeBackend, b: &FakeBackend) -> String {
    let model = |id: &str, aliases: Value, expect: &str, url: String| json!({"id": id, "aliases": aliases, "expectModel": expect, "url": url, "maxConcurrency": 2});
    let models = [
        model("qwen", json!(["qwen3", "claude-sonnet-4-5"]), "Qwen/Qwen3-8B", qwen.url()),
        model("b", json!(["bee"]), "b", b.url()),
    ];
    let slots = json!([{"id": "gpu0", "driver": "static", "models": models}]);
    json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": slots}}).to_string()
}

/// A backend that knows only one name, and echoes its requests.
async fn backend(name: &'static str) -> FakeBackend {
    let backend = FakeBackend::with_models(&[name]).await;
    backend.answer_with(move |head: &Head, body: &[u8]| {
        let Ok(body) = serde_json::from_slice::<Value>(body) else {
            return Answer::new(200, &[("content-type", "application/octet-stream")], body);
        };
        let status = if body["model"] == name { 200 } else { 404 };
        if body["stream"] == true {
            let text = format!("data: {}\n\ndata: [DONE]\n\n", body["model"]);
            return Answer::new(status, &[("content-type", "text/event-stream")], text.as_bytes());
        }
        Answer::json(status, &json!({"path": head.path(), "model": body["model"], "asked": body}))
    });
    backend
}

struct Named {
    relay: Relay,
    worker: WorkerProcess,
    _backends: [FakeBackend; 2],
    _config: NamedTempFile,
}

impl Named {
    async fn start() -> Self {
        let (qwen, b) = (backend("Qwen/Qwen3-8B").await, backend("b").await);
        let relay = Relay::start().await;
        let (config, builder) = worker_with(&yaml(&qwen, &b));
        let url = format!("http://{}", relay.addr());
        let worker = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;
        wait_for_model(&relay, "qwen3").await;
        Self { relay, worker, _backends: [qwen, b], _config: config }
    }
}

fn chat(model: &str) -> Value {
    json!({"messages": [{"role": "user", "content": "\u{00e9}\" model"}], "model": model, "metadata": {"model": model}})
}

#[tokio::test]
async fn every_model_name_reaches_backend_as_its_own() {
    let Named { relay, worker, _backends, _config } = Named::start().await;
    let listed = relay.get("/v1/models").await.json();
    let listed: Vec<_> = listed["data"].as_array().into_iter().flatten().map(|model| model["id"].clone()).collect();
    assert_eq!(listed, ["b", "bee", "claude-sonnet-4-5", "qwen", "qwen3"]);
    for (model, name) in
        [("qwen", "Qwen/Qwen3-8B"), ("claude-sonnet-4-5", "Qwen/Qwen3-8B"), ("bee", "b"), ("qwen3", "Qwen/Qwen3-8B")]
    {
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize"]
        {
            let reply = relay.fetch(Request::post(path, &chat(model))).await.with_status(200).json();
            assert_eq!((&reply["path"], &reply["model"]), (&json!(path), &json!(name)), "{model}: {reply}");
            let mut expected = chat(model);
            expected["model"] = json!(name);
            assert_eq!(reply["asked"], expected, "the rest of the body must not change");
        }
        let mut streamed = chat(model);
        streamed["stream"] = json!(true);
        let reply = relay.fetch(Request::post("/v1/chat/completions", &streamed)).await.with_status(200);
        assert_eq!(reply.text(), format!("data: \"{name}\"\n\ndata: [DONE]\n\n"));
    }
    assert_eq!(worker.metric("modelrelay_worker_swaps_total{").await, 2.0, "an alias is no reason to swap");
}

#[tokio::test]
async fn concurrent_requests_by_id_and_alias_are_served() {
    let Named { relay, worker, _backends, _config } = Named::start().await;
    let names = ["qwen", "qwen3", "claude-sonnet-4-5"];
    let pending: Vec<_> =
        (0..60).map(|n| relay.begin(Request::post("/v1/chat/completions", &chat(names[n % 3])))).collect();
    for pending in pending {
        assert_eq!(pending.reply().await.with_status(200).json()["model"], "Qwen/Qwen3-8B");
    }
    assert_eq!(worker.metric("modelrelay_worker_swaps_total{").await.abs(), 0.0);
    let refused = relay.metric("modelrelay_requeues_total{provider=\"local\",reason=\"at_capacity\"").await;
    assert_eq!(refused.abs(), 0.0, "more was sent than the gate let through");
}

#[tokio::test]
async fn long_body_is_renamed_while_streaming() {
    let Named { relay, worker: _worker, _backends, _config } = Named::start().await;
    let text = "x\\\"".repeat(3 << 20);
    for body in [
        format!("{{\"input\":\"{text}\",\"model\":\"claude-sonnet-4-5\"}}"),
        format!("{{\"model\":\"qwen\",\"input\":\"{text}\"}}"),
    ] {
        let request = Request::post("/v1/embeddings", &json!({})).body(body);
        let reply = relay.fetch(request).await.with_status(200).json();
        assert_eq!(reply["model"], "Qwen/Qwen3-8B");
        assert_eq!(reply["asked"]["input"].as_str().map(str::len), Some(6 << 20));
    }
}

#[tokio::test]
async fn model_of_form_is_renamed() {
    let Named { relay, worker: _worker, _backends, _config } = Named::start().await;
    let form = |model: &str| {
        format!(
            "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"qwen3\"\r\n\r\n{}\r\n--B\r\n\
             Content-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--B--\r\n",
            "\r\n--qwen3 ".repeat(20_000)
        )
    };
    let request = Request::new("POST", "/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=B")
        .body(form("qwen3"));
    let reply = relay.fetch(request).await.with_status(200);
    assert!(reply.text() == form("Qwen/Qwen3-8B"), "the body has another form");
}

#[tokio::test]
async fn relays_without_slots_may_use_any_name() {
    let (qwen, b) = (backend("Qwen/Qwen3-8B").await, backend("b").await);
    for ack in [Ack::old(), Ack::core1()] {
        let mut rig = Rig::with(&ack, &yaml(&qwen, &b)).await;
        assert_eq!(rig.link.registration["models"], json!(["b", "qwen", "bee", "claude-sonnet-4-5", "qwen3"]));
        for (model, name) in [("qwen3", "Qwen/Qwen3-8B"), ("bee", "b"), ("qwen", "Qwen/Qwen3-8B")] {
            let request = rig.link.send_request(&RequestSpec::chat(model).body(chat(model).to_string().as_bytes()));
            let reply = rig.link.reply_within(LONG, &request).await.expect("a response");
            assert_eq!((reply.status, &reply.json()["model"]), (200, &json!(name)), "{}", reply.end);
        }
    }
}

#[tokio::test]
async fn worker_reports_names_sharing_one_gate() {
    let (qwen, b) = (backend("Qwen/Qwen3-8B").await, backend("b").await);
    let mut rig = Rig::with(&slots1(), &yaml(&qwen, &b)).await;
    assert_eq!(rig.link.registration["slots"][0]["models"][1]["aliases"], json!(["qwen3", "claude-sonnet-4-5"]));
    let entry = |id: &str| json!({"id": id, "waiting": 1, "oldest_ms": 10, "sum_ms": 10});
    rig.link.send(&json!({"type": "demand", "models": [entry("qwen3"), entry("claude-sonnet-4-5")]}));
    assert_eq!(gate(&mut rig.link, "qwen").await, 2);
    let requests = ["qwen3", "claude-sonnet-4-5", "qwen"]
        .map(|model| rig.link.send_request(&RequestSpec::chat(model).body(chat(model).to_string().as_bytes())));
    for request in &requests[..2] {
        assert_eq!(rig.link.reply_within(LONG, request).await.expect("a response").status, 200);
    }
}

#[tokio::test]
async fn ambiguous_name_is_rejected_at_startup() {
    let (qwen, b) = (backend("Qwen/Qwen3-8B").await, backend("b").await);
    let yaml = yaml(&qwen, &b).replace("\"bee\"", "\"qwen3\"");
    let (_config, builder) = worker_with(&yaml);
    let mut process = builder.spawn();
    assert_eq!(process.wait_exit().await.code(), Some(1));
    let log = process.log().lines().join("\n");
    assert!(log.contains("multiplexer.slots.gpu0.models.b.aliases: \"qwen3\"") && log.contains("qwen has it too"));
}

#[tokio::test]
async fn maximum_slots_models_and_names_are_accepted() {
    for (slots, models, aliases, last) in [(8, 20, 3, "m19-2"), (9, 64, 0, "m63")] {
        let model = |slot: usize, model: usize| {
            let names: Vec<_> = (0..aliases).map(|alias| format!("m{model}-{alias}")).collect();
            let url = format!("http://127.0.0.1:{}", 1 + slot * models + model);
            json!({"id": format!("m{model}"), "aliases": names, "url": url})
        };
        let slot = |slot: usize| json!({"id": format!("gpu{slot}"), "driver": "static", "models": (0..models).map(|number| model(slot, number)).collect::<Vec<_>>()});
        let yaml = json!({"multiplexer": {"slots": (0..slots).map(slot).collect::<Vec<_>>()}}).to_string();
        let relay = Relay::start().await;
        let (_config, builder) = worker_with(&yaml);
        let url = format!("http://{}", relay.addr());
        let worker = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;
        wait_for_model(&relay, last).await;
        let known = relay.admin_json("/admin/workers").await["workers"][0]["slots"].clone();
        assert_eq!(known.as_array().map(Vec::len), Some(slots), "{}", worker.log());
        assert_eq!(known[slots - 1]["models"].as_array().map(Vec::len), Some(models));
        assert!(!worker.process.log().contains("model(s) that the backend lists"), "{}", worker.log());
    }
}
