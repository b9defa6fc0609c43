//! What only a router does.

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
