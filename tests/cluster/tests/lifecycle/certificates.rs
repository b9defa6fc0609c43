//! External certificates: a Secret and a `caBundle` that another program fills, as cert-manager does.

use std::path::Path;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use modelrelay_cluster::manifests::{demo_container, worker_pool};
use modelrelay_cluster::{Cluster, Command, Namespace, TEST_TIMEOUT, wait_until};
use serde_json::{Value, json};

use super::release::Release;
use super::shared::Away;

const SECRET: &str = "from-elsewhere";

#[tokio::test]
async fn external_certificate_and_its_successor_are_served() {
    let cluster = Cluster::connect().await;
    let _away = Away::take(&cluster).await;
    let release = Release::prepare(&cluster, 4, "external").await;
    let namespace = &release.namespace;
    let folder = tempfile::tempdir().expect("a temporary folder");
    make_certificate(&release, folder.path()).await;
    fill_secret(namespace, folder.path()).await;
    release.install("dev", &format!("--set webhook.existingSecret={SECRET}")).await;

    let user = cluster.namespace("injected").await;
    user.apply(&[worker_pool("llama", &json!({"provider": "local"}))]).await;
    // The API server learns of a new webhook, and kube-proxy of its Pods, shortly after Helm is done.
    let unknown = "a rejection, because the CA is not published";
    wait_until(unknown, TEST_TIMEOUT, async || {
        create_pod(&user).output().await.stderr.contains("certificate signed by unknown authority")
    })
    .await;
    publish(&release, folder.path()).await;
    wait_for_injection(&user).await;

    // A renewal, even by another authority, is served without a restart.
    make_certificate(&release, folder.path()).await;
    fill_secret(namespace, folder.path()).await;
    publish(&release, folder.path()).await;
    wait_for_injection(&user).await;
    let secret = namespace.api::<Secret>().get(SECRET).await.expect("the Secret still exists");
    let writers: Vec<_> = secret.managed_fields().iter().filter_map(|entry| entry.manager.clone()).collect();
    assert!(!writers.iter().any(|writer| writer.contains("modelrelay")), "the operator changed it: {writers:?}");
    release.uninstall(&[&format!("Secret/{SECRET}")]).await;
}

/// Waits until a labelled Pod gets its worker; nothing is created.
pub(crate) async fn wait_for_injection(namespace: &Namespace) {
    wait_until("a labelled Pod to receive its worker", TEST_TIMEOUT, async || {
        let created = create_pod(namespace).output().await;
        let pod: Value = serde_json::from_str(&created.stdout).unwrap_or_default();
        has_worker(&pod)
    })
    .await;
}

/// True if a Pod has a worker.
pub(crate) fn has_worker(pod: &Value) -> bool {
    let containers = pod["spec"]["initContainers"].as_array();
    containers.into_iter().flatten().any(|container| container["name"] == "modelrelay-worker")
}

/// Returns `kubectl create` for a Pod of pool `llama`, as a dry run on the server.
pub(crate) fn create_pod(namespace: &Namespace) -> Command {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "vllm", "labels": {"modelrelay.io/pool": "llama"}},
        "spec": {"containers": [demo_container()]},
    });
    namespace.kubectl("create --dry-run=server --output json --filename -").input(pod.to_string())
}

/// Writes an authority and its certificate for the webhook's Service, as files in the folder.
async fn make_certificate(release: &Release, folder: &Path) {
    let service = format!("{}.{}.svc", release.operator(), release.namespace.name);
    let file = |name: &str| folder.join(name).into_os_string();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    let openssl = || Command::new("openssl").args(["req", "-x509"]).args(key.split(' '));
    openssl().args(["-subj", "/CN=somebody"]).arg("-keyout").arg(file("ca.key")).arg("-out").arg(file("ca.crt")).await;
    let signed = openssl().arg("-CA").arg(file("ca.crt")).arg("-CAkey").arg(file("ca.key"));
    let named = signed.args(["-subj", "/CN=webhook", "-addext", "basicConstraints=critical,CA:FALSE", "-addext"]);
    let named = named.arg(format!("subjectAltName=DNS:{service}"));
    named.arg("-keyout").arg(file("tls.key")).arg("-out").arg(file("tls.crt")).await;
}

async fn fill_secret(namespace: &Namespace, folder: &Path) {
    let create = format!("create secret generic {SECRET} --type kubernetes.io/tls --dry-run=client --output yaml");
    let mut create = namespace.kubectl(&create);
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        create = create.arg(format!("--from-file={}", folder.join(name).display()));
    }
    let secret = create.await;
    namespace.apply_yaml(&secret).await;
}

/// Writes the authority into the webhook configuration, as NOTES.txt describes.
async fn publish(release: &Release, folder: &Path) {
    let authority = std::fs::read(folder.join("ca.crt")).expect("openssl wrote it");
    let bundle = k8s_openapi::ByteString(authority);
    let patch =
        |webhook| json!({"op": "add", "path": format!("/webhooks/{webhook}/clientConfig/caBundle"), "value": bundle});
    let patch = json!([patch(0), patch(1)]);
    let name = format!("{}.{}", release.operator(), release.namespace.name);
    let command = release.namespace.kubectl(&format!("patch mutatingwebhookconfiguration {name} --type json --patch"));
    command.arg(patch.to_string()).await;
}
