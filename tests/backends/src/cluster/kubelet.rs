//! The controllers' and the kubelet's actions for one Deployment.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::time::interval;

use super::{Deployment, NAMESPACE, Shared};
use crate::server::is_listening;

/// The delay before an exited container is restarted; the real kubelet's second restart is after ten seconds.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// The delay of a controller or a kubelet, which the test configures.
#[expect(clippy::disallowed_methods, reason = "the pace of the cluster that is played")]
async fn sleep(duration: Duration) {
    tokio::time::sleep(duration).await;
}

/// Keeps the Deployment's Pods at the desired number indefinitely.
pub(super) async fn drive(shared: Arc<Shared>, name: String) {
    loop {
        scaled(&shared, &name, |replicas| replicas > 0).await;
        shared.state().busy.insert(name.clone());
        let deployment = shared.state().deployments[&name].0.clone();
        // The controller has decided to create a Pod, and creates it regardless of later changes.
        sleep(deployment.created_after).await;
        let mut pod = new_pod(&shared, &name, &deployment);
        shared.put_pod(pod.clone());
        let mut container = None;
        tokio::select! {
            () = scaled(&shared, &name, |replicas| replicas == 0) => {}
            () = run(&shared, &deployment, &mut container, &mut pod) => {}
        }
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        shared.put_pod(pod.clone());
        sleep(deployment.lingers / 2).await;
        if let Some(mut container) = container {
            container.kill().await.expect("a process can be killed");
        }
        // Its containers have ended, and the kubelet reports so before it has released their resources.
        pod["status"]["phase"] = json!("Failed");
        shared.put_pod(pod.clone());
        sleep(deployment.lingers / 2).await;
        shared.remove_pod(pod["metadata"]["name"].as_str().unwrap_or_default());
        shared.state().busy.remove(&name);
    }
}

/// Starts the container, restarts it whenever it has ended, and reports when it is ready.
async fn run(shared: &Shared, deployment: &Deployment, container: &mut Option<Child>, pod: &mut Value) {
    if deployment.trouble.is_some() {
        std::future::pending::<()>().await;
    }
    let mut last = json!({});
    loop {
        let mut command = Command::new(&deployment.command[0]);
        let child =
            container.insert(command.args(&deployment.command[1..]).kill_on_drop(true).spawn().expect("it starts"));
        let ended = tokio::select! {
            ended = child.wait() => ended,
            () = becomes_ready(shared, deployment, pod, &last) => unreachable!("the poll never ends"),
        };
        let code = ended.ok().and_then(|ended| ended.code()).unwrap_or(137);
        last = json!({"terminated": {"exitCode": code, "reason": "Error"}});
        let waiting = json!({"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"});
        pod["status"] = status("Running", false, &json!({"waiting": waiting}), &last);
        shared.put_pod(pod.clone());
        sleep(RESTART_AFTER).await;
    }
}

/// The readiness probe: true once it listens, whether or not its model is loaded.
async fn becomes_ready(shared: &Shared, deployment: &Deployment, pod: &mut Value, last: &Value) {
    let mut looks = interval(Duration::from_millis(20));
    loop {
        looks.tick().await;
        if is_listening(deployment.port).await {
            pod["status"] = status("Running", true, &json!({"running": {}}), last);
            shared.put_pod(pod.clone());
            std::future::pending::<()>().await;
        }
    }
}

fn status(phase: &str, is_ready: bool, state: &Value, last: &Value) -> Value {
    let ready = if is_ready { "True" } else { "False" };
    json!({
        "phase": phase, "podIP": "127.0.0.1",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}],
        "containerStatuses": [{"name": "engine", "state": state, "lastState": last}],
    })
}

async fn scaled(shared: &Shared, name: &str, is_so: impl Fn(u32) -> bool) {
    let mut changes = shared.version.subscribe();
    while !is_so(shared.state().deployments[name].1) {
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn new_pod(shared: &Shared, name: &str, deployment: &Deployment) -> Value {
    let number = shared.change(|state| {
        state.next_pod += 1;
        state.next_pod
    });
    let container = json!({"name": "engine", "ports": [{"containerPort": deployment.port}]});
    json!({
        "metadata": {"name": format!("{name}-{number}"), "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {"containers": [container]},
        "status": deployment.trouble.clone().unwrap_or_else(|| json!({"phase": "Pending"})),
    })
}
