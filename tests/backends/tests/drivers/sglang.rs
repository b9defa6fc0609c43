//! What SGLang's memory saver does to the careless.

use modelrelay_backends::fake::{Fake, Kind};
use modelrelay_backends::server::{Server, free_port, post};
use modelrelay_backends::worker_program;
use modelrelay_worker::multiplexer::driver::Driver;
use modelrelay_worker::multiplexer::driver::served::Served;
use modelrelay_worker::multiplexer::driver::sglang::{SaverModel, Sglang};
use modelrelay_worker::multiplexer::estimate::LoadKind;
use serde_json::json;

use crate::rig::FAKE;

async fn foreign(defects: &[&str], reload_from: Option<&str>) -> (Server, Sglang) {
    let port = free_port();
    let fake = Fake::new(FAKE, Kind::Sglang, "m", &port.to_string());
    let fake = defects.iter().fold(fake, |fake, defect| fake.with(defect));
    let server = Server::start(&fake.command(), &[], port).await;
    let reload_from = reload_from.map(str::to_owned);
    let model = SaverModel { served: Served::new("m"), url: server.url.clone(), launch: None, reload_from };
    (server, Sglang::new([model], worker_program()))
}

#[tokio::test]
async fn a_request_that_runs_is_ended_before_memory_is_released() {
    let (server, driver) = foreign(&[], None).await;
    let model = "m".into();
    let body = json!({"model": "m", "prompt": "Hi", "max_tokens": 5});
    let (answer, left) = tokio::join!(post(&server.url, "/v1/completions", &body), driver.evict(&model));
    assert!(left.is_ok(), "{left:?}");
    drop(answer);
    driver.load(&model, LoadKind::Wake).await.unwrap();
}

#[tokio::test]
async fn weights_that_were_not_kept_are_found_to_be_garbage_or_read_again() {
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

/// A worker that begins while a foreign engine has released its memory, by the word of a worker before it.
async fn successor() -> (Server, Sglang) {
    let (server, before) = foreign(&[], None).await;
    before.evict(&"m".into()).await.unwrap();
    let model = SaverModel { served: Served::new("m"), url: server.url.clone(), launch: None, reload_from: None };
    (server, Sglang::new([model], worker_program()))
}

#[tokio::test]
async fn a_foreign_engine_that_was_released_before_is_not_taken_for_one_that_serves() {
    let (_server, driver) = successor().await;
    let seen = driver.probe(&"m".into()).await;
    assert!(!seen.is_ok_and(|probed| probed.ready), "its health is good, and it generates nothing");

    let (_server, driver) = successor().await;
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err().to_string();
    assert!(failure.contains("released its memory") && failure.contains("restart it"), "{failure}");
}

#[tokio::test]
async fn a_foreign_engine_that_serves_is_found() {
    let (_server, driver) = foreign(&[], None).await;
    assert!(driver.probe(&"m".into()).await.unwrap().ready);
}
