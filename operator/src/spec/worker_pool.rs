//! Checks what the schema cannot check, and parses the values for the rest of the controller.

mod multiplexer;
pub mod reasons;
pub mod selection;

use std::time::Duration;

use modelrelay_protocol::units::UnitError;

use super::workload::Workload;
use crate::crd::worker_pool::{Scaling, TargetRef};
use crate::crd::{Multiplexer, WorkerPool};
use reasons::Reason;

/// The number of requests that one backend runs at once if the pool sets none: engines on a GPU batch, and one at a
/// time would waste most of it.
const DEFAULT_MAX_CONCURRENCY: i32 = 16;

/// A pool with a valid spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    /// The workload of its Pods, if the operator runs them.
    pub workload: Option<Workload>,
    /// Its scaling, if the operator scales it.
    pub scaling: Option<ScalingConfig>,
    /// The workload of another owner that the operator scales.
    pub target: Option<TargetRef>,
}

/// A pool's validated scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingConfig {
    /// The minimum number of Pods.
    pub min: i32,
    /// The maximum number of Pods.
    pub max: i32,
    /// The number of requests that one Pod should have.
    pub target: u32,
    /// The time for which fewer Pods must be enough.
    pub delay: Duration,
}

/// A problem of a spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValidateError {
    /// A setting of the multiplexer that its workers would reject.
    #[error("{field}: {problem}")]
    Multiplexer {
        /// The field.
        field: String,
        /// The problem, and the change that fixes it.
        problem: String,
    },
    /// An invalid duration that the schema does not catch.
    #[error("{field}: {source}")]
    Duration {
        /// The field.
        field: &'static str,
        /// The parse error.
        source: UnitError,
    },
}

impl ValidateError {
    /// Returns the condition's reason.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Multiplexer { .. } | Self::Duration { .. } => Reason::InvalidSpec,
        }
    }
}

/// Checks a pool.
pub fn validate(pool: &WorkerPool) -> Result<Validated, ValidateError> {
    let spec = &pool.spec;
    multiplexer::validate(spec)?;
    spec.shutdown_timeout
        .parse()
        .map_err(|source| ValidateError::Duration { field: "spec.shutdownTimeout", source })?;
    let workload = Workload::of(pool);
    // The schema rejects both together; an older one did not know the target.
    let target = spec.target().filter(|_| workload.is_none()).cloned();
    let scaling = spec.scaling.as_ref().filter(|_| workload == Some(Workload::Backend) || target.is_some());
    Ok(Validated { workload, scaling: scaling.map(|scaling| config(pool, scaling)).transpose()?, target })
}

fn config(pool: &WorkerPool, scaling: &Scaling) -> Result<ScalingConfig, ValidateError> {
    let delay = scaling
        .scale_down_delay
        .parse()
        .map_err(|source| ValidateError::Duration { field: "spec.scaling.scaleDownDelay", source })?;
    let target = scaling.target_requests_per_replica.unwrap_or_else(|| max_concurrency(pool));
    let max = scaling.max_replicas.max(1);
    Ok(ScalingConfig {
        // The schema rejects more than maxReplicas; an older schema did not, and that must not cause a panic.
        min: scaling.min_replicas.clamp(0, max),
        max,
        target: u32::try_from(target).unwrap_or(1).max(1),
        delay,
    })
}

/// Returns the number of requests that one worker runs at once: those of its backend, or of all its slots.
pub fn max_concurrency(pool: &WorkerPool) -> i32 {
    match pool.spec.slots() {
        Some(multiplexer) => multiplexer.capacity(),
        None => pool.spec.max_concurrency.unwrap_or(DEFAULT_MAX_CONCURRENCY),
    }
}

/// Returns the models for which a request may wake the pool: those it lists, those of its slots, and, if it takes its
/// models from its backends, those they last had. Models that a pool advertised before its list was changed are
/// excluded, because it will not serve them again.
pub fn wakeable_models(pool: &WorkerPool) -> impl Iterator<Item = &String> {
    let slots = pool.spec.slots();
    let takes_all = slots.is_none() && pool.spec.models.iter().any(|model| model == "*");
    let advertised = pool.status.iter().flat_map(|status| &status.models).filter(move |_| takes_all);
    let of_slots = slots.into_iter().flat_map(Multiplexer::models);
    pool.spec.models.iter().filter(|model| *model != "*").chain(advertised).chain(of_slots)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::manifests::testing;

    fn validated(change: &Value) -> Result<Validated, ValidateError> {
        let mut spec = json!({"provider": "local", "template": {"spec": {"containers": [{"name": "a"}]}}});
        json_patch::merge(&mut spec, change);
        validate(&testing::pool(&spec))
    }

    #[test]
    fn target_defaults_to_backend_concurrency() {
        let scaling = json!({"minReplicas": 0, "maxReplicas": 8});
        let config = |change: Value| validated(&change).unwrap().scaling.unwrap();
        let expected = ScalingConfig { min: 0, max: 8, target: 16, delay: Duration::from_secs(600) };
        assert_eq!(config(json!({"scaling": scaling})), expected);
        assert_eq!(config(json!({"scaling": scaling, "maxConcurrency": 4})).target, 4);
        let own = json!({"maxReplicas": 8, "targetRequestsPerReplica": 9});
        assert_eq!(config(json!({"scaling": own, "maxConcurrency": 4})).target, 9);
    }

    #[test]
    fn multiplexer_target_is_sum_of_slot_concurrency() {
        let model = |id: &str, at_once: i64| json!({"id": id, "url": "http://127.0.0.1:1", "maxConcurrency": at_once});
        let slot = |id: &str, models: Value| json!({"id": id, "driver": "static", "models": models});
        let one = json!({"id": "c", "url": "http://127.0.0.1:2"});
        let slots = json!([slot("0", json!([model("a", 8), model("b", 4)])), slot("1", json!([one]))]);
        let pool = json!({"multiplexer": {"slots": slots}, "scaling": {"maxReplicas": 2}});
        assert_eq!(validated(&pool).unwrap().scaling.unwrap().target, 8 + 1);
    }

    #[test]
    fn unreadable_duration_is_rejected_by_field() {
        let error = validated(&json!({"shutdownTimeout": "soon"})).unwrap_err();
        assert!(error.to_string().starts_with("spec.shutdownTimeout: "), "{error}");
        let error = validated(&json!({"scaling": {"maxReplicas": 2, "scaleDownDelay": "0s"}})).unwrap_err();
        assert!(error.to_string().starts_with("spec.scaling.scaleDownDelay: "), "{error}");
    }
}
