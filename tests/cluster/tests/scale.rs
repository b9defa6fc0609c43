//! The operator with many Providers and pools: how long it takes until everything is reconciled, and the requests and
//! the memory that it takes from then on. On a control plane of its own, without a node, so no container starts.

pub(crate) mod control_plane;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};
use modelrelay_cluster::audit::AuditedRequest;
use modelrelay_cluster::manifests::{demo_pool, provider, worker_pool};
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, poll_for, wait_until};
use modelrelay_harness::process::Process;
use modelrelay_harness::usage::Usage;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::operator::replicas::OPERATOR;
use control_plane::ControlPlane;

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
/// The most resident memory: half of the chart's limit.
const MEMORY: u64 = 128 << 20;

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
        if others(&minute.sent) <= OTHER_REQUESTS {
            break;
        }
        minute = Minute::observe(&plane.cluster, &operator).await;
    }
    let Minute { sent, usage, cpu } = &minute;
    let (resident, peak) = (usage.resident_bytes >> 10, usage.peak_bytes >> 10);
    eprintln!("resident {resident} KiB, at most {peak} KiB; {cpu:?} of processor time in {WINDOW:?}");
    let counts = counts(sent);
    eprintln!("requests in {WINDOW:?}: {counts:?}");
    let others = others(sent);
    assert!(others <= OTHER_REQUESTS, "{others} requests while idle: {counts:?}");
    let lease = sent.iter().filter(|request| is_for_lease(request)).count();
    assert!(lease <= LEASE_REQUESTS, "{lease} requests for the Lease");
    assert!(usage.peak_bytes <= MEMORY, "{peak} KiB of memory");
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
    /// The requests that it sent.
    sent: Vec<AuditedRequest>,
    /// The usage at its end.
    usage: Usage,
    /// The processor time.
    cpu: Duration,
}

impl Minute {
    async fn observe(cluster: &Cluster, operator: &Process) -> Self {
        let (before, sent) = (usage(operator), requests(cluster).await.len());
        #[expect(clippy::disallowed_methods, reason = "the test counts the requests made during this time")]
        tokio::time::sleep(WINDOW).await;
        let sent = requests(cluster).await.split_off(sent);
        let usage = usage(operator);
        Self { sent, usage, cpu: usage.cpu - before.cpu }
    }
}

fn usage(operator: &Process) -> Usage {
    Usage::of(operator.pid().expect("the operator runs"))
}

fn is_for_lease(request: &AuditedRequest) -> bool {
    request.resource == "leases"
}

/// Returns the number of requests besides those for the Lease and watches.
fn others(requests: &[AuditedRequest]) -> usize {
    requests.iter().filter(|request| !is_for_lease(request) && request.verb != "watch").count()
}

/// Returns the objects of one namespace. Six of ten Providers have Secrets of their user.
fn fleet(namespace: &str) -> Vec<Value> {
    // For every relay of the namespace.
    let made = rcgen::generate_simple_self_signed([format!("*.{namespace}.svc")]).expect("a certificate");
    let mut objects = vec![
        own_secret("a-secret-of-the-user-0123456789"),
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "relay-tls"}, "type": "kubernetes.io/tls",
            "stringData": {"tls.crt": made.cert.pem(), "tls.key": made.signing_key.serialize_pem()},
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
        let now = others(&requests(cluster).await);
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
fn counts(requests: &[AuditedRequest]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for request in requests {
        *counts.entry(format!("{} {}", request.verb, request.resource)).or_default() += 1;
    }
    counts
}
