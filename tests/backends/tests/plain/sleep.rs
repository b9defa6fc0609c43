//! The driver `vllm-sleep` and a real vLLM. On a CPU the order of events and all responses are real, but no memory is
//! freed.

use modelrelay_backends::worker_program;
use modelrelay_harness::client::Request;
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::vllm_sleep::{Level, SleeperModel, VllmSleep};
use modelrelay_multiplexer::driver::{Driver, DriverError};
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::Left;

use crate::engine::{Engine, text_of};

/// The driver, for a server that another program has started.
fn driver(engine: &Engine, level: Level) -> VllmSleep {
    let model = SleeperModel { served: Served::new(engine.model), url: engine.url.clone(), launch: None };
    VllmSleep::new([model], level, worker_program())
}

async fn is_sleeping(engine: &Engine) -> bool {
    let answer = engine.fetch(Request::get("/is_sleeping")).await.with_status(200).json();
    answer["is_sleeping"].as_bool().unwrap_or_else(|| panic!("{answer}"))
}

pub(crate) async fn idle_server_sleeps_and_wakes(engine: &Engine) {
    let request = || engine.completion_request("/v1/completions", 30, false);
    let expected = text_of(&engine.fetch(request()).await);
    let model = engine.model.into();
    for (level, left) in [(Level::One, Left::Asleep), (Level::Two, Left::Emptied)] {
        let driver = driver(engine, level);
        assert_eq!(driver.check(&model).await, Ok(()));
        assert!(driver.probe(&model).await.unwrap().ready, "{level:?}");
        for _ in 0..2 {
            assert_eq!(driver.evict(&model).await, Ok(left), "{level:?}");
        }
        assert!(is_sleeping(engine).await && driver.probe(&model).await.unwrap().gone, "{level:?}");
        driver.load(&model, LoadKind::Wake).await.unwrap();
        assert!(!is_sleeping(engine).await && driver.probe(&model).await.unwrap().ready, "{level:?}");
        assert_eq!(text_of(&engine.fetch(request()).await), expected, "{level:?}");
        driver.force_evict(&model).await.unwrap();
        assert!(is_sleeping(engine).await, "{level:?}");
        driver.load(&model, LoadKind::Wake).await.unwrap();
    }
}

pub(crate) async fn running_request_ends_before_sleep(engine: &Engine) {
    // Few tokens: the driver waits for five seconds.
    let request = || engine.completion_request("/v1/completions", 40, true);
    let expected = text_of(&engine.fetch(request()).await);
    let (driver, model) = (driver(engine, Level::One), engine.model.into());
    let mut running = engine.begin(request()).response().await;
    running.read_until("data: ").await;
    assert_eq!(driver.evict(&model).await, Ok(Left::Asleep));
    assert_eq!(text_of(&running.read_to_end().await), expected);
    driver.load(&model, LoadKind::Wake).await.unwrap();
}

pub(crate) async fn endless_request_prevents_sleep(engine: &Engine) {
    let (driver, model) = (driver(engine, Level::One), engine.model.into());
    let running = engine.begin(engine.completion_request("/v1/completions", engine.endless, true));
    engine.until_running(1).await;
    assert_eq!(driver.evict(&model).await, Err(DriverError::Busy { requests: 1 }));
    assert!(!is_sleeping(engine).await);
    running.abandon();
    engine.until_running(0).await;
}
