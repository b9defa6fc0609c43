//! Checks what the schema cannot check, and parses the values for the rest of the controller.

mod multiplexer;

use modelrelay_protocol::units::UnitError;

use super::reasons::Reason;
use super::scaling::Config;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::Scaling;
use crate::manifests::backend::Workload;
use crate::manifests::worker_config;

/// A pool with a valid spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    /// The workload of its Pods, if the operator runs them.
    pub workload: Option<Workload>,
    /// Its scaling, if the operator scales it.
    pub scaling: Option<Config>,
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
    let scaling = spec.scaling.as_ref().filter(|_| workload == Some(Workload::Backend));
    Ok(Validated { workload, scaling: scaling.map(|scaling| config(pool, scaling)).transpose()? })
}

fn config(pool: &WorkerPool, scaling: &Scaling) -> Result<Config, ValidateError> {
    let delay = scaling
        .scale_down_delay
        .parse()
        .map_err(|source| ValidateError::Duration { field: "spec.scaling.scaleDownDelay", source })?;
    let target = scaling.target_requests_per_replica.unwrap_or_else(|| worker_config::max_concurrency(pool));
    let max = scaling.max_replicas.max(1);
    Ok(Config {
        // The schema rejects more than maxReplicas; an older schema did not, and that must not cause a panic.
        min: scaling.min_replicas.clamp(0, max),
        max,
        target: u32::try_from(target).unwrap_or(1).max(1),
        delay,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        let expected = Config { min: 0, max: 8, target: 16, delay: Duration::from_secs(600) };
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
