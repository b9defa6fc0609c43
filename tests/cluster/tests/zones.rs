//! Relays in one cluster, and workers in that cluster, in another one and at home. The other cluster has an API server
//! and a node of its own, whose network is cut and restored while clients send requests.

use modelrelay_cluster::traffic::{Counts, Traffic};
use modelrelay_cluster::{Cluster, SecondNode, TEST_TIMEOUT, manifests, wait_until};
use serde_json::{Value, json};

use crate::scale::control_plane::ControlPlane;
use crate::traffic::outside::{Machine, worker_settings};
use crate::traffic::stack::{POOL, PROVIDER, Stack, provider};

const NEAR: &str = "west-1";
const FAR: &str = "east-1";
const HOME: &str = "attic";

/// The requests that each worker runs at once.
const SLOTS: usize = 8;
/// More than the workers at hand and at home run at once, and fewer than all three do.
const MANY: usize = 2 * SLOTS + 4;
/// Fewer than the near worker may run before others help (`spillRequests`).
const FEW: usize = 3;

#[tokio::test]
async fn cluster_cut_off_loses_only_its_begun_responses() {
    let stack = west().await;
    let plane = ControlPlane::start().await;
    let node = SecondNode::start(&plane.cluster, &format!("topology.kubernetes.io/zone={FAR}")).await;
    let east = plane.cluster.namespace("east").await;
    east.apply(&[far_workers(&stack).await]).await;
    let home = [("WORKER_NAME", "ada"), ("ZONE", HOME), ("CLUSTER", "home-ada"), ("MAX_CONCURRENCY", "8")];
    let _home = Machine::start(&stack, &home).await;
    stack.wait_for_workers(2, 3).await;

    let light = Traffic::to(stack.service).streams(FEW).words(20).start();
    light.wait_for_answers(5 * FEW).await;
    light.finish().await.expect_all_answered();
    let sent = Sent::read(&stack).await;
    assert!(sent.near > 0 && sent.far == 0 && sent.home == 0, "few requests should stay near: {sent:?}");

    let traffic = Traffic::to(stack.service).streams(MANY).start();
    traffic.wait_for_underway(MANY).await;
    traffic.wait_for_answers(2 * MANY).await;
    let spilled = Sent::read(&stack).await;
    assert!(spilled.far > 0 && spilled.home > 0, "many requests should reach every zone: {spilled:?}");
    traffic.counts().expect_all_answered();

    node.cut_off().await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(MANY).await;
    let lost = traffic.counts();
    expect_only_begun(&lost);
    traffic.wait_for_answers(2 * MANY).await;

    node.reconnect().await;
    stack.wait_for_workers(2, 3).await;
    let back = Sent::read(&stack).await;
    wait_until("requests to the cluster that came back", TEST_TIMEOUT, async || {
        Sent::read(&stack).await.far >= back.far + SLOTS
    })
    .await;
    traffic.wait_for_answers(MANY).await;
    let counts = traffic.finish().await;
    expect_only_begun(&counts);
    assert_eq!(counts.cut.len(), lost.cut.len(), "responses broke after the first {}: {counts}", lost.cut.len());
}

/// Checks that nothing failed but responses that had begun at the far worker.
fn expect_only_begun(counts: &Counts) {
    counts.expect_no_final_failure();
    assert!(counts.retryable.is_empty(), "requests were refused: {counts}");
    assert!((1..=SLOTS).contains(&counts.cut.len()), "not the requests of one worker: {counts}");
}

/// A Provider and its near worker in the cluster of all other tests.
async fn west() -> Stack {
    let namespace = Cluster::connect().await.namespace("zones").await;
    let here = json!([{"name": "CLUSTER", "value": "cluster-west"}, {"name": "ZONE", "value": NEAR}]);
    let mut env = here.as_array().expect("a list").clone();
    // A silent worker is lost after six seconds, not 45.
    env.push(json!({"name": "HEARTBEAT_INTERVAL", "value": "2"}));
    let mut provider = provider(&json!({"service": {"workers": true}, "podTemplate": {"env": env}}));
    provider["spec"]["placement"] = json!({"spillRequests": 4});
    let mut pool = manifests::demo_pool(PROVIDER);
    pool["maxConcurrency"] = json!(SLOTS);
    pool["sidecar"] = json!({"env": here});
    Stack::apply(namespace, &[provider, manifests::worker_pool(POOL, &pool)], 1).await
}

/// A Deployment of one backend and its worker, for the other cluster: its zone is the label of the node.
async fn far_workers(stack: &Stack) -> Value {
    let mut env = Vec::new();
    for (name, value) in worker_settings(stack).await {
        env.push(json!({"name": name, "value": value}));
    }
    for (name, value) in
        [("CLUSTER", "cluster-east"), ("BACKEND_URL", "http://127.0.0.1:8000"), ("MAX_CONCURRENCY", "8")]
    {
        env.push(json!({"name": name, "value": value}));
    }
    let zone = json!({"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}});
    env.push(json!({"name": "ZONE", "valueFrom": zone}));
    let worker = json!({
        "name": "worker", "image": manifests::WORKER_IMAGE, "imagePullPolicy": "Never", "env": env,
        "securityContext": manifests::container_security(),
    });
    let mut deployment = manifests::demo_backend("far", 1).swap_remove(0);
    let pod = &mut deployment["spec"]["template"]["spec"];
    pod["tolerations"] = json!([SecondNode::toleration()]);
    pod["containers"].as_array_mut().expect("a list").push(worker);
    deployment
}

/// The requests that the relays have sent to each zone so far.
#[derive(Debug)]
struct Sent {
    near: usize,
    far: usize,
    home: usize,
}

impl Sent {
    async fn read(stack: &Stack) -> Self {
        let mut sent = Self { near: 0, far: 0, home: 0 };
        for page in stack.metrics().await {
            let zone = |zone: &str| {
                let label = format!("zone=\"{zone}\"");
                let of = |line: &&str| line.starts_with("modelrelay_zone_requests_total{") && line.contains(&label);
                let values = page.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok());
                values.sum::<usize>()
            };
            sent = Self { near: sent.near + zone(NEAR), far: sent.far + zone(FAR), home: sent.home + zone(HOME) };
        }
        sent
    }
}
