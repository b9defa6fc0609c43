//! The models that are reported to relays as failing: the [outliers](super::outliers), their log lines and their
//! metric.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use super::outliers::{Change, Outliers};
use crate::metrics::Metrics;

/// The failing models of a worker, by their ids.
#[derive(Debug)]
pub struct Failing {
    outliers: Mutex<Outliers>,
    /// Notified when a model is ejected.
    ejected: Notify,
    metrics: Arc<Metrics>,
}

impl Failing {
    /// No model fails.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { outliers: Mutex::default(), ejected: Notify::new(), metrics }
    }

    /// Applies the status of a response for a model. Returns true if the reported models changed.
    #[must_use]
    pub fn handle_status(&self, model: &str, status: u16) -> bool {
        let mut outliers = self.lock();
        let was_ejected = status < 500 && outliers.is_ejected(model);
        let Some(change) = outliers.handle_status(model, status, Instant::now()) else { return false };
        self.metrics.failing_models(outliers.ejected());
        drop(outliers);
        match change {
            Change::Ejected(time) => {
                tracing::warn!(model, seconds = time.as_secs(), "the backend fails every request for the model");
                self.ejected.notify_one();
                true
            }
            Change::Recovered => {
                tracing::info!(model, "the backend responds to requests for the model again");
                was_ejected
            }
        }
    }

    /// Returns when the ejection of a model has expired.
    pub async fn expired(&self) {
        loop {
            let next = self.lock().next_timeout();
            let Some(next) = next else {
                self.ejected.notified().await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = self.ejected.notified() => {}
            }
            if self.expire() {
                return;
            }
        }
    }

    fn expire(&self) -> bool {
        let mut outliers = self.lock();
        let on_trial = outliers.expire(Instant::now());
        self.metrics.failing_models(outliers.ejected());
        drop(outliers);
        for model in &on_trial {
            tracing::info!(model = &**model, "retrying a failing model");
        }
        !on_trial.is_empty()
    }

    /// True while the model is reported as failing.
    pub fn contains(&self, model: &str) -> bool {
        self.lock().is_ejected(model)
    }

    /// Forgets everything: the backend is another one, or was restarted.
    pub fn clear(&self) {
        self.lock().clear();
        self.metrics.failing_models(0);
    }

    fn lock(&self) -> MutexGuard<'_, Outliers> {
        self.outliers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
