//! No secrets in the log, the metrics or the probes, at any LOG_LEVEL.

use modelrelay_harness::fake_backend::Answer;
use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WORKER_SECRET, WorkerBuilder};
use serde_json::json;

const PLANTED: [&str; 7] = [
    WORKER_SECRET,
    "planted-prompt-77",
    "planted-answer-88",
    "planted-backend-key-99",
    "planted-client-key-66",
    "planted-query-55",
    "planted-cookie-44",
];

/// Requests that succeed, fail, break, are cancelled and are rejected, with every planted string in use.
async fn eventful_life(ack: &Ack) -> Rig {
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(key.path(), "planted-backend-key-99").expect("a writable file");
    let settings = |worker: WorkerBuilder| {
        worker
            .file("BACKEND_API_KEY_FILE", key.path())
            .env("LOG_LEVEL", "trace,tungstenite::protocol=trace,hyper=trace")
    };
    let mut rig = Rig::with(ack, 4, settings).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "planted-prompt-77"}]}).to_string();
    let spec = RequestSpec::chat("m").path("/v1/chat/completions?q=planted-query-55").body(body.as_bytes());
    let spec = spec.header("authorization", "Bearer planted-client-key-66").header("cookie", "planted-cookie-44");
    for status in [200, 400, 500] {
        let answer = Answer::json(status, &json!({"content": "planted-answer-88"}));
        assert_eq!(rig.answered(&spec, &answer).await.status, status);
    }
    let request = rig.link.send_request(&spec);
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: planted-answer-88\n\n").await;
    call.reset();
    rig.link.reply(&request).await;
    let request = rig.link.send_request(&spec);
    let mut call = rig.backend.call().await;
    call.write_raw(b"planted-answer-88 is no HTTP\r\n\r\n").await;
    rig.link.reply(&request).await;
    let request = rig.link.send_request(&spec);
    let mut call = rig.backend.call().await;
    rig.link.cancel(&request.id, "client_disconnect");
    call.closed().await;
    rig.link.exchange(&spec.clone().path("/admin?q=planted-query-55")).await;
    rig.backend.refuse().await;
    rig.link.exchange(&spec).await;
    rig
}

async fn nothing_planted(rig: &Rig) {
    let mut texts = vec![("log", rig.worker.log())];
    for path in ["/metrics", "/healthz", "/readyz"] {
        texts.push((path, rig.worker.probe(path).await.body));
    }
    for (place, text) in texts {
        for planted in PLANTED {
            assert!(!text.contains(planted), "{planted} is in {place}");
        }
    }
}

#[tokio::test]
async fn core1_link_logs_and_shows_no_secret() {
    let rig = eventful_life(&Ack::core1()).await;
    nothing_planted(&rig).await;
}

#[tokio::test]
async fn old_link_logs_and_shows_no_secret() {
    let rig = eventful_life(&Ack::old()).await;
    nothing_planted(&rig).await;
}

#[tokio::test]
async fn refused_secret_is_not_logged() {
    let mut relay = modelrelay_harness::fake_relay::FakeRelay::start().await;
    let worker = modelrelay_harness::worker_process::WorkerProcess::builder().relay(relay.url()).start().await;
    relay.dial().await.refuse(401).await;
    relay.dial().await;
    assert!(!worker.log().contains(WORKER_SECRET));
}
