//! The worker's ServiceAccount may scale the Deployments of its models and read Pods, and nothing else.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::Resource;
use modelrelay_cluster::manifests;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::setup::{POOL, Setup, model, standalone};

const WORKER: &str = "swap-worker";

impl Setup {
    async fn may(&self, what: &str) -> bool {
        let who = format!("system:serviceaccount:{}:{WORKER}", self.namespace.name);
        let output = self.namespace.kubectl(&format!("auth can-i --as {who} {what}")).output().await;
        match output.stdout.trim() {
            "yes" => true,
            "no" => false,
            _ => panic!("{what}: {}", output.output_text()),
        }
    }

    async fn has<K>(&self, name: &str) -> bool
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
        K::DynamicType: Default,
    {
        self.namespace.api::<K>().get_opt(name).await.expect("the lookup succeeds").is_some()
    }
}

#[tokio::test]
async fn worker_may_only_scale_models_and_see_pods() {
    let objects = [model("alpha"), model("beta"), model("other")].concat();
    let setup = Setup::start("mux-rights", &standalone(&["alpha", "beta"]), &objects).await;
    let scale = |verb: &str, deployment: &str| format!("{verb} deployments.apps/{deployment} --subresource scale");
    for allowed in [scale("get", "alpha"), scale("patch", "beta"), "list pods".into(), "watch pods".into()] {
        assert!(setup.may(&allowed).await, "{allowed}");
    }
    let elsewhere = ["get", "list", "delete", "create", "patch", "deletecollection"];
    for verb in elsewhere {
        for resource in ["secrets", "configmaps", "deployments.apps", "replicasets.apps", "pods --subresource exec"] {
            assert!(!setup.may(&format!("{verb} {resource}")).await, "{verb} {resource}");
        }
    }
    for refused in [
        scale("get", "other"),
        scale("patch", "other"),
        scale("update", "alpha"),
        "delete pods".into(),
        "create pods".into(),
        "list pods --namespace kube-system".into(),
    ] {
        assert!(!setup.may(&refused).await, "{refused}");
    }
}

#[tokio::test]
async fn only_pool_scaling_deployments_has_account_with_rights() {
    let setup = Setup::start("mux-accounts", &standalone(&["alpha"]), &model("alpha")).await;
    assert!(setup.has::<ServiceAccount>(WORKER).await && setup.has::<Role>(WORKER).await);
    assert!(setup.has::<RoleBinding>(WORKER).await);
    let plain = json!({"provider": "local", "standalone": {"replicas": 1}, "backend": {"url": "http://alpha"}});
    setup.namespace.apply(&[manifests::worker_pool("plain", &plain)]).await;
    let workers = setup.namespace.api::<Deployment>();
    setup.namespace.wait_for(&workers, "plain-worker", "the operator has created it", |_| true).await;
    assert!(!setup.has::<ServiceAccount>("plain-worker").await && !setup.has::<Role>("plain-worker").await);
    // Without the driver they are removed.
    let slot = json!({"id": "gpu0", "driver": "static", "models": [{"id": "alpha", "url": "http://alpha"}]});
    let patch = json!({"spec": {"multiplexer": {"slots": [slot]}}}).to_string();
    setup.namespace.kubectl(&format!("patch workerpool {POOL} --type merge --patch")).arg(patch).await;
    setup.namespace.wait_gone(&setup.namespace.api::<Role>(), WORKER).await;
    setup.namespace.wait_gone(&setup.namespace.api::<RoleBinding>(), WORKER).await;
}
