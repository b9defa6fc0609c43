//! A worker advertises only what a healthy backend serves.

use std::time::{Duration, Instant};

use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_relay::{FakeRelay, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WorkerBuilder, WorkerProcess};
use serde_json::{Value, json};

/// Ten times the 2 s within which a worker recovers after its backend did.
const RECOVERY: Duration = Duration::from_secs(20);

/// Long enough to show that nothing is advertised, where there is no observable event.
const QUIET: Duration = Duration::from_millis(2500);

/// A registered worker in front of this backend.
async fn registered(
    backend: &FakeBackend,
    settings: impl FnOnce(WorkerBuilder) -> WorkerBuilder,
) -> (WorkerProcess, FakeRelay, RelayLink) {
    let mut relay = FakeRelay::start().await;
    let builder = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let worker = settings(builder).start().await;
    let link = relay.accept_registered(&["core1"]).await;
    (worker, relay, link)
}

async fn advertised(link: &mut RelayLink, models: &[&str]) {
    let wanted = json!(models);
    let update = link.message_within(RECOVERY, "models_update", |update| update["models"] == wanted).await;
    assert!(update.is_some(), "{models:?} were not advertised");
}

fn any_model(update: &Value) -> bool {
    update["models"] != json!([])
}

#[tokio::test]
async fn no_model_is_advertised_until_backend_accepts_connections() {
    let mut backend = FakeBackend::refusing().await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker).await;
    assert_eq!(link.registration["models"], json!([]));
    assert!(link.message_within(QUIET, "models_update", any_model).await.is_none());
    backend.reopen();
    advertised(&mut link, &["m"]).await;
}

#[tokio::test]
async fn no_model_is_advertised_until_backend_is_healthy() {
    let backend = FakeBackend::start().await;
    backend.set_healthy(false);
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker).await;
    assert_eq!(link.registration["models"], json!([]));
    assert!(link.message_within(QUIET, "models_update", any_model).await.is_none());
    backend.set_healthy(true);
    advertised(&mut link, &["m"]).await;
}

#[tokio::test]
async fn refused_connection_withdraws_models_before_failing_request() {
    let mut rig = Rig::core1().await;
    rig.backend.refuse().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let reply = rig.link.reply(&request).await;
    assert_eq!(reply.error_code(), Some("backend_unreachable"));
    let withdrawn = rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    assert!(withdrawn.seq < reply.end_seq, "the withdrawal was sent after the error that it explains");
    rig.worker.process.wait_for_line("backend error").await;
}

#[tokio::test]
async fn recovered_backend_is_advertised_within_two_seconds() {
    let mut rig = Rig::core1().await;
    for _ in 0..2 {
        rig.backend.refuse().await;
        rig.link.exchange(&RequestSpec::chat("m")).await;
        rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
        rig.backend.reopen();
        let back = Instant::now();
        advertised(&mut rig.link, &["m"]).await;
        assert!(back.elapsed() < RECOVERY);
        rig.still_serves().await;
    }
}

#[tokio::test]
async fn request_at_dead_backend_leaves_neighbour_running() {
    let mut rig = Rig::core1().await;
    let kept = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.backend.refuse().await;
    let failed = rig.link.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(failed.error_code(), Some("backend_unreachable"));
    call.answer_json(200, &json!("kept")).await;
    assert_eq!(rig.link.reply(&kept).await.json(), json!("kept"));
}

#[tokio::test]
async fn star_lists_models_of_backend() {
    let backend = FakeBackend::with_models(&["qwen", "llama"]).await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    link.models(&["qwen", "llama"]).await;
}

#[tokio::test]
async fn models_are_listed_from_backend_by_default() {
    let backend = FakeBackend::with_models(&["qwen", "llama"]).await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.without("MODELS")).await;
    link.models(&["qwen", "llama"]).await;
}

#[tokio::test]
async fn catalogue_is_read_until_first_success() {
    let mut backend = FakeBackend::refusing().await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    assert_eq!(link.registration["models"], json!([]));
    backend.set_models(&["late"]);
    backend.reopen();
    advertised(&mut link, &["late"]).await;
}

#[tokio::test]
async fn models_refresh_reads_catalogue_immediately() {
    let backend = FakeBackend::with_models(&["old"]).await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    link.models(&["old"]).await;
    backend.set_models(&["new", "newer"]);
    link.send(&json!({"type": "models_refresh", "reason": "admin"}));
    let update = link.expect_where("models_update", |update| update["models"] == json!(["new", "newer"])).await;
    assert_eq!(update["current_load"], 0);
}

#[tokio::test]
async fn models_refresh_reports_unchanged_configured_models() {
    let mut rig = Rig::core1().await;
    rig.link.send(&json!({"type": "models_refresh", "reason": "periodic"}));
    let update = rig.link.expect("models_update").await;
    assert_eq!(update["models"], json!(["m"]));
}

#[tokio::test]
async fn new_link_receives_current_models() {
    let backend = FakeBackend::with_models(&["old"]).await;
    let (_worker, mut relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    link.models(&["old"]).await;
    backend.set_models(&["new"]);
    link.send(&json!({"type": "models_refresh", "reason": "admin"}));
    advertised(&mut link, &["new"]).await;
    drop(link);
    relay.accept_registered(&["core1"]).await.models(&["new"]).await;
}

#[tokio::test]
async fn failed_health_check_withdraws_models() {
    let mut rig = Rig::core1().await;
    rig.backend.set_healthy(false);
    advertised(&mut rig.link, &[]).await;
    let health = rig.worker.probe("/healthz").await.json();
    assert_eq!((&health["backend_up"], &health["backend"]["condition"]), (&json!(false), &json!("not_ready")));
    assert!(health["backend"]["reason"].as_str().is_some_and(|reason| reason.contains("503")), "{health}");
    let condition = "modelrelay_worker_backend_condition{condition=";
    assert_eq!(rig.worker.metric(&format!("{condition}\"not_ready\"}}")).await, 1.0);
    assert_eq!(rig.worker.metric(&format!("{condition}\"healthy\"}}")).await, 0.0);
    rig.backend.set_healthy(true);
    advertised(&mut rig.link, &["m"]).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn dead_idle_backend_is_withdrawn() {
    let mut rig = Rig::core1().await;
    rig.backend.refuse().await;
    advertised(&mut rig.link, &[]).await;
    assert_eq!(rig.worker.probe("/healthz").await.json()["backend"]["condition"], "gone");
}

#[tokio::test]
async fn each_change_of_condition_is_logged_once() {
    let mut rig = Rig::core1().await;
    rig.backend.set_healthy(false);
    advertised(&mut rig.link, &[]).await;
    rig.backend.set_healthy(true);
    advertised(&mut rig.link, &["m"]).await;
    rig.worker.process.wait_for_line("was=\"not_ready\"").await;
    let log = rig.worker.log();
    assert_eq!(log.matches("the backend is healthy").count(), 2, "{log}");
    assert_eq!(log.matches("the backend is not ready").count(), 1, "{log}");
}

#[tokio::test]
async fn loading_backend_error_may_be_retried_elsewhere() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.backend.set_healthy(false);
    call.answer_json(503, &json!({"error": {"message": "Loading model"}})).await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.error_code(), &reply.start), (Some("backend_unreachable"), &None));
    let withdrawn = rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    assert!(withdrawn.seq < reply.end_seq, "the withdrawal was sent after the error that it explains");
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_errors_total{kind=\"lost\"").await, 1.0);
}

#[tokio::test]
async fn healthy_backend_error_is_passed_on() {
    let mut rig = Rig::core1().await;
    for status in [500, 503] {
        let answer = Answer::json(status, &json!({"error": {"message": "out of memory"}}));
        let reply = rig.answered(&RequestSpec::chat("m"), &answer).await;
        assert_eq!((reply.status, &reply.body), (status, &answer.body));
    }
    rig.still_serves().await;
}

#[tokio::test]
async fn old_relay_receives_error_of_loading_backend() {
    let mut rig = Rig::old().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.backend.set_healthy(false);
    call.answer_json(503, &json!({"error": {"message": "Loading model"}})).await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.status, &reply.json()["error"]["message"]), (503, &json!("Loading model")));
}

#[tokio::test]
async fn more_than_256_models_are_advertised() {
    let names: Vec<String> = (0..340).map(|number| format!("model-{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let backend = FakeBackend::with_models(&names).await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    link.models(&names).await;
}

#[tokio::test]
async fn omitted_models_are_logged() {
    let backend = FakeBackend::with_models(&["good", "bad\u{1b}[31m", ""]).await;
    let (worker, _relay, mut link) = registered(&backend, |worker| worker.models("*")).await;
    link.models(&["good"]).await;
    worker
        .process
        .wait_for_line("ignoring 2 model(s) that the backend lists with a name that is empty, too long or unprintable")
        .await;
}

#[tokio::test]
async fn default_concurrency_with_vllm_causes_warning() {
    let backend = FakeBackend::start().await;
    let vllm = |worker: WorkerBuilder| worker.env("BACKEND_ENGINE", "vllm");
    let (silent, _relay, mut link) = registered(&backend, |worker| vllm(worker).concurrency(1)).await;
    link.models(&["m"]).await;
    let (worker, _relay, _link) = registered(&backend, vllm).await;
    worker.process.wait_for_line("MAX_CONCURRENCY is 1, the default, but vLLM runs").await;
    assert!(!silent.log().contains("MAX_CONCURRENCY"), "{}", silent.log());
}

#[tokio::test]
async fn silent_streams_of_closed_backend_are_aborted() {
    let mut backend = FakeBackend::start().await;
    let (_worker, _relay, mut link) = registered(&backend, |worker| worker.env("MAX_CONCURRENCY", "3")).await;
    link.ready(&["m"], 3).await;
    let silent = link.send_request(&RequestSpec::chat("m"));
    let _held = backend.call().await;
    link.send_request(&RequestSpec::chat("m"));
    let mut call = backend.call().await;
    call.start_stream().await;
    backend.refuse().await;
    // Its refused connection withdraws the backend at once.
    link.send_request(&RequestSpec::chat("m"));
    let broken = async {
        let error = link.message_within(RECOVERY, "error", |error| error["request_id"] == *silent.id).await;
        error.expect("a request was broken off")
    };
    let writes = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(500));
        loop {
            ticks.tick().await;
            call.chunk(b"data: 1\n\n").await;
        }
    };
    let error = tokio::select! {
        error = broken => error,
        () = writes => unreachable!("the writer never ends"),
    };
    assert_eq!(
        (error["request_id"].as_str(), &error["code"]),
        (Some(&*silent.id), &json!("backend_reset")),
        "{error:?}"
    );
    assert!(error["message"].as_str().is_some_and(|message| message.contains("closed its port")), "{error:?}");
    call.end_stream().await;
}
