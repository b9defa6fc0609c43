//! Determines in which namespaces the cluster assigns user and group ids to Pods.
//!
//! OpenShift gives each namespace a range of ids, in an annotation, and rejects Pods that request others. There, Pods
//! must request none. The annotation does not change after the namespace's first moments, so it is rarely read.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;

/// The annotation with the range of ids.
const UID_RANGE: &str = "openshift.io/sa.scc.uid-range";
/// The timeout for reading it. A Pod that is being created waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The time for which a result is used.
const LASTS: Duration = Duration::from_secs(3600);
/// The same for a namespace that may not have its annotation yet, or could not be read.
const LASTS_BRIEFLY: Duration = Duration::from_secs(10);
/// The age at which a namespace certainly has its annotation.
const SETTLED: SignedDuration = SignedDuration::from_mins(1);

/// The namespaces that were read.
pub struct Namespaces {
    client: Client,
    // Locked for a lookup or an insertion, never across an await.
    known: Mutex<HashMap<String, IdAssignment>>,
}

#[derive(Clone, Copy)]
struct IdAssignment {
    assigns_ids: bool,
    until: Instant,
}

impl Namespaces {
    /// Reads namespaces with this client.
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default() }
    }

    /// True if the cluster assigns the ids of Pods in this namespace. Reads the namespace if the last result is too
    /// old.
    pub async fn assigns_ids(&self, namespace: &str) -> bool {
        let before = self.known(namespace);
        if let Some(known) = before.filter(|known| Instant::now() < known.until) {
            return known.assigns_ids;
        }
        let api: Api<Namespace> = Api::all(self.client.clone());
        let read = tokio::time::timeout(TIMEOUT, api.get_metadata_opt(namespace)).await;
        let (assigns_ids, lasts) = match read {
            Ok(Ok(found)) => judge(found.as_ref(), Timestamp::now()),
            // An operator of an earlier release's chart has no right to read it.
            Ok(Err(error)) => {
                tracing::debug!(namespace, %error, "failed to read a namespace's annotations");
                (before.is_some_and(|known| known.assigns_ids), LASTS_BRIEFLY)
            }
            Err(_) => (before.is_some_and(|known| known.assigns_ids), LASTS_BRIEFLY),
        };
        let known = IdAssignment { assigns_ids, until: Instant::now() + lasts };
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(namespace.to_owned(), known);
        assigns_ids
    }

    /// Returns the last result of [`Self::assigns_ids`], whatever its age.
    pub fn assigned_ids(&self, namespace: &str) -> bool {
        self.known(namespace).is_some_and(|known| known.assigns_ids)
    }

    fn known(&self, namespace: &str) -> Option<IdAssignment> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(namespace).copied()
    }
}

/// Returns the result, and the time for which it is used.
fn judge(namespace: Option<&PartialObjectMeta<Namespace>>, now: Timestamp) -> (bool, Duration) {
    let Some(namespace) = namespace else { return (false, LASTS_BRIEFLY) };
    if namespace.annotations().contains_key(UID_RANGE) {
        return (true, LASTS);
    }
    let is_settled = namespace.creation_timestamp().is_none_or(|created| now.duration_since(created.0) >= SETTLED);
    (false, if is_settled { LASTS } else { LASTS_BRIEFLY })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};

    use super::*;
    use crate::cluster::testing;

    fn judged(annotations: &Value, age_secs: i64) -> (bool, Duration) {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let created = Timestamp::from_second(1_800_000_000 - age_secs).unwrap().to_string();
        let metadata = json!({"name": "llm", "annotations": annotations, "creationTimestamp": created});
        judge(Some(&serde_json::from_value(json!({"metadata": metadata})).unwrap()), now)
    }

    #[test]
    fn range_of_ids_means_that_ids_are_assigned() {
        assert_eq!(judged(&json!({UID_RANGE: "1000650000/10000"}), 0), (true, LASTS));
        assert_eq!(judged(&json!({"other": ""}), 3600), (false, LASTS));
    }

    #[test]
    fn new_namespace_without_range_is_read_again_soon() {
        assert_eq!(judged(&json!({}), 5), (false, LASTS_BRIEFLY));
        assert_eq!(judge(None, Timestamp::now()), (false, LASTS_BRIEFLY));
    }

    #[tokio::test(start_paused = true)]
    async fn namespace_is_read_once_an_hour() {
        let reads = Arc::new(AtomicUsize::new(0));
        let counter = reads.clone();
        let client = testing::client("llm", move |_, _, _| {
            counter.fetch_add(1, Ordering::SeqCst);
            let metadata = json!({"name": "llm", "annotations": {UID_RANGE: "1/2"}});
            (200, json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata}))
        });
        let namespaces = Namespaces::new(client);
        let count = || reads.load(Ordering::SeqCst);
        assert!(!namespaces.assigned_ids("llm"));
        for _ in 0..3 {
            assert!(namespaces.assigns_ids("llm").await && namespaces.assigned_ids("llm"));
        }
        assert_eq!(count(), 1);
        tokio::time::advance(LASTS).await;
        assert!(namespaces.assigns_ids("llm").await);
        assert_eq!(count(), 2);
    }
}
