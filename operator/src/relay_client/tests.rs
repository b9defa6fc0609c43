use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use http::{Request, Response};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use kube::runtime::{reflector, watcher};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::cluster::cache::Triggers;
use crate::context::OperatorLocation;
use crate::crd::worker_pool::SlotState;
use crate::manifests::testing;
use crate::relays::tls::RelayTls;
use crate::relays::tls::tests::{HOST, pair};
use crate::settings::defaults::Defaults;

fn answer(pod: &str, is_leaving: bool, state: Value) -> Answer {
    let pod = RelayPod { name: pod.to_owned(), address: Some([10, 0, 0, 1].into()), is_leaving, speaks_tls: false };
    Answer { pod, answer: Ok(serde_json::from_value(state).unwrap()) }
}

fn silent(pod: &str, is_leaving: bool) -> Answer {
    let pod = RelayPod { name: pod.to_owned(), address: Some([10, 0, 0, 2].into()), is_leaving, speaks_tls: false };
    Answer { pod, answer: Err(Unanswered::Silent("request timed out".into())) }
}

fn unscheduled(pod: &str) -> Answer {
    let pod = RelayPod { name: pod.to_owned(), address: None, is_leaving: false, speaks_tls: false };
    Answer { pod, answer: Err(Unanswered::Silent("no address yet".into())) }
}

/// A response of `/admin/state`, with an unknown field.
fn state(hash: &str, draining: bool) -> Value {
    json!({
        "relay_id": "r", "version": "0.1.0", "config_hash": hash, "config_error": null, "phase": "running", "newer": 1,
        "providers": [{
            "name": "local", "queue_depth": 2, "in_flight": 3,
            "models": [{"id": "m", "waiting": 2, "oldest_ms": 5, "workers": 1, "in_flight": 3}],
            "workers": [{
                "worker_id": "w", "worker_name": "pod-1", "models": ["m"], "max_concurrent": 4, "in_flight_count": 3,
                "is_draining": draining, "instance_id": "i1", "pool": "llama",
            }],
        }, {"name": "another", "queue_depth": 100, "in_flight": 100, "models": [], "workers": []}],
    })
}

#[test]
fn providers_of_shared_relay_report_own_numbers() {
    let answers = [answer("a", false, state("h", false))];
    let (own, other) = (snapshot("local", &answers), snapshot("another", &answers));
    assert_eq!((own.queue_depth, own.workers.len(), other.queue_depth, other.workers.len()), (2, 1, 100, 0));
    assert_eq!(own.relays, other.relays, "both are served by the same relays");
}

#[test]
fn depths_are_summed_and_shared_worker_counted_once() {
    let snapshot = snapshot("local", &[answer("a", false, state("h", false)), answer("b", false, state("h", true))]);
    assert_eq!((snapshot.queue_depth, snapshot.in_flight, snapshot.workers.len()), (4, 6, 1));
    let worker = &snapshot.workers["i1"];
    assert_eq!((worker.links, worker.in_flight, worker.max_concurrent, worker.draining), (2, 6, 4, false));
    assert_eq!((worker.name.as_str(), worker.pool.as_deref()), ("pod-1", Some("llama")));
    assert!(worker.relays.iter().eq(["a", "b"]));
    let model = &snapshot.models["m"];
    assert_eq!((model.waiting, model.in_flight, model.workers), (4, 6, 1));
    assert!(snapshot.is_complete() && snapshot.all_run([&"a".to_owned(), &"b".to_owned()], "h"));
}

#[test]
fn usage_is_summed_once_all_relays_report() {
    let with = |since: &str, requests: u64| {
        let mut state = state("h", false);
        state["providers"][0]["usage"] =
            json!({"since": since, "requests": requests, "input_tokens": 10, "output_tokens": u64::MAX, "newer": 1});
        state
    };
    let (a, b) = (with("2026-11-28T10:00:00Z", 3), with("2026-11-28T09:00:00Z", 4));
    let both = snapshot("local", &[answer("a", false, a.clone()), answer("b", false, b)]);
    let usage = both.usage.unwrap();
    assert_eq!((usage.since.to_string().as_str(), usage.requests), ("2026-11-28T09:00:00Z", 7));
    assert_eq!((usage.input_tokens, usage.output_tokens), (20, u64::MAX));
    assert_eq!(snapshot("local", &[answer("a", false, a.clone()), silent("b", false)]).usage, None);
    assert_eq!(snapshot("local", &[answer("a", false, a.clone()), unscheduled("b")]).usage.unwrap().requests, 3);
    let older = answer("b", false, state("h", false));
    assert_eq!(snapshot("local", &[answer("a", false, a), older]).usage.unwrap().requests, 3);
}

#[test]
fn worker_draining_on_every_relay_is_draining() {
    let snapshot = snapshot("local", &[answer("a", false, state("h", true))]);
    assert!(snapshot.workers["i1"].draining);
}

#[test]
fn slots_come_from_newest_report_and_are_truncated() {
    let with = |slots: Value| {
        let mut state = state("h", false);
        state["providers"][0]["workers"][0]["slots"] = slots;
        state
    };
    let slot = |state: &str, since_ms: i64| {
        let failed = json!({
            "id": "bad", "status": "failed", "code": "backend_unavailable", "message": format!("line\n{}", "x".repeat(999)),
            "retry_ms": 4000,
        });
        json!({
            "id": "gpu0", "state": state, "resident": "m", "generation": 3, "target": null, "since_ms": since_ms,
            "idle_ms": 0, "wanted": 2, "newer": 1, "models": [{"id": "m", "status": "resident"}, failed],
        })
    };
    let older = answer("a", false, with(json!([slot("ready", 60_000)])));
    let newer = answer("b", false, with(json!([slot("rolling_back", 1_000)])));
    for answers in [vec![older, newer], vec![answer("a", false, with(json!([slot("rolling_back", 1_000)])))]] {
        let snapshot = snapshot("local", &answers);
        let [slot] = snapshot.workers["i1"].slots.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!((slot.state, slot.resident.as_deref()), (SlotState::RollingBack, Some("m")));
        let [failure] = slot.failures.as_slice() else { panic!("{slot:?}") };
        assert_eq!((failure.model.as_str(), failure.code.as_str()), ("bad", "backend_unavailable"));
        assert_eq!((&failure.message[..6], failure.message.chars().count()), ("line x", 256));
    }
    let without = snapshot("local", &[answer("a", false, with(Value::Null))]);
    assert_eq!(without.workers["i1"].slots, []);
}

#[test]
fn last_failure_of_slot_comes_from_any_relay() {
    let with = |pod: &str, resident: &str, status: &str, last: Value| {
        let mut state = state("h", false);
        let bad = json!({"id": "bad", "status": status, "code": "backend_unavailable"});
        // The relay that knows of the load has the newer report.
        let since_ms = if status == "resident" { 1_000 } else { 5_000 };
        state["providers"][0]["workers"][0]["slots"] = json!([{
            "id": "gpu0", "state": "ready", "resident": resident, "since_ms": since_ms, "models": [bad],
            "last_failure": last,
        }]);
        answer(pod, false, state)
    };
    let last = |age: u64| json!({"model": "bad", "code": "backend_unavailable", "message": "no Pod", "age_ms": age});
    let seen = |answers: Vec<Answer>| snapshot("local", &answers).workers["i1"].slots[0].clone();
    let failing = seen(vec![with("a", "m", "failed", last(1_000))]);
    assert_eq!(failing.failures[0].message, "no Pod", "{failing:?}");
    for answers in [
        vec![with("a", "m", "unloaded", last(90_000)), with("new", "m", "unloaded", Value::Null)],
        vec![with("new", "m", "unloaded", Value::Null), with("a", "m", "unloaded", last(90_000))],
    ] {
        let slot = seen(answers);
        let known = slot.last_failure.as_ref().unwrap();
        assert_eq!((slot.failures.len(), known.failure.message.as_str()), (0, "no Pod"));
        let age = Timestamp::now().duration_since(known.at).as_secs();
        assert!((90..100).contains(&age), "{age}");
    }
    let loaded = seen(vec![with("a", "bad", "resident", Value::Null), with("late", "bad", "unloaded", last(9_000))]);
    assert_eq!(loaded.last_failure, None);
}

#[test]
fn silent_relay_is_recorded_unless_leaving() {
    let snapshot = snapshot("local", &[silent("a", false), silent("b", true)]);
    assert_eq!(snapshot.relays.keys().collect::<Vec<_>>(), ["a"]);
    assert!(!snapshot.is_complete() && !snapshot.all_run([&"a".to_owned()], "h"));
}

#[test]
fn unscheduled_relay_holds_no_requests_and_confirms_nothing() {
    let with_one = snapshot("local", &[answer("a", false, state("h", false)), unscheduled("b")]);
    assert!(with_one.is_complete());
    assert_eq!(with_one.relays["b"], Err("no address yet".to_owned()));
    assert!(!with_one.all_run([&"a".to_owned(), &"b".to_owned()], "h"));
    assert!(!snapshot("local", &[silent("a", false), unscheduled("b")]).is_complete());
    assert!(!snapshot("local", &[unscheduled("b")]).is_complete());
}

#[test]
fn new_and_scaling_pools_are_polled_every_second() {
    let pools = |spec: Value| vec![Arc::new(testing::pool(&spec))];
    let resting = pools(json!({"provider": "local"}));
    let scaled = pools(json!({"provider": "local", "scaling": {"minReplicas": 0, "maxReplicas": 1}}));
    let idle = json!({"version": "0.1.0", "providers": []});
    let idle = snapshot("local", &[answer("a", false, idle)]);
    let serving = snapshot("local", &[answer("a", false, state("h", false))]);
    let silent = snapshot("local", &[silent("a", false)]);
    assert_eq!(interval(&resting, &idle), BRISK_INTERVAL);
    assert_eq!(interval(&resting, &serving), INTERVAL);
    assert_eq!(interval(&scaled, &serving), BRISK_INTERVAL);
    // No worker is expected, or none would be visible.
    assert_eq!(interval(&[], &idle), INTERVAL);
    assert_eq!(interval(&resting, &silent), INTERVAL);
}

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

fn token() -> Token {
    Token { header: HeaderValue::from_static("Bearer t"), tls: None, read_at: Instant::now() }
}

fn http_client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    client().unwrap()
}

fn why(answer: Result<RelayState, Unanswered>) -> String {
    match answer {
        Ok(_) => "answered".to_owned(),
        Err(Unanswered::Refused(why)) => format!("refused: {why}"),
        Err(Unanswered::Silent(why)) => why,
    }
}

#[tokio::test]
async fn relay_is_queried_with_admin_token() {
    let handler = |headers: HeaderMap| async move {
        match headers.get("authorization").map(HeaderValue::as_bytes) {
            Some(b"Bearer t") => Ok(state("h", false).to_string()),
            _ => Err(StatusCode::UNAUTHORIZED),
        }
    };
    let address = serve(Router::new().route("/admin/state", get(handler))).await;
    let (code, answer) = request(&http_client(), &address, &token()).await;
    assert_eq!((code, answer.is_ok()), (200, true));
    let wrong = Token { header: HeaderValue::from_static("Bearer x"), ..token() };
    let (code, answer) = request(&http_client(), &address, &wrong).await;
    assert_eq!((code, why(answer).as_str()), (401, "refused: admin token rejected (HTTP 401)"));
}

#[tokio::test]
async fn non_relay_response_is_distinguished() {
    let router = Router::new().route("/admin/state", get(async || "<html>"));
    let (code, answer) = request(&http_client(), &serve(router).await, &token()).await;
    assert!(code == 200 && why(answer).starts_with("invalid response: "));
    let (code, answer) = request(&http_client(), &serve(Router::new()).await, &token()).await;
    assert_eq!((code, why(answer).as_str()), (404, "unexpected response HTTP 404"));
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (code, answer) = request(&http_client(), &format!("http://{free}"), &token()).await;
    assert_eq!((code, why(answer).as_str()), (0, "connection failed"));
}

/// Returns the error for a response with this body.
async fn judged(body: String) -> String {
    let router = Router::new().route("/admin/state", get(async move || body));
    why(request(&http_client(), &serve(router).await, &token()).await.1)
}

#[tokio::test]
async fn oversized_response_is_rejected() {
    let long = format!(r#"{{"version": "{}"}}"#, "x".repeat(9 << 20));
    assert_eq!(judged(long).await, "response is too long");
    // Megabytes that would be hundreds of slots, models and the like.
    for value in [r#"{"id":"s"},"#, r#""","#, "[0],"] {
        let bomb = format!(r#"{{"version": "1", "newer": [{}0]}}"#, value.repeat(700_000));
        assert_eq!(judged(bomb).await, "response has too many values", "{value}");
    }
}

#[tokio::test]
async fn response_with_thousand_multiplexers_is_accepted() {
    let slot = |id: &str| {
        let model = |n: usize| {
            json!({"id": format!("meta-llama/Llama-3.1-8B-Instruct-{n}"), "aliases": [format!("llama-{n}")],
                "status": "unloaded", "code": null, "retry_ms": null})
        };
        json!({
            "id": id, "state": "ready", "resident": "m", "generation": 3, "target": null, "since_ms": 123_456,
            "idle_ms": 0, "eta_ms": null, "wanted": 2, "models": (0..8).map(model).collect::<Vec<_>>(),
            "last_failure": {"model": "m", "code": "load_timeout", "message": "x".repeat(256), "age_ms": 1_000},
        })
    };
    let gate = |n: usize| json!({"id": format!("meta-llama/Llama-3.1-8B-Instruct-{n}"), "slots": 1, "others": 0, "capacity": 4});
    let worker = |n: usize| {
        json!({
            "worker_id": format!("{n:032x}"), "provider": "local", "worker_name": format!("llama-5f8d7c9b4-{n}"),
            "models": (0..8).map(|n| format!("meta-llama/Llama-3.1-8B-Instruct-{n}")).collect::<Vec<_>>(),
            "max_concurrent": 4, "reported_load": 1, "load": 1, "in_flight_count": 1, "is_draining": false,
            "connected_at": "2026-11-01T00:00:00.000Z", "last_heartbeat_at": "2026-11-01T00:00:00.000Z",
            "address": "10.0.0.1:50000", "identity": "llm/workers", "version": "0.1.0",
            "instance_id": format!("{n:032x}"), "pool": "llama", "core1": true,
            "grant": {"slots": 4, "others": 0, "capacity": 4, "links": 2}, "slots": [slot("gpu0"), slot("gpu1")],
            "gates": (0..8).map(gate).collect::<Vec<_>>(),
        })
    };
    let mut state = state("h", false);
    state["providers"][0]["workers"] = (0..1_000).map(worker).collect();
    let body = state.to_string();
    assert!(body.len() > 4 << 20, "{} bytes", body.len());
    assert_eq!(judged(body).await, "answered");
}

/// Starts a relay with this certificate.
async fn serve_tls(certificate: &str, key: &str) -> String {
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let Ok(mut stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            let _ = stream.read(&mut [0; 4096]).await;
            let body = state("h", false).to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    format!("https://{address}")
}

#[tokio::test]
async fn tls_relay_is_verified_by_name_not_address() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (certificate, key) = pair(&[HOST]);
    let trusting = |authority: &str, host: &str| {
        tls::client_of(&RelayTls { authority: Some(authority.to_owned()), version: None }, host).unwrap()
    };
    let relay = serve_tls(&certificate, &key).await;
    let (code, answer) = request(&trusting(&certificate, HOST), &relay, &token()).await;
    assert_eq!((code, answer.is_ok()), (200, true));
    for client in [trusting(&pair(&[HOST]).0, HOST), trusting(&certificate, "other-workers.llm.svc")] {
        let (code, answer) = request(&client, &relay, &token()).await;
        let why = why(answer);
        assert!(code == 0 && why.starts_with("refused: certificate rejected: "), "{why}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_for_report_polls_only_that_provider_immediately() {
    let (service, _handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let ctx = Context::new(client, Defaults::default(), OperatorLocation::in_namespace("system"), "operator-0".into());
    let mut schedule = Schedule::default();
    let key = |provider: &str| ("llm".to_owned(), provider.to_owned());
    for provider in ["local", "other"] {
        schedule.entry(&key(provider)).due = Instant::now() + INTERVAL;
    }
    let mut due = async |ctx: &Context| {
        schedule.advance_polls(ctx);
        ["local", "other"].map(|provider| schedule.entry(&key(provider)).due <= Instant::now())
    };
    assert_eq!(due(&ctx).await, [false, false]);
    let waiting = ctx.relays.fresh("llm", "local", INTERVAL / 2);
    let meanwhile = async { assert_eq!(due(&ctx).await, [true, false]) };
    tokio::join!(waiting, meanwhile);
}

#[test]
fn pod_reports_leaving_state_and_tls() {
    let pod = |value: Value| RelayPod::of(&serde_json::from_value(value).unwrap());
    let running = pod(json!({"metadata": {"name": "a"}, "status": {"phase": "Running", "podIP": "fd00::1"}}));
    assert_eq!((running.address, running.is_leaving), (Some("fd00::1".parse().unwrap()), false));
    let with = |env: Value| {
        let containers = json!([{"name": "proxy", "env": [{"name": TLS_ENV}]}, {"name": "relay", "env": env}]);
        pod(json!({"metadata": {"name": "a"}, "spec": {"containers": containers}}))
    };
    assert!(with(json!([{"name": "TLS_CERT_FILE"}])).speaks_tls && !with(json!([])).speaks_tls);
    assert!(pod(json!({"metadata": {"name": "a"}, "status": {"phase": "Failed"}})).is_leaving);
    assert!(pod(json!({"metadata": {"name": "a", "deletionTimestamp": "2026-11-01T00:00:00Z"}})).is_leaving);
}

#[tokio::test]
async fn old_relays_of_sharing_provider_are_not_polled() {
    let (relay_pods, mut pods) = reflector::store();
    let (providers, mut providers_writer) = reflector::store();
    let relay_ref = json!({"relayRef": {"name": "front", "namespace": "llm"}});
    for provider in [
        testing::provider("llm", "front", &json!({})),
        testing::provider("llm", "chat", &relay_ref),
        testing::provider("elsewhere", "refused", &relay_ref),
    ] {
        providers_writer.apply_watcher_event(&watcher::Event::Apply(provider));
    }
    for name in ["front", "chat", "deleted"] {
        let labels = json!({"modelrelay.io/provider": name});
        let pod = json!({"metadata": {"name": format!("{name}-1"), "namespace": "llm", "labels": labels}});
        pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
    }
    let caches = Caches { providers, relay_pods, ..Caches::empty(Triggers::channels().0) };
    let mut polled: Vec<String> = Relays::of(&caches).by_provider.into_keys().map(|key| key.1).collect();
    polled.sort();
    assert_eq!(polled, ["deleted", "front"]);
    // A poll of them that ends late, or their absence, does not replace the shared relay's report.
    let (service, _handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let ctx = Context::new(client, Defaults::default(), OperatorLocation::in_namespace("system"), "operator-0".into());
    let (key, shared) =
        (("llm".to_owned(), "chat".to_owned()), RelaySnapshot { queue_depth: 7, ..RelaySnapshot::default() });
    keep(&ctx, &caches, &key, shared);
    let mut schedule = Schedule::default();
    schedule.entry(&key).is_running = true;
    let late = PollResult { key: key.clone(), snapshots: vec![(key.clone(), RelaySnapshot::default())], token: None };
    record_poll(&ctx, &caches, &mut schedule, late);
    schedule.entry(&key);
    schedule.keep_only(&Relays::of(&caches), &ctx, &caches);
    assert_eq!(ctx.relays.of("llm", "chat").unwrap().queue_depth, 7);
    // The shared relay does not serve one of another namespace without a grant, so the report of its own is not kept.
    let key = ("elsewhere".to_owned(), "refused".to_owned());
    keep(&ctx, &caches, &key, RelaySnapshot { queue_depth: 5, ..RelaySnapshot::default() });
    schedule.entry(&key);
    schedule.keep_only(&Relays::of(&caches), &ctx, &caches);
    assert_eq!(ctx.relays.of("elsewhere", "refused").unwrap().queue_depth, 0);
}

#[tokio::test]
async fn relay_report_triggers_only_its_provider() {
    let (service, _handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let ctx = Context::new(client, Defaults::default(), OperatorLocation::in_namespace("system"), "operator-0".into());
    let (triggers, mut requests) = Triggers::channels();
    let (pools, mut pools_writer) = reflector::store();
    pools_writer.apply_watcher_event(&watcher::Event::Apply(testing::pool(&json!({"provider": "local"}))));
    let caches = Caches { pools, ..Caches::empty(triggers) };
    let key = ("llm".to_owned(), "local".to_owned());
    assert_eq!(caches.pools_of(&key.0, &key.1).len(), 1);
    for depth in [1, 1, 2] {
        keep(&ctx, &caches, &key, RelaySnapshot { queue_depth: depth, ..RelaySnapshot::default() });
    }
    let told = std::iter::from_fn(|| requests.providers.try_recv().ok()).count();
    assert_eq!((told, requests.pools.try_recv().ok()), (2, None));
}
