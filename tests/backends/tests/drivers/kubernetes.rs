//! Cluster behaviour that affects workers that scale Deployments.

mod others;

use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_backends::cluster::{Cluster, Deployment};
use modelrelay_backends::fake::{Fake, Kind};
use modelrelay_backends::server::{free_port, until};
use modelrelay_harness::own_log::{listen, logged};
use modelrelay_multiplexer::driver::kubernetes::{KubernetesScale, ScaledModel};
use modelrelay_multiplexer::driver::memory::SlotMemory;
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::slot::SlotDriver;
use modelrelay_multiplexer::driver::{Driver, DriverError};
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::{Found, Left, Outcome};
use serde_json::{Value, json};

use crate::rig::{FAKE, on_port};
use crate::table::NoMeter;

fn engine(model: &str) -> Deployment {
    let port = free_port();
    Deployment::new(Fake::new(FAKE, Kind::Vllm, model, &port.to_string()).command(), port)
}

fn driver(cluster: &Cluster, ids: &[&str], load_timeout: Duration) -> KubernetesScale {
    let model = |id: &&str| ScaledModel { served: Served::new(*id), deployment: (*id).to_owned(), url: None };
    KubernetesScale::new(cluster.access(), ids.iter().map(model), load_timeout)
}

/// Deployments `a` and `b`, each with its model.
async fn two() -> (Cluster, KubernetesScale) {
    let cluster = Cluster::start(vec![("a", engine("a")), ("b", engine("b"))]).await;
    let driver = driver(&cluster, &["a", "b"], modelrelay_harness::TEST_TIMEOUT);
    (cluster, driver)
}

/// `a`, loaded, with a Pod that ends slowly.
async fn lingering() -> (Cluster, KubernetesScale) {
    let lingering = Deployment { lingers: Duration::from_millis(700), ..engine("a") };
    let cluster = Cluster::start(vec![("a", lingering)]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    driver.load(&"a".into(), LoadKind::Cold).await.unwrap();
    (cluster, driver)
}

/// Unloads `a`; `happens` runs as soon as it is scaled down.
async fn evicted_while(
    cluster: &Cluster,
    driver: &KubernetesScale,
    happens: impl FnOnce(),
) -> Result<Left, DriverError> {
    let a = "a".into();
    let disturbed = async {
        until("it is scaled down", async || cluster.replicas("a") == 0).await;
        happens();
    };
    let (evicted, ()) =
        tokio::join!(tokio::time::timeout(modelrelay_harness::TEST_TIMEOUT, driver.evict(&a)), disturbed);
    evicted.expect("an end of the eviction")
}

/// Loads `b` after `a`, whose late Pod the driver must have waited for.
async fn assert_never_two(cluster: &Cluster, driver: &KubernetesScale) {
    driver.load(&"b".into(), LoadKind::Cold).await.unwrap();
    until("no other Pod is pending", async || cluster.busy() == ["b"]).await;
    assert_eq!((cluster.pods(), cluster.most_pods()), (1, 1));
}

/// Returns the failure of a load whose Pod never runs.
async fn failure_of(status: Value, load_timeout: Duration) -> LoadFailure {
    let deployment = Deployment { trouble: Some(status), ..engine("a") };
    let cluster = Cluster::start(vec![("a", deployment)]).await;
    let driver = driver(&cluster, &["a"], load_timeout);
    driver.load(&"a".into(), LoadKind::Cold).await.unwrap_err()
}

fn waiting(reason: &str, last: &Value) -> Value {
    let state = json!({"waiting": {"reason": reason, "message": "the kubelet's message"}});
    json!({"phase": "Pending", "containerStatuses": [{"name": "vllm", "state": state, "lastState": last}]})
}

#[tokio::test]
async fn driver_uses_only_rights_of_its_role() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.check(&a).await.unwrap();
    assert_eq!(cluster.pods(), 0, "a check must change nothing");
    driver.load(&a, LoadKind::Cold).await.unwrap();
    assert!(driver.probe(&a).await.unwrap().ready);
    driver.evict(&a).await.unwrap();
    assert_eq!(
        cluster.received_requests(),
        ["get deployments/scale", "list pods", "patch deployments/scale", "watch pods"].map(str::to_owned)
    );
}

#[tokio::test]
async fn next_model_loads_only_after_former_pod_ended() {
    // Longer than the wait for a Pod that may still be created.
    let lingers = Duration::from_millis(2500);
    let lingering = Deployment { lingers, ..engine("a") };
    let cluster = Cluster::start(vec![("a", lingering), ("b", engine("b"))]).await;
    let driver = driver(&cluster, &["a", "b"], modelrelay_harness::TEST_TIMEOUT);
    for _ in 0..2 {
        driver.load(&"a".into(), LoadKind::Cold).await.unwrap();
        let began = Instant::now();
        driver.evict(&"a".into()).await.unwrap();
        assert!(began.elapsed() >= lingers && cluster.pods() == 0, "a terminating Pod counts");
        driver.load(&"b".into(), LoadKind::Cold).await.unwrap();
        driver.evict(&"b".into()).await.unwrap();
    }
    assert_eq!(cluster.most_pods(), 1);
}

#[tokio::test]
async fn eviction_awaits_late_pod_of_abandoned_load() {
    for do_watches_end in [false, true] {
        let late = Deployment { created_after: Duration::from_millis(800), ..engine("a") };
        let cluster = Cluster::start(vec![("a", late), ("b", engine("b"))]).await;
        let driver = driver(&cluster, &["a", "b"], modelrelay_harness::TEST_TIMEOUT);
        let a = "a".into();
        let load = tokio::time::timeout(Duration::from_millis(300), driver.load(&a, LoadKind::Cold)).await;
        assert!(load.is_err() && cluster.pods() == 0 && cluster.replicas("a") == 1);
        if do_watches_end {
            cluster.expire_watches();
        }
        driver.force_evict(&a).await.unwrap();
        assert_never_two(&cluster, &driver).await;
    }
}

#[tokio::test]
async fn second_eviction_awaits_late_pod() {
    let late = Deployment { created_after: Duration::from_millis(800), ..engine("a") };
    let cluster = Cluster::start(vec![("a", late), ("b", engine("b"))]).await;
    let driver = driver(&cluster, &["a", "b"], modelrelay_harness::TEST_TIMEOUT);
    let a = "a".into();
    tokio::select! {
        loaded = driver.load(&a, LoadKind::Cold) => panic!("{loaded:?}"),
        () = until("it is scaled up", async || cluster.replicas("a") == 1) => {}
    }
    tokio::select! {
        evicted = driver.evict(&a) => panic!("{evicted:?}"),
        () = until("it is scaled down", async || cluster.replicas("a") == 0) => {}
    }
    driver.force_evict(&a).await.unwrap();
    assert_never_two(&cluster, &driver).await;
}

#[tokio::test]
async fn eviction_fails_when_scaling_down_is_forbidden() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    cluster.forbid("patch deployments/scale");
    assert!(matches!(driver.evict(&a).await, Err(DriverError::NotOurs(_))));
    let elsewhere = self::driver(&cluster, &["nowhere"], modelrelay_harness::TEST_TIMEOUT);
    assert_eq!(elsewhere.evict(&"nowhere".into()).await, Ok(Left::Nothing));
}

#[tokio::test]
async fn model_scaled_up_during_eviction_is_not_gone() {
    let slow = Deployment { created_after: Duration::from_secs(5), ..engine("a") };
    let cluster = Cluster::start(vec![("a", slow)]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    let evicted = evicted_while(&cluster, &driver, || cluster.scale("a", 1)).await;
    assert!(matches!(&evicted, Err(DriverError::NotOurs(message)) if message.contains("externally")), "{evicted:?}");
}

#[tokio::test]
async fn model_with_running_or_expected_pod_exists() {
    let slow = Duration::from_secs(5);
    let deployment = Deployment { created_after: slow, lingers: slow, ..engine("a") };
    let cluster = Cluster::start(vec![("a", deployment)]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    let a = "a".into();
    assert!(driver.probe(&a).await.unwrap().gone);
    cluster.scale("a", 1);
    assert!(!driver.probe(&a).await.unwrap().gone && cluster.pods() == 0, "its Pod is pending");
    driver.load(&a, LoadKind::Cold).await.unwrap();
    cluster.scale("a", 0);
    assert!(!driver.probe(&a).await.unwrap().gone && cluster.pods() == 1, "its Pod is still there");
}

#[tokio::test]
async fn crash_loop_fails_load_early_with_exit_reason() {
    let last = json!({"terminated": {"exitCode": 1, "reason": "Error"}});
    let began = Instant::now();
    let failure = failure_of(waiting("CrashLoopBackOff", &last), modelrelay_harness::TEST_TIMEOUT).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let LoadFailure::Exited(words) = &failure else { panic!("{failure:?}") };
    for part in
        ["exit code 1", "container vllm", "CrashLoopBackOff", "the kubelet's message", "Deployment a", "namespace llm"]
    {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[tokio::test]
async fn container_dying_during_load_fails_it() {
    let port = free_port();
    let dying = Fake::new(FAKE, Kind::Vllm, "a", &port.to_string()).with("fails-to-start").command();
    let cluster = Cluster::start(vec![("a", Deployment::new(dying, port))]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    let failure = driver.load(&"a".into(), LoadKind::Cold).await.unwrap_err();
    assert!(matches!(&failure, LoadFailure::Exited(words) if words.starts_with("exit code 3")), "{failure:?}");
}

#[tokio::test]
async fn pod_removed_during_load_is_not_probed() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (note, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let loading = move || {
        let _ = note.send(());
        async { axum::http::StatusCode::SERVICE_UNAVAILABLE }
    };
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(loading)).await });
    let idle = ["sleep", "60"].map(str::to_owned).to_vec();
    let cluster = Cluster::start(vec![("a", Deployment::new(idle, port))]).await;
    let driver = driver(&cluster, &["a"], Duration::from_secs(3));
    let disturbed = async {
        requests.recv().await;
        cluster.scale("a", 0);
    };
    let a = "a".into();
    let (loaded, ()) = tokio::join!(driver.load(&a, LoadKind::Cold), disturbed);
    let failure = loaded.unwrap_err().to_string();
    assert!(failure.contains("not ready after") && !failure.contains("its Pod is ready"), "{failure}");
}

#[tokio::test]
async fn unpullable_image_fails_load_early() {
    let failure =
        failure_of(waiting("ImagePullBackOff", &json!({})), modelrelay_harness::TEST_TIMEOUT).await.to_string();
    assert!(
        failure.contains("ImagePullBackOff: the kubelet's message") && failure.contains("Deployment a"),
        "{failure}"
    );
}

#[tokio::test]
async fn unschedulable_pod_is_awaited_and_reported_at_timeout() {
    let condition =
        json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"});
    let status = json!({"phase": "Pending", "conditions": [condition]});
    let failure = failure_of(status, Duration::from_secs(1)).await.to_string();
    for part in ["Deployment a in namespace llm", "Unschedulable: no GPU is free", "not ready after"] {
        assert!(failure.contains(part), "{part}: {failure}");
    }
}

#[tokio::test]
async fn missing_right_is_named_by_check() {
    for right in ["patch deployments/scale", "list pods"] {
        let (cluster, driver) = two().await;
        cluster.forbid(right);
        let refusal = driver.check(&"a".into()).await.unwrap_err();
        assert!(matches!(refusal, DriverError::NotOurs(_)), "{refusal:?}");
        let (verb, resource) = right.split_once(' ').unwrap();
        for part in
            [format!("{verb} on {resource}"), "403".into(), "Role of namespace llm".into(), "ServiceAccount".into()]
        {
            assert!(refusal.to_string().contains(&part), "{part}: {refusal}");
        }
    }
}

#[tokio::test]
async fn pods_are_listed_when_watching_is_forbidden() {
    let slow = Deployment { created_after: Duration::from_millis(1500), ..engine("a") };
    let cluster = Cluster::start(vec![("a", slow)]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    cluster.forbid("watch pods");
    driver.load(&"a".into(), LoadKind::Cold).await.unwrap();
    // One list and one attempt to watch each second, for the whole load timeout if necessary.
    assert!(cluster.received() < 30, "{} requests", cluster.received());
    driver.evict(&"a".into()).await.unwrap();
    assert_eq!(cluster.pods(), 0);
}

#[tokio::test]
async fn expired_watches_are_reopened() {
    let (cluster, driver) = two().await;
    cluster.expire_watches();
    driver.load(&"a".into(), LoadKind::Cold).await.unwrap();
    driver.evict(&"a".into()).await.unwrap();
    assert_eq!(cluster.pods(), 0);
}

#[tokio::test]
async fn missing_deployment_is_named_by_check() {
    let cluster = Cluster::start(vec![]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    let refusal = driver.check(&"a".into()).await.unwrap_err().to_string();
    for part in ["Deployment a in namespace llm", "404", "`deployment`"] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
}

#[tokio::test]
async fn missing_deployment_does_not_block_its_slot() {
    let cluster = Cluster::start(vec![("a", engine("a"))]).await;
    let driver = driver(&cluster, &["a", "absent"], modelrelay_harness::TEST_TIMEOUT);
    let slot = SlotDriver::new(Arc::new(driver), SlotMemory::new(Arc::new(NoMeter)));
    assert!(matches!(slot.probe(None).await, Outcome::Probed(Found::Nothing)));
    let loaded = slot.load(&"a".into(), LoadKind::Cold).await;
    assert!(matches!(loaded, Outcome::Loaded(Ok(()))), "{loaded:?}");
    let absent = "absent".into();
    assert!(slot.driver().load(&absent, LoadKind::Cold).await.is_err());
    slot.driver().force_evict(&absent).await.unwrap();
}

#[tokio::test]
async fn unreachable_api_server_ends_no_model() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    cluster.set_away(true);
    assert!(matches!(driver.check(&a).await, Err(DriverError::Silent { .. })));
    assert!(
        matches!(driver.probe(&a).await, Err(DriverError::Silent { .. })),
        "an unreachable API server does not mean that no Pod exists"
    );
    assert!(!driver.detects_absence(), "a missing reply comes from the API server, not from the model");
    let turned_away = cluster.turned_away();
    let back = async {
        until("a probe was rejected", async || cluster.turned_away() > turned_away).await;
        cluster.set_away(false);
    };
    let (loaded, ()) = tokio::join!(driver.load(&a, LoadKind::Cold), back);
    loaded.unwrap();
    cluster.set_away(true);
    assert!(driver.probe(&a).await.unwrap().ready, "requests still reach the Pod");
    let turned_away = cluster.turned_away();
    let back = async {
        until("a probe was rejected", async || cluster.turned_away() > turned_away).await;
        cluster.set_away(false);
    };
    let (evicted, ()) = tokio::join!(driver.evict(&a), back);
    evicted.unwrap();
    assert_eq!(cluster.pods(), 0);
}

#[tokio::test]
async fn revoked_rights_end_no_model() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    for right in ["list pods", "get deployments/scale"] {
        cluster.forbid(right);
        assert!(driver.probe(&a).await.unwrap().ready, "requests reach the Pod without {right}");
    }
    let error = driver.probe(&"b".into()).await.unwrap_err().to_string();
    assert!(error.contains("get on deployments/scale"), "{error}");
}

fn messages() -> Vec<String> {
    logged().iter().filter_map(|line| Some(line["message"].as_str()?.to_owned())).collect()
}

#[tokio::test]
async fn refusing_api_server_is_reported_once_per_refusal() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    listen();
    cluster.set_away(true);
    driver.probe(&a).await.unwrap();
    assert_eq!(messages(), Vec::<String>::new(), "the API server may recover");
    cluster.set_away(false);
    for _ in 0..2 {
        cluster.forbid("list pods");
        for _ in 0..3 {
            driver.probe(&a).await.unwrap();
        }
        assert_eq!(messages(), ["cannot read the model's state from the API server; relying on its Pod"]);
        cluster.allow("list pods");
        driver.probe(&a).await.unwrap();
    }
}

#[tokio::test]
async fn rotated_token_is_reread() {
    let (cluster, driver) = two().await;
    driver.load(&"a".into(), LoadKind::Cold).await.unwrap();
    cluster.rotate_token();
    driver.evict(&"a".into()).await.unwrap();
}

#[tokio::test]
async fn probe_ending_after_eviction_start_is_discarded() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    cluster.set_delay(Duration::from_millis(500));
    let received = cluster.received();
    let late = async {
        until("the probe is under way", async || cluster.received() > received).await;
        driver.evict(&a).await
    };
    let (looked, evicted) = tokio::join!(driver.probe(&a), late);
    evicted.unwrap();
    assert_eq!((looked.unwrap().ready, driver.url(&a)), (true, None));
}

#[tokio::test]
async fn transient_api_server_error_fails_no_eviction() {
    let (cluster, driver) = lingering().await;
    evicted_while(&cluster, &driver, || cluster.fail_next("get deployments/scale")).await.unwrap();
}

#[tokio::test]
async fn deployment_deleted_during_eviction_is_gone() {
    let (cluster, driver) = lingering().await;
    assert_eq!(evicted_while(&cluster, &driver, || cluster.delete("a")).await, Ok(Left::Nothing));
    assert_eq!(cluster.pods(), 0);
}

#[tokio::test]
async fn unconfirmed_eviction_fails() {
    let (cluster, driver) = lingering().await;
    let evicted = evicted_while(&cluster, &driver, || cluster.forbid("get deployments/scale")).await;
    assert!(matches!(evicted, Err(DriverError::NotOurs(_))), "{evicted:?}");
}

#[tokio::test]
async fn changed_load_timeout_applies_to_next_load() {
    let status = json!({"phase": "Pending", "conditions": []});
    let deployment = Deployment { trouble: Some(status), ..engine("a") };
    let cluster = Cluster::start(vec![("a", deployment)]).await;
    let driver = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    driver.set_load_timeout(Duration::from_secs(1));
    let began = Instant::now();
    let failure = driver.load(&"a".into(), LoadKind::Cold).await.unwrap_err().to_string();
    assert!(failure.contains("not ready after") && began.elapsed() < Duration::from_secs(5), "{failure}");
}

#[tokio::test]
async fn requests_prefer_configured_address_over_pod_address() {
    let engine = engine("a");
    let port = engine.port;
    let cluster = Cluster::start(vec![("a", engine)]).await;
    let service = on_port(port).join("/base").unwrap();
    let given = ScaledModel { served: Served::new("a"), deployment: "a".into(), url: Some(service.clone()) };
    let with_url = KubernetesScale::new(cluster.access(), [given], modelrelay_harness::TEST_TIMEOUT);
    assert_eq!(with_url.url(&"a".into()), Some(service));
    let bare = driver(&cluster, &["a"], modelrelay_harness::TEST_TIMEOUT);
    assert_eq!(bare.url(&"a".into()), None);
    bare.load(&"a".into(), LoadKind::Cold).await.unwrap();
    assert_eq!(bare.url(&"a".into()), Some(on_port(port)));
}
