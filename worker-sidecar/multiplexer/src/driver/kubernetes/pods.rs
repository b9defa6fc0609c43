//! The state of a Deployment's Pods: one is ready, one will never be, or why none is ready yet.

use serde::Deserialize;
use url::Url;

use crate::driver::DriverError;

/// Reasons that waiting does not resolve, or only after a change of the Deployment.
///
/// First failures are omitted, because the kubelet tries again: `ImagePullBackOff` follows `ErrImagePull`, and
/// `CrashLoopBackOff` follows `RunContainerError`. So is `CreateContainerError`: on a busy node the runtime exceeds the
/// kubelet's deadline, and the container is created minutes later (containerd#4604).
const STUCK_REASONS: [&str; 5] =
    ["CrashLoopBackOff", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError"];

/// Reasons for waiting that are normal.
const USUAL: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// The relevant fields of a Pod.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    deletion_timestamp: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Deserialize)]
struct Container {
    #[serde(default)]
    ports: Vec<Port>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    container_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: String,
    reason: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    conditions: Vec<PodCondition>,
    init_container_statuses: Vec<ContainerStatus>,
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PodCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    name: String,
    state: ContainerState,
    last_state: ContainerState,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerState {
    waiting: Option<WaitingContainer>,
    terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct WaitingContainer {
    reason: String,
    message: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Terminated {
    exit_code: i32,
    reason: String,
    message: String,
}

/// The combined state of a Deployment's Pods.
#[derive(Debug)]
pub(super) enum PodsState<'a> {
    /// This Pod is ready, and is not being deleted.
    Ready(&'a Pod),
    /// None is ready, and waiting will not change that.
    StuckPod(StuckPod),
    /// None is ready yet, for this reason.
    Waiting(String),
}

/// A Pod that will not become ready.
#[derive(Debug)]
pub(super) struct StuckPod {
    /// Its name, and the kubelet's reason.
    pub(super) why: String,
    /// The exit code of its container, if it has run.
    pub(super) exit_code: Option<i32>,
}

/// Returns the combined state of the Pods.
pub(super) fn pods_state<'a>(pods: impl Iterator<Item = &'a Pod>) -> PodsState<'a> {
    let pods: Vec<_> = pods.filter(|pod| pod.is_there()).collect();
    let staying: Vec<_> = pods.iter().copied().filter(|pod| !pod.is_leaving()).collect();
    if let Some(ready) = staying.iter().find(|pod| pod.is_ready()) {
        return PodsState::Ready(ready);
    }
    if let Some(stuck) = staying.iter().find_map(|pod| pod.stuck()) {
        return PodsState::StuckPod(stuck);
    }
    PodsState::Waiting(match (staying.first(), pods.first()) {
        (Some(pod), _) => pod.waits_for(),
        (None, Some(leaving)) => format!("Pod {} is still terminating", leaving.metadata.name),
        (None, None) => "it has no Pod; run `kubectl describe` on it and its ReplicaSet for the reason".to_owned(),
    })
}

impl Pod {
    /// True if the Pod may hold a GPU. A Pod that remains after its node evicted it holds nothing any more. A Pod that
    /// is being deleted gets the same phase before its node is done with it, so it is present until it is gone.
    pub(super) fn is_there(&self) -> bool {
        self.is_leaving() || !matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    fn is_leaving(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    fn is_ready(&self) -> bool {
        self.condition("Ready").is_some_and(|ready| ready.status == "True") && !self.status.pod_ip.is_empty()
    }

    /// Returns the URL of its first container port.
    pub(super) fn address(&self) -> Result<Url, DriverError> {
        let port = self.spec.containers.iter().flat_map(|container| &container.ports).next();
        let port = port.ok_or_else(|| {
            DriverError::NotOurs(format!(
                "Pod {} has no containerPort: declare one in the Deployment's template, or set the model's `url` to a Service",
                self.metadata.name
            ))
        })?;
        let ip = &self.status.pod_ip;
        let host = if ip.contains(':') { format!("[{ip}]") } else { ip.clone() };
        let url = format!("http://{host}:{}", port.container_port);
        let unexpected = |error: url::ParseError| DriverError::Unexpected { url: url.clone(), why: error.to_string() };
        url.parse().map_err(unexpected)
    }

    fn condition(&self, kind: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.kind == kind)
    }

    fn containers(&self) -> impl Iterator<Item = &ContainerStatus> {
        self.status.init_container_statuses.iter().chain(&self.status.container_statuses)
    }

    fn stuck(&self) -> Option<StuckPod> {
        let waiting = |container: &&ContainerStatus| {
            container.state.waiting.as_ref().is_some_and(|waiting| STUCK_REASONS.contains(&&*waiting.reason))
        };
        let container = self.containers().find(waiting)?;
        let why = format!("Pod {}: {}", self.metadata.name, container.trouble()?);
        Some(StuckPod { why, exit_code: container.last_state.terminated.as_ref().map(|ended| ended.exit_code) })
    }

    fn waits_for(&self) -> String {
        let name = &self.metadata.name;
        if let Some(trouble) = self.containers().find_map(ContainerStatus::trouble) {
            return format!("Pod {name}: {trouble}");
        }
        let unscheduled = self.condition("PodScheduled").filter(|scheduled| scheduled.status == "False");
        match unscheduled {
            Some(PodCondition { reason, message, .. }) => format!("Pod {name}: {}", joined(&[reason, message])),
            None if self.status.reason.is_empty() => format!("Pod {name} is not ready"),
            None => format!("Pod {name}: {}", self.status.reason),
        }
    }
}

impl ContainerStatus {
    /// Returns the reason why it does not run, and how it ended before.
    fn trouble(&self) -> Option<String> {
        let now = match &self.state {
            ContainerState { waiting: Some(waiting), .. } if !USUAL.contains(&&*waiting.reason) => {
                joined(&[&waiting.reason, &waiting.message])
            }
            ContainerState { terminated: Some(ended), .. } if ended.exit_code != 0 => ended.words(),
            ContainerState { .. } => return None,
        };
        let before = self.last_state.terminated.as_ref().map(|ended| format!("; before, {}", ended.words()));
        Some(format!("container {}: {now}{}", self.name, before.unwrap_or_default()))
    }
}

impl Terminated {
    fn words(&self) -> String {
        let code = format!("terminated with exit code {}", self.exit_code);
        joined(&[&code, &self.reason, &self.message])
    }
}

fn joined(parts: &[&str]) -> String {
    parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: &Value) -> Pod {
        let spec = json!({"containers": [{"name": "log"}, {"name": "vllm", "ports": [{"containerPort": 8000}]}]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec, "status": status})).unwrap()
    }

    fn ready() -> Value {
        json!({"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]})
    }

    fn container(state: &Value, last: &Value) -> Value {
        let status = json!({"name": "vllm", "state": state, "lastState": last});
        json!({"phase": "Pending", "containerStatuses": [status]})
    }

    fn waiting(status: &Value) -> String {
        match pods_state([pod(status)].iter()) {
            PodsState::Waiting(why) => why,
            other @ (PodsState::Ready(_) | PodsState::StuckPod(_)) => panic!("{other:?}"),
        }
    }

    fn stuck(status: &Value) -> StuckPod {
        match pods_state([pod(status)].iter()) {
            PodsState::StuckPod(stuck) => stuck,
            other @ (PodsState::Ready(_) | PodsState::Waiting(_)) => panic!("{other:?}"),
        }
    }

    #[test]
    fn ready_pod_is_reached_at_first_container_port() {
        let pod = pod(&ready());
        let PodsState::Ready(found) = pods_state(std::iter::once(&pod)) else { panic!("it is ready") };
        assert_eq!(found.address().unwrap().as_str(), "http://10.0.0.7:8000/");
        let v6 = serde_json::from_value::<Pod>(json!({
            "metadata": {"name": "p"}, "spec": {"containers": [{"ports": [{"containerPort": 1}]}]},
            "status": {"podIP": "fd00::7"},
        }));
        assert_eq!(v6.unwrap().address().unwrap().as_str(), "http://[fd00::7]:1/");
    }

    #[test]
    fn pod_without_port_error_names_remedy() {
        let bare: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "status": ready()})).unwrap();
        let error = bare.address().unwrap_err().to_string();
        assert!(error.contains("Pod p") && error.contains("containerPort") && error.contains("`url`"), "{error}");
    }

    #[test]
    fn terminating_pod_is_waiting_and_ended_pod_absent() {
        let mut leaving = pod(&ready());
        leaving.metadata.deletion_timestamp = Some("2026-11-21T00:00:00Z".to_owned());
        assert!(leaving.is_there());
        let PodsState::Waiting(why) = pods_state([leaving].iter()) else { panic!("it leaves") };
        assert_eq!(why, "Pod p is still terminating");
        let mut ended = pod(&json!({"phase": "Failed", "reason": "Evicted"}));
        assert!(!ended.is_there());
        ended.metadata.deletion_timestamp = Some("2026-11-21T00:00:00Z".to_owned());
        assert!(ended.is_there(), "its node is not done with it");
    }

    #[test]
    fn crash_loop_fails_load_with_exit_code() {
        let state = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}});
        let last = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        let StuckPod { why, exit_code } = stuck(&container(&state, &last));
        assert_eq!(exit_code, Some(137));
        for part in ["exit code 137", "Pod p", "container vllm", "CrashLoopBackOff: back-off 10s", "OOMKilled"] {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn unavailable_image_fails_load_after_kubelet_backoff() {
        let state = |reason: &str| json!({"waiting": {"reason": reason, "message": "image \"x\""}});
        let first = waiting(&container(&state("ErrImagePull"), &json!({})));
        assert_eq!(first, "Pod p: container vllm: ErrImagePull: image \"x\"");
        for reason in ["ImagePullBackOff", "ErrImageNeverPull", "CreateContainerConfigError"] {
            let StuckPod { why, exit_code } = stuck(&container(&state(reason), &json!({})));
            assert!(exit_code.is_none() && why.contains(reason) && why.contains("image \"x\""), "{why}");
        }
    }

    #[test]
    fn first_failure_of_container_runtime_is_waited_for() {
        for reason in ["CreateContainerError", "RunContainerError"] {
            let state = json!({"waiting": {"reason": reason, "message": "context deadline exceeded"}});
            let why = waiting(&container(&state, &json!({})));
            assert_eq!(why, format!("Pod p: container vllm: {reason}: context deadline exceeded"));
        }
    }

    #[test]
    fn waiting_pod_reports_its_reason() {
        let message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.";
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message});
        let why = waiting(&json!({"phase": "Pending", "conditions": [condition]}));
        assert_eq!(why, format!("Pod p: Unschedulable: {message}"));
        let creating = json!({"waiting": {"reason": "ContainerCreating"}});
        assert_eq!(waiting(&container(&creating, &json!({}))), "Pod p is not ready");
        let ended = |code| container(&json!({"terminated": {"exitCode": code, "reason": "Error"}}), &json!({}));
        assert_eq!(waiting(&ended(1)), "Pod p: container vllm: terminated with exit code 1: Error");
        assert_eq!(waiting(&ended(0)), "Pod p is not ready");
        assert_eq!(waiting(&json!({"phase": "Pending", "reason": "NodeLost"})), "Pod p: NodeLost");
        let PodsState::Waiting(why) = pods_state([].iter()) else { panic!("there is none") };
        assert!(why.contains("no Pod"), "{why}");
    }
}
