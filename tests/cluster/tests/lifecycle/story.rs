//! With Helm 3 and with Helm 4: install, test, upgrade, roll back, uninstall, under continuous requests.

use modelrelay_cluster::{Cluster, manifests::provider, traffic::Running};
use serde_json::json;

use super::release::Release;
use super::shared::Away;
use super::user::User;

/// Another version: the same images under another tag.
const NEXT: &str = "next";

/// The definitions.
const NAMES: &str = "providers.modelrelay.io workerpools.modelrelay.io";

/// Values that both revisions have.
const DEMO: &str = "--set demo.enabled=true";

#[tokio::test]
async fn provider_keeps_serving_across_release_lifecycle() {
    let cluster = Cluster::connect().await;
    for program in ["relay", "worker", "operator"] {
        let image = format!("localhost/modelrelay-{program}");
        cluster.tag_image(&format!("{image}:dev"), &format!("{image}:{NEXT}")).await;
    }
    let _away = Away::take(&cluster).await;

    let first = Release::prepare(&cluster, 3, "first").await;
    own_definitions(&first).await;
    first.install("dev", DEMO).await;
    let user = User::begin(&cluster).await;
    let traffic = user.traffic().await.start();
    changes(&first, &user, &traffic).await;
    replace_definitions(&first, &user, &traffic).await;
    uninstall(&first, &user, &traffic).await;

    // With another Helm, name and namespace, the definitions and all of the user's objects are taken over.
    let second = Release::prepare(&cluster, 4, "second").await;
    let (relays, backends) = (user.relays().await, user.backends().await);
    let output = second.install("dev", DEMO).await;
    assert!(
        output.contains("do not belong to this release"),
        "the notes do not mention the definitions of the other release:\n{output}"
    );
    user.namespace.apply(&[provider("local", &json!({"queue": {"maxLength": 50}}))]).await;
    user.ready().await;
    assert_eq!(
        (user.relays().await, user.backends().await),
        (relays, backends),
        "the next release must restart no Pods"
    );
    changes(&second, &user, &traffic).await;
    uninstall(&second, &user, &traffic).await;
    traffic.finish().await.expect_all_answered();
}

/// Tests, upgrades and rolls back the release. Relays follow, backends stay unchanged.
async fn changes(release: &Release, user: &User, traffic: &Running) {
    traffic.wait_for_answers(6).await;
    let output = release.test().await;
    assert!(output.contains("Succeeded"), "{output}");
    let backends = user.backends().await;

    release.upgrade(NEXT, &format!("{DEMO} --set worker.resources.limits.memory=300Mi")).await;
    user.relay_of(NEXT).await;
    user.pool("own", "one Pod that is outdated", |pool| pool.data["status"]["outdated"] == 1).await;
    assert_eq!(user.backends().await, backends, "a new operator restarts no backend");
    traffic.wait_for_answers(6).await;

    release.rollback(1).await;
    user.relay_of("dev").await;
    user.pool("own", "no Pod that is outdated", |pool| pool.data["status"]["outdated"] == 0).await;
    assert_eq!(user.backends().await, backends, "nor may a rollback to the old release");
    traffic.wait_for_answers(6).await;
}

/// Transfers the definitions, which are those of the shared release, to this one before it is installed.
async fn own_definitions(release: &Release) {
    let (name, namespace) = (release.name, &release.namespace.name);
    let owner = format!("meta.helm.sh/release-name={name} meta.helm.sh/release-namespace={namespace}");
    release.namespace.kubectl(&format!("annotate --overwrite crd {NAMES} {owner}")).await;
    release.namespace.kubectl(&format!("label --overwrite crd {NAMES} app.kubernetes.io/managed-by=Helm")).await;
}

/// Replaces the definitions, which removes Helm's ownership of them. Neither an upgrade nor a rollback deletes them,
/// with all of the user's objects.
async fn replace_definitions(release: &Release, user: &User, traffic: &Running) {
    const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crds");
    const OWNER: &str = "meta.helm.sh/release-name- meta.helm.sh/release-namespace-";
    let pods = (user.relays().await, user.backends().await);
    release.namespace.kubectl("replace --filename").arg(FILES).await;
    release.upgrade("dev", DEMO).await;
    release.rollback(1).await;
    // As `kubectl replace` does with the files of earlier versions.
    release.namespace.kubectl(&format!("annotate crd {NAMES} helm.sh/resource-policy- {OWNER}")).await;
    release.upgrade("dev", DEMO).await;
    // A revision without the definitions must not delete them.
    release.namespace.kubectl(&format!("annotate crd {NAMES} helm.sh/resource-policy-")).await;
    let without = format!("{DEMO} --set crds.install=false");
    let refusal = release.upgrade_command("dev", &without).expect_failure().await;
    let advice = format!("kubectl annotate crd {NAMES} helm.sh/resource-policy=keep");
    assert!(refusal.contains(&advice), "{refusal}");
    release.namespace.kubectl(&format!("annotate crd {NAMES} helm.sh/resource-policy=keep")).await;
    release.upgrade("dev", &without).await;
    // From now on, they belong to no release.
    release.namespace.kubectl(&format!("annotate crd {NAMES} {OWNER}")).await;
    user.ready().await;
    assert_eq!((user.relays().await, user.backends().await), pods, "the user's objects must stay");
    traffic.wait_for_answers(6).await;
}

/// Uninstalls the release: none of its objects stays, and all of the user's do.
async fn uninstall(release: &Release, user: &User, traffic: &Running) {
    let operator = release.operator();
    let here = release.objects().await;
    for object in [
        &format!("ClusterRole/{operator}.{}", release.namespace.name),
        &format!("Deployment/{operator}"),
        &format!("Secret/{}-modelrelay-webhook-certificate", release.name),
        "Provider/demo",
        "Secret/demo-worker",
        "Secret/demo-admin",
        "Deployment/demo-backend",
    ] {
        assert!(here.iter().any(|name| name == object), "{object} is not among {here:#?}");
    }
    let (relays, backends) = (user.relays().await, user.backends().await);
    release.uninstall(&[]).await;
    let definitions = release.namespace.kubectl("get crd providers.modelrelay.io workerpools.modelrelay.io").await;
    assert_eq!(definitions.lines().count(), 3, "{definitions}");
    traffic.wait_for_answers(12).await;
    assert_eq!((user.relays().await, user.backends().await), (relays, backends), "the user's Pods must stay");
}
