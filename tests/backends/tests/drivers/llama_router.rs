//! Behaviour specific to a router.

use modelrelay_backends::engines;
use modelrelay_worker::multiplexer::driver::llama_router::LlamaRouter;
use modelrelay_worker::multiplexer::driver::{Driver, DriverError};
use modelrelay_worker::multiplexer::error::LoadFailure;
use modelrelay_worker::multiplexer::estimate::LoadKind;

use crate::rig;

#[tokio::test]
async fn a_model_whose_process_ends_fails_at_once_with_its_exit_code() {
    let Some(rig) = rig::llama_router().await else { return };
    let failure = rig.driver.load(&"broken".into(), LoadKind::Cold).await.unwrap_err();
    assert!(matches!(&failure, LoadFailure::Exited(words) if words.contains("exit code 1")), "{failure:?}");
    rig.driver.force_evict(&"broken".into()).await.unwrap();
}

#[tokio::test]
async fn a_load_that_was_abandoned_before_it_was_told_is_taken_back_all_the_same() {
    let Some(rig) = rig::llama_router().await else { return };
    for micros in [0, 200, 1_000, 5_000, 50_000] {
        let load = rig.driver.load(&rig.models[0], LoadKind::Cold);
        let _ = tokio::time::timeout(std::time::Duration::from_micros(micros), load).await;
        rig.driver.force_evict(&rig.models[0]).await.unwrap();
        assert!(!rig.driver.probe(&rig.models[0]).await.unwrap().ready, "after {micros} us");
    }
}

#[tokio::test]
async fn a_model_that_the_router_does_not_have_is_known_beforehand() {
    let Some(rig) = rig::llama_router().await else { return };
    let checked = rig.driver.check(&rig.wrong).await;
    assert!(matches!(&checked, Err(DriverError::WrongModel { .. })), "{checked:?}");
    assert!(rig.driver.probe(&rig.wrong).await.unwrap().gone, "there is nothing to unload before another is loaded");
    assert_eq!(rig.driver.check(&rig.models[0]).await, Ok(()));
}

#[tokio::test]
async fn a_llama_server_of_one_model_is_told_from_a_router() {
    let folder = rig::folder();
    let Some(weights) = engines::weights(folder.path(), "", &["tiny-a"]) else { return };
    let Some(server) = engines::llama_server(&weights[0], "tiny-a", 1).await else { return };
    let driver = LlamaRouter::new(server.url.clone(), vec!["tiny-a".into()]);
    let (checked, loaded) = (driver.check(&"tiny-a".into()).await, driver.load(&"tiny-a".into(), LoadKind::Cold).await);
    for said in [checked.unwrap_err().to_string(), loaded.unwrap_err().to_string()] {
        assert!(said.contains("--models-preset"), "{said}");
    }
}
