//! The operator's Pods and their metrics.

use hyper::Request;
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::{Api, ResourceExt, api::ListParams};
use modelrelay_cluster::{Cluster, RELEASE, SYSTEM_NAMESPACE, TEST_TIMEOUT, namespace::is_ready, wait_until};

/// The Deployment, ServiceAccount, Lease and Service of the release.
pub(crate) const OPERATOR: &str = "modelrelay-operator";

/// The number of replicas in the chart's defaults.
pub(crate) const REPLICAS: usize = 2;

/// The operator of the release that all tests share.
pub(crate) struct Operator {
    pub(crate) cluster: Cluster,
    pub(crate) pods: Api<Pod>,
}

impl Operator {
    /// Waits until all replicas are ready and one leads, whatever the previous test did.
    pub(crate) async fn settled(cluster: &Cluster) -> Self {
        let pods = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
        let operator = Self { cluster: cluster.clone(), pods };
        wait_until("two ready replicas, one of which leads", TEST_TIMEOUT, async || {
            operator.ready_pods().await.len() == REPLICAS && operator.leaders().await.len() == 1
        })
        .await;
        operator
    }

    /// Returns every Pod that is not being deleted.
    pub(crate) async fn pods(&self) -> Vec<Pod> {
        let labels = format!("app.kubernetes.io/component=operator,app.kubernetes.io/instance={RELEASE}");
        let pods = self.pods.list(&ListParams::default().labels(&labels)).await;
        let pods = pods.map(|list| list.items).unwrap_or_default();
        pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
    }

    /// Returns the names of ready Pods.
    pub(crate) async fn ready_pods(&self) -> Vec<String> {
        self.pods().await.iter().filter(|pod| is_ready(pod)).map(ResourceExt::name_any).collect()
    }

    /// Returns the names of Pods that report to lead.
    pub(crate) async fn leaders(&self) -> Vec<String> {
        let mut leaders = Vec::new();
        for pod in self.pods().await {
            let page = self.metrics(&pod.name_any()).await.unwrap_or_default();
            if sum(&page, "modelrelay_operator_leader", "") > 0.0 {
                leaders.push(pod.name_any());
            }
        }
        leaders
    }

    /// Returns the metrics page of one Pod, read through the API server, or `None` without a response.
    pub(crate) async fn metrics(&self, pod: &str) -> Option<String> {
        let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{pod}:8080/proxy/metrics");
        let request = Request::get(path).body(Vec::new()).expect("the path is valid");
        self.cluster.client.request_text(request).await.ok()
    }

    /// Returns the number of reconciliations so far, of both controllers in all current replicas.
    pub(crate) async fn reconciliations(&self) -> f64 {
        let mut total = 0.0;
        for pod in self.ready_pods().await {
            let page = self.metrics(&pod).await.expect("a ready replica shows its metrics");
            total += sum(&page, "modelrelay_operator_reconciliations_total", "");
        }
        total
    }

    /// Returns the names of the Pods that the API server may call as the webhook.
    pub(crate) async fn webhook_endpoints(&self) -> Vec<String> {
        let slices = Api::<EndpointSlice>::namespaced(self.cluster.client.clone(), SYSTEM_NAMESPACE);
        let labels = format!("kubernetes.io/service-name={OPERATOR}");
        let slices = slices.list(&ListParams::default().labels(&labels)).await.expect("slices can be listed");
        let endpoints = slices.items.into_iter().flat_map(|slice| slice.endpoints);
        let ready = endpoints.filter(|it| it.conditions.as_ref().is_some_and(|it| it.ready == Some(true)));
        let mut names: Vec<String> = ready.filter_map(|endpoint| endpoint.target_ref?.name).collect();
        names.sort();
        names
    }
}

/// Returns the sum of a metric's samples whose labels contain `labels`.
pub(crate) fn sum(page: &str, metric: &str, labels: &str) -> f64 {
    let samples = page.lines().filter_map(|line| line.strip_prefix(metric)).filter(|rest| rest.starts_with(['{', ' ']));
    let values = samples.filter(|rest| rest.contains(labels)).filter_map(|rest| rest.rsplit(' ').next());
    values.filter_map(|value| value.parse::<f64>().ok()).sum()
}
