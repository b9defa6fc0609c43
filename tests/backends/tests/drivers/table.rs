//! The behaviour of every driver, whatever its backend.

use std::time::Duration;

use modelrelay_backends::server::{post, processes_with, until};
use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::driver::DriverError;
use modelrelay_multiplexer::driver::memory::{Meter, SlotMemory};
use modelrelay_multiplexer::driver::slot::SlotDriver;
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::{Found, Left, Outcome};
use serde_json::json;

use crate::rig::Rig;

/// Long enough for a load to have begun, and far shorter than a long load.
const MIDWAY: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct NoMeter;

impl Meter for NoMeter {
    fn free(&self) -> Option<u64> {
        None
    }

    fn host_free(&self) -> Option<u64> {
        None
    }
}

pub(crate) async fn loaded_model_serves(rig: Rig) {
    load(&rig, 0).await;
    let probed = rig.driver.probe(&rig.models[0]).await.unwrap();
    assert!(probed.ready, "{probed:?}");
    assert!(probed.model_ids.iter().any(|id| id.starts_with(rig.names[0])), "{probed:?}");
    assert_serves(&rig, 0).await;
}

pub(crate) async fn repeated_load_changes_nothing(rig: Rig) {
    load(&rig, 0).await;
    let before = (rig.driver.url(&rig.models[0]), processes_with(&rig.mark));
    load(&rig, 0).await;
    assert_eq!((rig.driver.url(&rig.models[0]), processes_with(&rig.mark)), before);
    assert_serves(&rig, 0).await;
}

pub(crate) async fn repeated_eviction_succeeds_and_model_is_gone(rig: Rig) {
    load(&rig, 0).await;
    for _ in 0..2 {
        let left = rig.driver.evict(&rig.models[0]).await.unwrap();
        assert_eq!(left, rig.driver.capabilities().leaves);
        assert_eq!(is_ready(&rig, 0).await, rig.stays);
    }
    if rig.driver.capabilities().owns_backends {
        // A sleeping model too.
        rig.driver.stop(&rig.models[0]).await.unwrap();
        assert_nothing_runs(&rig);
    }
}

pub(crate) async fn eviction_of_unloaded_model_succeeds(rig: Rig) {
    rig.driver.evict(&rig.models[0]).await.unwrap();
    assert_eq!(is_ready(&rig, 0).await, rig.stays);
}

pub(crate) async fn models_swap_and_swap_back(rig: Rig) {
    for (round, nth) in [0, 1, 0, 1].into_iter().enumerate() {
        let kind = if round > 1 && rig.driver.capabilities().leaves != Left::Nothing {
            LoadKind::Wake
        } else {
            LoadKind::Cold
        };
        rig.driver.load(&rig.models[nth], kind).await.unwrap();
        assert_serves(&rig, nth).await;
        rig.driver.evict(&rig.models[nth]).await.unwrap();
    }
}

pub(crate) async fn wrong_model_fails_load(rig: Rig) {
    let failure = rig.driver.load(&rig.wrong, LoadKind::Cold).await.unwrap_err();
    let says_so = match &failure {
        LoadFailure::WrongModel { expected, found } => *expected == *rig.wrong && !found.is_empty(),
        LoadFailure::Driver(message) => message.contains(&*rig.wrong) && message.contains("not found"),
        LoadFailure::Exited(_) | LoadFailure::TimedOut(_) | LoadFailure::DiedAtOnce => false,
    };
    assert!(says_so, "{failure:?}");
    if rig.driver.capabilities().owns_backends {
        until("the unknown model is gone", async || processes_with(&rig.mark).is_empty()).await;
    }
    rig.driver.force_evict(&rig.wrong).await.unwrap();
}

pub(crate) async fn unconfigured_model_is_named(rig: Rig) {
    let stranger = Model::from("stranger");
    let unknown = DriverError::UnknownModel("stranger".to_owned());
    assert_eq!(rig.driver.check(&stranger).await, Err(unknown.clone()));
    assert_eq!(rig.driver.probe(&stranger).await, Err(unknown.clone()));
    assert_eq!(rig.driver.evict(&stranger).await, Err(unknown.clone()));
    assert_eq!(rig.driver.force_evict(&stranger).await, Err(unknown.clone()));
    assert_eq!(rig.driver.load(&stranger, LoadKind::Cold).await, Err(unknown.into()));
    assert_eq!(rig.driver.url(&stranger), None);
}

pub(crate) async fn unreachable_backend_is_reported_by_check(mut rig: Rig) {
    assert_eq!(rig.driver.check(&rig.models[0]).await, Ok(()));
    rig.kill_backends().await;
    let checked = rig.driver.check(&rig.models[0]).await;
    if rig.servers.is_empty() {
        assert_eq!(checked, Ok(()), "it is started when it is loaded");
    } else {
        assert!(matches!(checked, Err(DriverError::Unreachable { .. })), "{checked:?}");
    }
}

pub(crate) async fn dead_backend_is_detected(mut rig: Rig) {
    load(&rig, 0).await;
    let is_over = tokio::select! {
        biased;
        () = rig.driver.ended(&rig.models[0]) => true,
        () = std::future::ready(()) => false,
    };
    assert!(!is_over, "it serves");
    rig.kill_backends().await;
    if rig.driver.capabilities().owns_backends {
        let ended = tokio::time::timeout(modelrelay_harness::TEST_TIMEOUT, rig.driver.ended(&rig.models[0])).await;
        assert!(ended.is_ok(), "its parent must be notified of its exit");
    }
    let slot = SlotDriver::new(std::sync::Arc::clone(&rig.driver), SlotMemory::new(std::sync::Arc::new(NoMeter)));
    // For an external server, it is unknown whether it has ended or is temporarily overloaded.
    let expected = if rig.is_certain { Found::Nothing } else { Found::Silence };
    until(
        "its exit is reported",
        async || matches!(slot.probe(Some(&rig.models[0])).await, Outcome::Probed(found) if found == expected),
    )
    .await;
    // It is no failure that it is already gone.
    rig.driver.force_evict(&rig.models[0]).await.unwrap();
}

pub(crate) async fn forced_eviction_works_in_every_state(rig: Rig) {
    let model = &rig.models[0];
    // Never loaded; loaded; evicted; already forced.
    rig.driver.force_evict(model).await.unwrap();
    load(&rig, 0).await;
    rig.driver.force_evict(model).await.unwrap();
    if rig.driver.capabilities().owns_backends {
        assert_nothing_runs(&rig);
    }
    assert_eq!(is_ready(&rig, 0).await, rig.stays);
    load(&rig, 0).await;
    assert_serves(&rig, 0).await;
    rig.driver.evict(model).await.unwrap();
    rig.driver.force_evict(model).await.unwrap();
    rig.driver.force_evict(model).await.unwrap();
    assert_eq!(is_ready(&rig, 0).await, rig.stays);
    load(&rig, 0).await;
    assert_serves(&rig, 0).await;
}

pub(crate) async fn abandoned_load_leaves_nothing_behind(rig: Rig) {
    // A router and Ollama load quickly, so these loads are abandoned very early.
    let (midway, is_fast) = if rig.slow == rig.models[0] { (Duration::from_millis(3), true) } else { (MIDWAY, false) };
    let abandoned = tokio::time::timeout(midway, rig.driver.load(&rig.slow, LoadKind::Cold)).await;
    assert!(abandoned.is_err() || is_fast, "{abandoned:?}");
    if rig.driver.capabilities().owns_backends {
        // Before any further call.
        until("its process is gone", async || processes_with(&rig.mark).is_empty()).await;
    }
    rig.driver.force_evict(&rig.slow).await.unwrap();
    if rig.servers.is_empty() {
        assert_nothing_runs(&rig);
    }
    // An external server may have removed it from its list shortly before its process ends.
    until("no process of it is left", async || processes_with(&rig.mark).is_empty()).await;
    assert!(!rig.driver.probe(&rig.slow).await.unwrap_or_default().ready);
    load(&rig, 1).await;
    assert_serves(&rig, 1).await;
}

fn assert_nothing_runs(rig: &Rig) {
    assert_eq!(processes_with(&rig.mark), Vec::<u32>::new());
}

async fn load(rig: &Rig, nth: usize) {
    rig.driver.load(&rig.models[nth], LoadKind::Cold).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}

/// Returns false also if no server is reachable.
async fn is_ready(rig: &Rig, nth: usize) -> bool {
    match rig.driver.probe(&rig.models[nth]).await {
        Ok(probed) => probed.ready,
        Err(DriverError::Unreachable { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

async fn assert_serves(rig: &Rig, nth: usize) {
    let url = rig.driver.url(&rig.models[nth]).expect("a loaded model has an address");
    let body = json!({"model": rig.names[nth], "prompt": "Hi", "max_tokens": 1});
    let (status, answer) = post(&url, "/v1/completions", &body).await.expect("a response");
    assert_eq!(status, 200, "{answer}");
}
