//! Behaviour specific to Ollama.

use modelrelay_worker::multiplexer::driver::DriverError;

use crate::rig;

#[tokio::test]
async fn a_model_that_was_never_pulled_is_known_beforehand() {
    let Some(rig) = rig::ollama().await else { return };
    let checked = rig.driver.check(&rig.wrong).await;
    assert!(
        matches!(&checked, Err(DriverError::Refused { status: 404, said, .. }) if said.contains("not found")),
        "{checked:?}"
    );
    assert_eq!(rig.driver.check(&rig.models[0]).await, Ok(()));
}
