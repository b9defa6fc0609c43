//! Scaling of a pool by the operator.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::crd::common::DurationText;

/// Scaling by the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.minReplicas <= self.maxReplicas")
    .message("minReplicas is greater than maxReplicas").field_path(".minReplicas"))]
pub struct Scaling {
    /// Minimum number of Pods. With 0, an idle pool is scaled to zero, and a request scales it up again.
    #[serde(default)]
    #[schemars(range(min = 0, max = 10_000))]
    pub min_replicas: i32,
    /// Workload of another owner in the same namespace that runs the pool's Pods and that the operator scales. Excludes
    /// template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    /// Maximum number of Pods.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_replicas: i32,
    /// Target number of queued and running requests per Pod. Default: maxConcurrency, or with multiplexer.slots the sum
    /// over slots of the largest maxConcurrency of a slot's models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub target_requests_per_replica: Option<i32>,
    /// Time for which fewer Pods must suffice before the pool is scaled down.
    #[serde(default = "ten_minutes")]
    pub scale_down_delay: DurationText,
}

/// A Deployment or StatefulSet of another owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetRef {
    /// API version of the workload.
    #[serde(default)]
    pub api_version: TargetApiVersion,
    /// Kind of the workload.
    pub kind: TargetKind,
    /// Name of the workload.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
}

/// The API version of a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetApiVersion {
    /// Version 1 of group apps.
    #[default]
    #[serde(rename = "apps/v1")]
    AppsV1,
}

/// The kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TargetKind {
    /// Pods that are replaceable.
    Deployment,
    /// Pods with an identity.
    StatefulSet,
}

impl TargetRef {
    /// Returns kind and name.
    pub fn display(&self) -> String {
        match self.kind {
            TargetKind::Deployment => format!("Deployment {}", self.name),
            TargetKind::StatefulSet => format!("StatefulSet {}", self.name),
        }
    }
}

fn ten_minutes() -> DurationText {
    DurationText::of("10m")
}
