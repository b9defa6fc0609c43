//! The return of the slots' backends, which ends a `/drain`.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::driver::DriverError;
use modelrelay_multiplexer::driver::slot::SlotDriver;

/// The interval between two checks of a multiplexer's backends during a drain. A container takes longer to restart.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Returns when at least one of the slots' backends has gone and all of them have returned, loaded or not; never, if no
/// driver can detect their absence. The worker's own children are ignored: they live in the worker's own container, and
/// end with it.
pub(super) async fn returned(drivers: &[Arc<SlotDriver>]) {
    let external_models = |driver: &Arc<SlotDriver>| {
        let models = driver.driver().models().into_iter().filter(|model| !driver.driver().owns(model));
        models.map(|model| (Arc::clone(driver), model)).collect::<Vec<_>>()
    };
    let detecting = drivers.iter().filter(|driver| driver.driver().detects_absence());
    let watched: Vec<_> = detecting.flat_map(external_models).collect();
    if watched.is_empty() {
        return std::future::pending().await;
    }
    let mut has_gone = false;
    loop {
        if !are_available(&watched).await {
            has_gone = true;
        } else if has_gone {
            return;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

async fn are_available(watched: &[(Arc<SlotDriver>, Model)]) -> bool {
    for (driver, model) in watched {
        if let Err(error) = driver.driver().check(model).await
            && is_absence(&error)
        {
            tracing::debug!(model = &**model, %error, "drained, and the backend is unavailable");
            return false;
        }
    }
    true
}

/// A server that does not have the model, or has another one, is present all the same.
fn is_absence(error: &DriverError) -> bool {
    let failed = matches!(error, DriverError::Refused { status, .. } if *status >= 500);
    failed || matches!(error, DriverError::Unreachable { .. } | DriverError::Silent { .. })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use modelrelay_multiplexer::driver::memory::{Meter, SlotMemory};
    use modelrelay_multiplexer::driver::{Call, Capabilities, Driver, Probed, Returns};
    use modelrelay_multiplexer::error::LoadFailure;
    use modelrelay_multiplexer::estimate::LoadKind;
    use modelrelay_multiplexer::event::Left;
    use url::Url;

    use super::*;

    /// Measures nothing, like a machine without a GPU library.
    #[derive(Debug)]
    struct Blind;

    impl Meter for Blind {
        fn free(&self) -> Option<u64> {
            None
        }

        fn host_free(&self) -> Option<u64> {
            None
        }
    }

    /// A server that a third party restarts: one result after another, and then it is present.
    #[derive(Debug)]
    struct Restarted {
        answers: Mutex<VecDeque<Result<(), DriverError>>>,
        detects_absence: bool,
        checks: Mutex<Vec<tokio::time::Instant>>,
    }

    impl Driver for Restarted {
        fn capabilities(&self) -> Capabilities {
            Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: Returns::ALL }
        }

        fn models(&self) -> Vec<Model> {
            vec!["a".into()]
        }

        fn url(&self, _: &Model) -> Option<Url> {
            None
        }

        fn detects_absence(&self) -> bool {
            self.detects_absence
        }

        fn check<'a>(&'a self, _: &'a Model) -> Call<'a, Result<(), DriverError>> {
            self.checks.lock().unwrap().push(tokio::time::Instant::now());
            Box::pin(std::future::ready(self.answers.lock().unwrap().pop_front().unwrap_or(Ok(()))))
        }

        fn probe<'a>(&'a self, _: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
            Box::pin(std::future::pending())
        }

        fn load<'a>(&'a self, _: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
            Box::pin(std::future::pending())
        }

        fn evict<'a>(&'a self, _: &'a Model) -> Call<'a, Result<Left, DriverError>> {
            Box::pin(std::future::pending())
        }

        fn force_evict<'a>(&'a self, _: &'a Model) -> Call<'a, Result<(), DriverError>> {
            Box::pin(std::future::pending())
        }
    }

    fn gone() -> Result<(), DriverError> {
        Err(DriverError::Unreachable { url: "http://a".to_owned(), why: "refused".to_owned() })
    }

    fn refused(status: u16) -> Result<(), DriverError> {
        Err(DriverError::Refused { url: "http://a".to_owned(), status, message: "model not found".to_owned() })
    }

    /// Returns whether it is considered restarted within a minute, and the times of the checks.
    async fn watched(
        detects_absence: bool,
        answers: impl IntoIterator<Item = Result<(), DriverError>>,
    ) -> (bool, Vec<Duration>) {
        let answers = Mutex::new(answers.into_iter().collect());
        let driver = Arc::new(Restarted { answers, detects_absence, checks: Mutex::default() });
        let slot = Arc::new(SlotDriver::new(Arc::<Restarted>::clone(&driver), SlotMemory::new(Arc::new(Blind))));
        let began = tokio::time::Instant::now();
        let is_back = tokio::time::timeout(Duration::from_secs(60), returned(&[slot])).await.is_ok();
        let checks = driver.checks.lock().unwrap().iter().map(|check| *check - began).collect();
        (is_back, checks)
    }

    #[tokio::test(start_paused = true)]
    async fn returned_backend_is_detected_with_limited_probing() {
        let (is_back, checks) = watched(true, [Ok(()), gone(), Ok(())]).await;
        assert_eq!((is_back, checks), (true, [0, 2, 4].map(Duration::from_secs).to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn undetectable_backend_is_neither_probed_nor_back() {
        assert_eq!(watched(false, [Ok(()), gone(), Ok(())]).await, (false, Vec::new()));
    }

    #[tokio::test(start_paused = true)]
    async fn missing_model_at_server_does_not_keep_drain() {
        let wrong = || Err(DriverError::WrongModel { expected: "a".to_owned(), found: Vec::new() });
        assert!(watched(true, [refused(404), gone(), refused(404)]).await.0);
        assert!(watched(true, [wrong(), refused(503), wrong()]).await.0);
        // A drain is also not undone before the server was gone.
        let never_gone = std::iter::repeat_with(|| refused(404)).take(99);
        assert!(!watched(true, never_gone).await.0);
    }
}
