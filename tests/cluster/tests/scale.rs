//! The operator with many Providers and pools: how long it takes until everything is reconciled, and the requests and
//! the memory that it takes from then on. On a control plane of its own, without a node, so no container starts.

mod control_plane;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};
use modelrelay_cluster::audit::AuditedRequest;
use modelrelay_cluster::manifests::{demo_pool, provider, worker_pool};
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, poll_for, wait_until};
use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::operator::replicas::OPERATOR;
use control_plane::{ControlPlane, OperatorProcess, Usage};

const NAMESPACES: usize = 5;
const PROVIDERS_EACH: usize = 10;
const POOLS_EACH: usize = 4;

/// Everything is reconciled within this time, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// The time over which requests are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// The number of windows within which the requests fall to their limit.
const MINUTES: usize = 3;
/// Nothing was sent for this long: numbers are written every ten seconds at most.
const QUIET: Duration = Duration::from_secs(12);

/// The most requests for the Lease in a minute: a renewal every five seconds.
const LEASE_REQUESTS: usize = 13;
/// The most requests for everything else in a minute, besides watches: each of the 15 pools without Pods whose relays
/// use TLS reads the certificate's Secret, and a few in reserve.
const OTHER_REQUESTS: usize = 20;
/// The most resident memory in KiB: half of the chart's limit.
const MEMORY: u64 = 128 << 10;

#[tokio::test]
async fn fifty_providers_with_pools_cost_few_requests() {
    let plane = ControlPlane::start().await;
    let mut namespaces = Vec::new();
    for _ in 0..NAMESPACES {
        let namespace = plane.cluster.namespace_with("fleet", "privileged").await;
        namespace.apply(&fleet(&namespace.name)).await;
        namespaces.push(namespace);
    }
    let began = Instant::now();
    let operator = plane.operator().await;
    let settled = poll_for(DEADLINE, async || {
        let open = unsettled(&namespaces).await;
        open.is_empty().then_some(began.elapsed())
    });
    let Some(settled) = settled.await else { panic!("never settled: {:?}", unsettled(&namespaces).await) };
    quiet(&plane.cluster).await;
    let quiet = began.elapsed();
    let to_settle = requests(&plane.cluster).await.len();
    eprintln!(
        "{} Providers with {POOLS_EACH} pools each: settled after {settled:.1?}, idle after {quiet:.1?}, with {to_settle} requests",
        NAMESPACES * PROVIDERS_EACH,
    );

    let mut minute = Minute::observe(&plane.cluster, &operator).await;
    // Namespaces younger than a minute are read again, and Deployments are listed once more after their last change.
    for _ in 1..MINUTES {
        if minute.others() <= OTHER_REQUESTS {
            break;
        }
        minute = Minute::observe(&plane.cluster, &operator).await;
    }
    let Minute { counts, usage, processor } = &minute;
    eprintln!(
        "resident {} KiB, at most {} KiB; {processor} ms of processor time in {WINDOW:?}",
        usage.resident, usage.peak
    );
    eprintln!("requests in {WINDOW:?}: {counts:?}");
    assert!(minute.others() <= OTHER_REQUESTS, "{} requests while idle: {counts:?}", minute.others());
    let lease: usize = counts.iter().filter(|(name, _)| name.ends_with(" leases")).map(|(_, count)| count).sum();
    assert!(lease <= LEASE_REQUESTS, "{lease} requests for the Lease");
    assert!(usage.peak <= MEMORY, "{} KiB of memory", usage.peak);
    changed_secret_is_read(&namespaces[0]).await;
}

/// Changes the user's Secret, and waits until workers get the new value.
async fn changed_secret_is_read(namespace: &Namespace) {
    const VALUE: &str = "another-secret-of-the-user-9876543210";
    namespace.apply(&[own_secret(VALUE)]).await;
    let secrets = namespace.api::<Secret>();
    let is_new = |secret: &Secret| {
        secret.data.iter().flatten().any(|(key, value)| key == "worker-secret" && value.0 == VALUE.as_bytes())
    };
    namespace.wait_for(&secrets, "provider-0-worker", "the user's new value", is_new).await;
}

fn own_secret(value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}, "stringData": {"worker-secret": value}})
}

/// What the operator did within [`WINDOW`].
struct Minute {
    /// The number of requests by verb and resource.
    counts: BTreeMap<String, usize>,
    /// The resources at its end.
    usage: Usage,
    /// The processor time in milliseconds.
    processor: u64,
}

impl Minute {
    async fn observe(cluster: &Cluster, operator: &OperatorProcess) -> Self {
        let (before, sent) = (operator.usage(), requests(cluster).await.len());
        #[expect(clippy::disallowed_methods, reason = "the test counts the requests made during this time")]
        tokio::time::sleep(WINDOW).await;
        let counts = count(&requests(cluster).await.split_off(sent));
        let usage = operator.usage();
        Self { counts, usage, processor: usage.processor - before.processor }
    }

    /// Returns the number of requests besides those for the Lease and watches.
    fn others(&self) -> usize {
        let others = self.counts.iter().filter(|(name, _)| !name.ends_with(" leases") && !name.starts_with("watch "));
        others.map(|(_, count)| count).sum()
    }
}

/// Returns the objects of one namespace. Six of ten Providers have Secrets of their user.
fn fleet(namespace: &str) -> Vec<Value> {
    let (certificate, key) = certificate(namespace);
    let mut objects = vec![
        own_secret("a-secret-of-the-user-0123456789"),
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "relay-tls"}, "type": "kubernetes.io/tls",
            "stringData": {"tls.crt": certificate, "tls.key": key},
        }),
    ];
    for number in 0..PROVIDERS_EACH {
        let name = format!("provider-{number}");
        let spec = match number % 4 {
            0 => json!({"workerSecretRef": {"name": "own", "key": "worker-secret"}}),
            1 => json!({"relay": {"tls": {"secretName": "relay-tls"}}}),
            _ => json!({}),
        };
        objects.push(provider(&name, &spec));
        for pool in 0..POOLS_EACH {
            // One of them is for Pods of other Deployments, of which there are none.
            let spec = if pool == 0 { json!({"provider": name}) } else { demo_pool(&name) };
            objects.push(worker_pool(&format!("pool-{number}-{pool}"), &spec));
        }
    }
    objects
}

/// Returns a certificate for every relay of a namespace, and its key, in PEM.
fn certificate(namespace: &str) -> (String, String) {
    let key = KeyPair::generate().expect("a key can be made");
    let names = vec![format!("*.{namespace}.svc")];
    let certificate = CertificateParams::new(names).expect("the name is valid").self_signed(&key);
    (certificate.expect("it can be signed").pem(), key.serialize_pem())
}

/// Returns the Providers and pools that the operator has not judged in their current generation.
async fn unsettled(namespaces: &[Namespace]) -> Vec<String> {
    let mut open = Vec::new();
    for namespace in namespaces {
        for kind in ["Provider", "WorkerPool"] {
            let api = namespace.custom("modelrelay.io/v1alpha1", kind);
            let list = api.list(&ListParams::default()).await.expect("both kinds can be listed");
            let is_open = |object: &&DynamicObject| {
                let status = &object.data["status"];
                let ready = status["conditions"].as_array().into_iter().flatten().any(|one| one["type"] == "Ready");
                !ready || status["observedGeneration"].as_i64() != object.metadata.generation
            };
            open.extend(list.items.iter().filter(is_open).map(|object| format!("{kind} {}", object.name_any())));
        }
    }
    open
}

/// Waits until the operator has sent nothing but watches and renewals of its Lease for a while.
async fn quiet(cluster: &Cluster) {
    let mut before = (0, Instant::now());
    wait_until("the operator to become idle", DEADLINE, async || {
        let sent = requests(cluster).await;
        let now = sent.iter().filter(|request| request.resource != "leases" && request.verb != "watch").count();
        if now != before.0 {
            before = (now, Instant::now());
        }
        before.1.elapsed() > QUIET
    })
    .await;
}

async fn requests(cluster: &Cluster) -> Vec<AuditedRequest> {
    cluster.requests_by(SYSTEM_NAMESPACE, OPERATOR).await
}

/// Returns the number of requests by verb and resource.
fn count(requests: &[AuditedRequest]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for request in requests {
        *counts.entry(format!("{} {}", request.verb, request.resource)).or_default() += 1;
    }
    counts
}
