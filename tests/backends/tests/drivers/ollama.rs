//! Behaviour specific to Ollama.

use modelrelay_multiplexer::driver::DriverError;

use crate::rig;

#[tokio::test]
async fn unpulled_model_is_rejected_by_check() {
    let Some(rig) = rig::ollama().await else { return };
    let checked = rig.driver.check(&rig.wrong).await;
    assert!(
        matches!(&checked, Err(DriverError::Refused { status: 404, message, .. }) if message.contains("not found")),
        "{checked:?}"
    );
    assert_eq!(rig.driver.check(&rig.models[0]).await, Ok(()));
}
