//! A release that manages only some namespaces, with Roles in them and nearly no rights elsewhere.

use modelrelay_cluster::Cluster;
use modelrelay_cluster::audit::lacking;
use modelrelay_cluster::manifests::{provider, worker_pool};
use serde_json::{Value, json};

use super::certificates::{create_pod, has_worker, wait_for_injection};
use super::release::Release;
use super::shared::Away;

#[tokio::test]
async fn release_for_one_namespace_has_no_other_rights() {
    let cluster = Cluster::connect().await;
    let _away = Away::take(&cluster).await;
    let (watched, other) = (cluster.namespace("watched").await, cluster.namespace("other").await);
    let release = Release::prepare(&cluster, 3, "roles").await;
    release.install("dev", &format!("--set watchNamespaces={{{}}}", watched.name)).await;

    for namespace in [&other, &watched] {
        let pool = worker_pool("llama", &json!({"provider": "local"}));
        namespace.apply(&[provider("local", &json!({})), pool]).await;
    }
    let providers = watched.custom("modelrelay.io/v1alpha1", "Provider");
    watched.wait_for_condition(&providers, "local", "Ready", "True").await;
    wait_for_injection(&watched).await;
    // It was created first, and not reconciled.
    let ignored = other.custom("modelrelay.io/v1alpha1", "Provider").get("local").await.expect("it was applied");
    assert!(ignored.data.get("status").is_none_or(Value::is_null), "{:?}", ignored.data);
    let pod = create_pod(&other).await;
    assert!(!has_worker(&serde_json::from_str(&pod).expect("kubectl writes JSON")), "{pod}");

    let requests = cluster.requests_by(&release.namespace.name, &release.operator()).await;
    let configuration = format!("/mutatingwebhookconfigurations/{}.{}", release.operator(), release.namespace.name);
    // Its only other right is to list relays in its own binding, which lets them have workers' tokens reviewed.
    let reviewers = format!("/clusterrolebindings/{}.{}-token-reviews", release.operator(), release.namespace.name);
    let by_name = format!("fieldSelector=metadata.name%3D{}.{}", release.operator(), release.namespace.name);
    let strays = requests.iter().filter(|request| {
        let inside =
            [&watched, &release.namespace].iter().any(|it| request.uri.contains(&format!("/namespaces/{}/", it.name)))
                // Whether the cluster assigns user ids there.
                || request.uri == format!("/api/v1/namespaces/{}", watched.name);
        let own = [&configuration, &by_name, &reviewers].iter().any(|it| request.uri.contains(it.as_str()));
        !(inside || own)
    });
    let strays: Vec<_> = strays.collect();
    assert!(strays.is_empty(), "requests outside the operator's namespaces: {strays:#?}");
    let lacking = lacking(&requests);
    assert!(lacking.is_empty(), "the operator lacks rights: {lacking:#?}");
    assert!(
        requests.iter().any(|it| it.verb == "patch" && it.resource == "deployments"),
        "the operator made no relay: {requests:?}"
    );
    release.uninstall(&[]).await;
}
