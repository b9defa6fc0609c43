//! SGLang's memory saver and its pitfalls.

use std::time::Duration;

use modelrelay_backends::fake::{Fake, Kind};
use modelrelay_backends::server::{Server, free_port, get, is_listening, post, until};
use modelrelay_backends::worker_program;
use modelrelay_harness::TEST_TIMEOUT;
use modelrelay_multiplexer::driver::launch::{Launch, PORT};
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::sglang::{SaverModel, Sglang};
use modelrelay_multiplexer::driver::{Driver, DriverError, Probed};
use modelrelay_multiplexer::estimate::LoadKind;
use serde_json::json;

use crate::rig::{FAKE, on_port};

/// The seconds after which the fake's health check times out.
const HEALTH_TIMEOUT: &str = "SGLANG_HEALTH_CHECK_TIMEOUT";

async fn started(words: &[&str], env: &[(&str, String)]) -> Server {
    let port = free_port();
    let fake = Fake::new(FAKE, Kind::Sglang, "m", &port.to_string());
    Server::start(&words.iter().fold(fake, |fake, word| fake.with(word)).command(), env, port).await
}

/// A driver without knowledge of the server.
fn driver_of(server: &Server, reload_from: Option<&str>) -> Sglang {
    let reload_from = reload_from.map(str::to_owned);
    let model = SaverModel { served: Served::new("m"), url: server.url.clone(), launch: None, reload_from };
    Sglang::new([model], worker_program())
}

async fn foreign(defects: &[&str], reload_from: Option<&str>) -> (Server, Sglang) {
    let server = started(defects, &[]).await;
    let driver = driver_of(&server, reload_from);
    (server, driver)
}

#[tokio::test]
async fn running_request_ends_before_memory_is_released() {
    let (server, driver) = foreign(&[], None).await;
    let model = "m".into();
    let body = json!({"model": "m", "prompt": "Hi", "max_tokens": 5});
    let (answer, left) = tokio::join!(post(&server.url, "/v1/completions", &body), driver.evict(&model));
    assert!(left.is_ok(), "{left:?}");
    drop(answer);
    driver.load(&model, LoadKind::Wake).await.unwrap();
}

#[tokio::test]
async fn unpreserved_weights_are_rejected_or_reread() {
    let model = "m".into();
    let (_server, driver) = foreign(&["no-backup"], None).await;
    driver.evict(&model).await.unwrap();
    let failure = driver.load(&model, LoadKind::Wake).await.unwrap_err().to_string();
    assert!(failure.contains("garbage"), "{failure}");

    let (server, driver) = foreign(&["no-backup"], Some("/weights")).await;
    driver.evict(&model).await.unwrap();
    driver.load(&model, LoadKind::Wake).await.unwrap();
    let answer = post(&server.url, "/v1/completions", &json!({"model": "m", "prompt": "Hi"})).await;
    assert_eq!(answer.map(|(status, _)| status), Some(200));
}

/// A worker that starts while an external engine has released its memory on a previous worker's command.
async fn successor() -> (Server, Sglang) {
    let (server, before) = foreign(&[], None).await;
    before.evict(&"m".into()).await.unwrap();
    let driver = driver_of(&server, None);
    (server, driver)
}

#[tokio::test]
async fn released_foreign_engine_is_not_treated_as_serving() {
    let (_server, driver) = successor().await;
    let result = driver.probe(&"m".into()).await;
    assert!(!result.is_ok_and(|probed| probed.ready), "healthy but generates no tokens");

    let (_server, driver) = successor().await;
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err().to_string();
    assert!(failure.contains("released its memory") && failure.contains("restart it"), "{failure}");
}

#[tokio::test]
async fn serving_foreign_engine_is_found() {
    let (_server, driver) = foreign(&[], None).await;
    assert!(driver.probe(&"m".into()).await.unwrap().ready);
}

/// Longer than `/ready` takes on a busy machine, and less than the minimum for `/health`.
const AT_ONCE: Duration = Duration::from_millis(900);

#[tokio::test]
async fn paused_fake_answers_only_readiness() {
    let (server, driver) = foreign(&[], None).await;
    driver.evict(&"m".into()).await.unwrap();
    assert_eq!(get(&server.url, "/ready").await.map(|(status, _)| status), Some(503));
    let health = tokio::time::timeout(Duration::from_secs(3), get(&server.url, "/health")).await;
    assert!(health.is_err(), "{health:?}");
}

#[tokio::test]
async fn released_server_is_probed_and_checked_at_once() {
    let (_server, driver) = foreign(&[], None).await;
    let model = "m".into();
    driver.evict(&model).await.unwrap();
    let looks = async { (driver.check(&model).await, driver.probe(&model).await) };
    let looks = tokio::time::timeout(AT_ONCE, looks).await.expect("both respond at once");
    assert_eq!(looks, (Ok(()), Ok(Probed::gone())));
}

#[tokio::test]
async fn health_check_in_sleep_does_not_prevent_waking() {
    let server = started(&[], &[(HEALTH_TIMEOUT, "1".to_owned())]).await;
    let (driver, model) = (driver_of(&server, None), "m".into());
    driver.evict(&model).await.unwrap();
    assert_eq!(get(&server.url, "/health").await.map(|(status, _)| status), Some(503));
    let load = tokio::time::timeout(TEST_TIMEOUT, driver.load(&model, LoadKind::Wake)).await;
    assert_eq!(load, Ok(Ok(())));
    assert!(driver.probe(&model).await.unwrap().ready);
}

#[tokio::test]
async fn server_without_ready_sleeps_and_wakes() {
    let (_server, driver) = foreign(&["no-ready"], None).await;
    let model = "m".into();
    assert!(driver.probe(&model).await.unwrap().ready);
    driver.evict(&model).await.unwrap();
    assert_eq!(driver.check(&model).await, Ok(()));
    driver.load(&model, LoadKind::Wake).await.unwrap();
}

#[tokio::test]
async fn eviction_releases_cuda_graphs_too() {
    let (server, driver) = foreign(&[], None).await;
    let model = "m".into();
    driver.evict(&model).await.unwrap();
    let graphs = json!({"tags": ["cuda_graph"]});
    let resumed = post(&server.url, "/resume_memory_occupation", &graphs).await;
    assert_eq!(resumed.map(|(status, _)| status), Some(200), "memory that was not released must stop the server");
}

#[tokio::test]
async fn admin_key_of_command_is_sent() {
    let command = Fake::new(FAKE, Kind::Sglang, "m", PORT).with("--admin-api-key").with("a").command();
    let launch = Some(Launch { command, ..Launch::default() });
    let model = SaverModel { served: Served::new("m"), url: on_port(free_port()), launch, reload_from: None };
    let driver = Sglang::new([model], worker_program());
    let model = "m".into();
    driver.load(&model, LoadKind::Cold).await.unwrap();
    driver.evict(&model).await.unwrap();
    driver.load(&model, LoadKind::Wake).await.unwrap();
    driver.stop(&model).await.unwrap();
}

#[tokio::test]
async fn refused_key_error_names_admin_key() {
    let (_server, driver) = foreign(&["--admin-api-key", "a"], None).await;
    let error = driver.evict(&"m".into()).await.unwrap_err();
    assert!(matches!(error, DriverError::Unexpected { .. }), "{error}");
    assert!(error.to_string().contains("--admin-api-key"), "{error}");
}

#[tokio::test]
async fn load_of_paused_foreign_server_fails_soon() {
    let load = async |defects: &[&str]| {
        let (server, driver) = foreign(defects, None).await;
        post(&server.url, "/pause_generation", &json!({})).await.expect("a response");
        let load = tokio::time::timeout(Duration::from_secs(20), driver.load(&"m".into(), LoadKind::Cold)).await;
        load.expect("it fails soon").unwrap_err().to_string()
    };
    let (with, without) = tokio::join!(load(&[]), load(&["no-ready"]));
    for failure in [with, without] {
        assert!(failure.contains("released its memory") && failure.contains("restart it"), "{failure}");
    }
}

#[tokio::test]
async fn fake_dies_of_second_release() {
    let (server, driver) = foreign(&[], None).await;
    driver.evict(&"m".into()).await.unwrap();
    post(&server.url, "/release_memory_occupation", &json!({})).await;
    until("the server has exited", async || !is_listening(server.url.port().expect("the URL has a port")).await).await;
}
