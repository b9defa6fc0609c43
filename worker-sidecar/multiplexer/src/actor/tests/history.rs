//! A slot's report of its use of time.

use std::time::Duration;

use super::harness::{LOAD, Play, Stage, pass};
use crate::actor::history::Shares;

#[tokio::test(start_paused = true)]
async fn time_splits_into_serving_swap_and_idle() {
    let stage = Stage::new(&["a", "b"]).await;
    pass(3.0).await;
    let lease = stage.send_request("a").await.unwrap();
    pass(5.0).await;
    drop(lease);
    pass(4.0).await;
    let Shares { serving, swapping, idle } = stage.report().await.shares;
    let seconds = |time: Duration| time.as_secs_f64().round();
    assert_eq!((seconds(serving), seconds(swapping), seconds(idle)), (5.0, 2.0, 7.0));
    // A period that has not ended is included too, once.
    pass(2.0).await;
    let later = stage.report().await.shares;
    assert_eq!((later.serving, later.swapping, seconds(later.idle)), (serving, swapping, 9.0));
}

#[tokio::test(start_paused = true)]
async fn last_eight_failures_are_kept_newest_last() {
    let models: Vec<String> = (0..10).map(|number| format!("m{number}")).collect();
    let names: Vec<&str> = models.iter().map(String::as_str).collect();
    let stage = Stage::new(&names).await;
    for model in &names {
        stage.driver().play(&format!("load {model}"), Play::Fail(LOAD));
        assert!(stage.send_request(model).await.is_err());
    }
    let report = stage.report().await;
    let failed: Vec<&str> = report.failures.iter().map(|failure| &*failure.model).collect();
    assert_eq!(failed, names[2..]);
    assert!(report.failures[7].what.contains("load m9 failed"), "{}", report.failures[7].what);
}
