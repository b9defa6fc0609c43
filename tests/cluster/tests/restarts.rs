//! The cluster's own processes end and restart while relays and workers keep serving.

use std::time::Duration;

use modelrelay_cluster::{Cluster, manifests, traffic::Traffic};

#[tokio::test]
async fn requests_continue_while_api_server_is_away() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("restarts").await;
    namespace.apply(&manifests::demo_backend("vllm", 2)).await;
    namespace.rolled_out("deployment/vllm").await;
    let traffic = Traffic::to(namespace.service_address("vllm").await).streams(10).start();
    traffic.wait_for_underway(10).await;
    cluster.restart("apiserver", Duration::from_secs(2)).await;
    traffic.wait_for_answers(10).await;
    traffic.finish().await.expect_all_answered();
    namespace.kubectl("rollout restart deployment/vllm").await;
    namespace.rolled_out("deployment/vllm").await;
}
