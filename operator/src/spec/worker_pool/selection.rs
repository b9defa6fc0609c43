//! Assigns Pods to the pools that select them by their labels: pure.

use std::collections::BTreeMap;

use kube::core::{Selector, SelectorExt};

use crate::crd::WorkerPool;
use crate::crd::worker_pool::Mode;
use crate::resources::names;

/// Returns the pools that select a Pod with these labels, the oldest first: the Pod belongs to that one. Pools of the
/// same second are ordered by name.
pub fn selecting<'a>(pools: &'a [WorkerPool], labels: &BTreeMap<String, String>) -> Vec<&'a WorkerPool> {
    let mut selecting: Vec<&WorkerPool> = pools.iter().filter(|pool| selects(pool, labels)).collect();
    selecting.sort_by_key(|pool| names::age(*pool));
    selecting
}

/// True if the pool selects Pods with these labels. A selector that cannot be parsed selects none.
pub fn selects(pool: &WorkerPool, labels: &BTreeMap<String, String>) -> bool {
    let selector = pool.spec.selector.clone().and_then(|selector| Selector::try_from(selector).ok());
    pool.metadata.deletion_timestamp.is_none()
        && pool.spec.mode() == Mode::Inject
        && selector.is_some_and(|selector| !selector.selects_all() && selector.matches(labels))
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use serde_json::{Value, json};

    use super::*;
    use crate::manifests::testing;

    fn pool(name: &str, second: i64, selector: &Value) -> WorkerPool {
        let mut pool =
            serde_json::to_value(testing::pool(&json!({"provider": "local", "selector": selector}))).unwrap();
        pool["metadata"]["name"] = json!(name);
        pool["metadata"]["creationTimestamp"] = json!(format!("2026-01-01T00:00:{second:02}Z"));
        serde_json::from_value(pool).unwrap()
    }

    fn names(pools: &[WorkerPool], labels: &[(&str, &str)]) -> Vec<String> {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        selecting(pools, &labels).into_iter().map(ResourceExt::name_any).collect()
    }

    #[test]
    fn oldest_selecting_pool_comes_first() {
        let app = json!({"matchLabels": {"app": "vllm"}});
        let pools = [
            pool("c", 2, &app),
            pool("b", 1, &app),
            pool("a", 2, &app),
            pool("d", 0, &json!({"matchLabels": {"app": "x"}})),
        ];
        assert_eq!(names(&pools, &[("app", "vllm"), ("team", "a")]), ["b", "a", "c"]);
        assert_eq!(names(&pools, &[("app", "y")]), [""; 0]);
    }

    #[test]
    fn expressions_are_combined_with_labels() {
        let expressions = json!([
            {"key": "tier", "operator": "In", "values": ["gpu", "tpu"]}, {"key": "canary", "operator": "DoesNotExist"},
        ]);
        let pools = [pool("a", 0, &json!({"matchLabels": {"app": "vllm"}, "matchExpressions": expressions}))];
        assert_eq!(names(&pools, &[("app", "vllm"), ("tier", "gpu")]), ["a"]);
        assert_eq!(names(&pools, &[("app", "vllm"), ("tier", "cpu")]), [""; 0]);
        assert_eq!(names(&pools, &[("app", "vllm"), ("tier", "gpu"), ("canary", "")]), [""; 0]);
    }

    #[test]
    fn empty_or_invalid_selector_selects_nothing() {
        let odd = json!({"matchExpressions": [{"key": "app", "operator": "Like"}]});
        let pools = [pool("a", 0, &json!({})), pool("b", 0, &odd)];
        assert_eq!(names(&pools, &[("app", "vllm")]), [""; 0]);
    }

    #[test]
    fn pool_being_deleted_selects_nothing() {
        let mut gone = pool("a", 0, &json!({"matchLabels": {"app": "vllm"}}));
        gone.metadata.deletion_timestamp = gone.metadata.creation_timestamp.clone();
        assert_eq!(names(&[gone], &[("app", "vllm")]), [""; 0]);
    }
}
