//! Behaviour specific to a router.

use modelrelay_backends::engines;
use modelrelay_multiplexer::driver::llama_router::LlamaRouter;
use modelrelay_multiplexer::driver::{Driver, DriverError};
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;

use crate::rig;

#[tokio::test]
async fn ended_model_process_fails_load_with_exit_code() {
    let Some(rig) = rig::llama_router().await else { return };
    let failure = rig.driver.load(&"broken".into(), LoadKind::Cold).await.unwrap_err();
    assert!(matches!(&failure, LoadFailure::Exited(words) if words.contains("exit code 1")), "{failure:?}");
    rig.driver.force_evict(&"broken".into()).await.unwrap();
}

#[tokio::test]
async fn load_abandoned_before_sending_is_reverted() {
    let Some(rig) = rig::llama_router().await else { return };
    for micros in [0, 200, 1_000, 5_000, 50_000] {
        let load = rig.driver.load(&rig.models[0], LoadKind::Cold);
        let _ = tokio::time::timeout(std::time::Duration::from_micros(micros), load).await;
        rig.driver.force_evict(&rig.models[0]).await.unwrap();
        assert!(!rig.driver.probe(&rig.models[0]).await.unwrap().ready, "after {micros} us");
    }
}

#[tokio::test]
async fn unknown_router_model_is_rejected_by_check() {
    let Some(rig) = rig::llama_router().await else { return };
    let checked = rig.driver.check(&rig.wrong).await;
    assert!(matches!(&checked, Err(DriverError::WrongModel { .. })), "{checked:?}");
    assert!(rig.driver.probe(&rig.wrong).await.unwrap().gone, "no model needs unloading before another is loaded");
    assert_eq!(rig.driver.check(&rig.models[0]).await, Ok(()));
}

#[tokio::test]
async fn single_model_llama_server_is_rejected() {
    let folder = rig::folder();
    let Some(weights) = engines::weights(folder.path(), "", &["tiny-a"]) else { return };
    let Some(server) = engines::llama_server(&weights[0], "tiny-a", 1).await else { return };
    let driver = LlamaRouter::new(server.url.clone(), vec!["tiny-a".into()]);
    let (checked, loaded) = (driver.check(&"tiny-a".into()).await, driver.load(&"tiny-a".into(), LoadKind::Cold).await);
    for error in [checked.unwrap_err().to_string(), loaded.unwrap_err().to_string()] {
        assert!(error.contains("--models-preset"), "{error}");
    }
}
