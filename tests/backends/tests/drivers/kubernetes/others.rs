//! Other programs scale the models' Deployments.

use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_backends::server::until;
use modelrelay_harness::own_log::listen;
use modelrelay_multiplexer::driver::Driver;
use modelrelay_multiplexer::driver::memory::SlotMemory;
use modelrelay_multiplexer::driver::slot::SlotDriver;
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::{Found, Outcome};

use super::{messages, two};
use crate::table::NoMeter;

#[tokio::test]
async fn extra_replicas_of_loaded_model_are_reported_once() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    listen();
    for (replicas, lines) in [(1, 0), (2, 1), (3, 1), (1, 0), (3, 1)] {
        cluster.scale("a", replicas);
        for _ in 0..3 {
            assert!(driver.probe(&a).await.unwrap().ready);
        }
        let logged = messages();
        assert!(
            logged.iter().all(|line| line.starts_with("Deployment of a loaded model was scaled up externally")),
            "{logged:?}"
        );
        assert_eq!(logged.len(), lines, "{replicas} replicas: {logged:?}");
    }
}

#[tokio::test]
async fn model_running_before_worker_start_is_adopted() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    cluster.scale("a", 1);
    until("it is found", async || driver.probe(&a).await.is_ok_and(|probed| probed.ready)).await;
    let (found, answered) = (driver.url(&a).expect("an address"), driver.url(&"b".into()));
    driver.load(&a, LoadKind::Cold).await.unwrap();
    assert_eq!((driver.url(&a), answered), (Some(found), None));
}

#[tokio::test]
async fn externally_stopped_model_is_gone_and_reported_once() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    listen();
    cluster.scale("a", 0);
    until("it is gone", async || driver.probe(&a).await.is_ok_and(|probed| probed.gone)).await;
    assert!(driver.probe(&a).await.unwrap().gone);
    let logged = messages();
    assert!(
        matches!(&logged[..], [line] if line.starts_with("Deployment of a loaded model was scaled to 0 externally")),
        "{logged:?}"
    );
}

#[tokio::test]
async fn externally_started_second_model_is_scaled_down() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    for _ in 0..2 {
        cluster.scale("b", 1);
        until("it is scaled down", async || driver.probe(&a).await.unwrap().ready && cluster.replicas("b") == 0).await;
        assert_eq!(cluster.replicas("a"), 1);
    }
}

#[tokio::test]
async fn external_scaling_does_not_delay_resident_probe() {
    let (cluster, driver) = two().await;
    let a = "a".into();
    driver.load(&a, LoadKind::Cold).await.unwrap();
    cluster.scale("b", 1);
    cluster.set_delay(Duration::from_secs(1));
    let began = Instant::now();
    assert!(driver.probe(&a).await.unwrap().ready);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(3), "expected two queries of 1 s each, took {took:?}");
    until("the other is scaled down", async || cluster.replicas("b") == 0).await;
}

#[tokio::test]
async fn model_replacing_resident_externally_keeps_its_slot() {
    let (cluster, driver) = two().await;
    let (a, b) = ("a".into(), "b".into());
    driver.load(&a, LoadKind::Cold).await.unwrap();
    cluster.scale("a", 0);
    until("it is gone", async || driver.probe(&a).await.is_ok_and(|probed| probed.gone)).await;
    cluster.scale("b", 1);
    until("the other serves", async || driver.probe(&b).await.is_ok_and(|probed| probed.ready)).await;
    cluster.scale("a", 1);
    until("it is scaled down", async || driver.probe(&b).await.unwrap().ready && cluster.replicas("a") == 0).await;
    assert_eq!(cluster.replicas("b"), 1);
}

#[tokio::test]
async fn only_one_of_two_running_models_is_adopted() {
    let (cluster, driver) = two().await;
    cluster.scale("a", 1);
    cluster.scale("b", 1);
    let slot = SlotDriver::new(Arc::new(driver), SlotMemory::new(Arc::new(NoMeter)));
    let serves = |found: &Outcome| matches!(found, Outcome::Probed(Found::Serving(_)));
    until("one is found", async || serves(&slot.probe(None).await)).await;
    until("the other is gone", async || cluster.pods() == 1).await;
    assert_eq!(cluster.replicas("a") + cluster.replicas("b"), 1);
    assert!(serves(&slot.probe(None).await));
}
