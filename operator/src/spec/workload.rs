//! The kind of workload that runs a pool's Pods.

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use kube::core::ApiResource;

use crate::crd::WorkerPool;
use crate::crd::worker_pool::{Mode, TemplateKind};
use crate::resources::names::{self, Component};

/// The kind of workload that runs a pool's Pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The Deployment of a template.
    Backend,
    /// The DaemonSet of a template.
    BackendOnNodes,
    /// The Deployment of standalone workers.
    Workers,
}

impl Workload {
    /// Returns the workload of a pool, or `None` for one that injects.
    pub fn of(pool: &WorkerPool) -> Option<Self> {
        match (pool.spec.mode(), &pool.spec.template) {
            (Mode::Template, Some(template)) => Some(match template.kind {
                TemplateKind::Deployment => Self::Backend,
                TemplateKind::DaemonSet => Self::BackendOnNodes,
            }),
            (Mode::Standalone, _) => Some(Self::Workers),
            (Mode::Inject | Mode::Template, _) => None,
        }
    }

    /// Returns its kind in the API.
    pub fn resource(self) -> ApiResource {
        match self {
            Self::Backend | Self::Workers => ApiResource::erase::<Deployment>(&()),
            Self::BackendOnNodes => ApiResource::erase::<DaemonSet>(&()),
        }
    }

    /// Returns its name.
    pub fn name(self, pool: &str) -> String {
        match self {
            Self::Backend | Self::BackendOnNodes => names::backend(pool),
            Self::Workers => names::worker(pool),
        }
    }

    /// True if it has a number of replicas.
    pub fn is_scaled(self) -> bool {
        match self {
            Self::Backend | Self::Workers => true,
            Self::BackendOnNodes => false,
        }
    }

    /// Returns the component in the labels of its Pods.
    pub fn component(self) -> Component {
        match self {
            Self::Backend | Self::BackendOnNodes => Component::Backend,
            Self::Workers => Component::Worker,
        }
    }
}
