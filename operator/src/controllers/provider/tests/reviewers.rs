//! Passes that concern the right to have tokens reviewed.

use k8s_openapi::jiff::SignedDuration;

use super::*;

const BINDING: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/reviews";

fn by_token() -> Provider {
    provider(json!({"workerServiceAccounts": ["gpu"]}))
}

#[tokio::test]
async fn missing_right_to_bind_reviewers_is_reported() {
    let world = World::new();
    world.pass(&by_token()).await.expect("there is nothing to retry");
    assert_eq!(world.condition("Reconciling"), ("True".into(), "Forbidden".into()));
    let status = world.api.object("providers/local/status").unwrap();
    assert!(status.to_string().contains("rbac.workerTokens=true"), "{status}");
    assert!(world.api.object("deployments/local-relay").is_some() && world.api.object("services/local").is_some());
    // Tenants need the same right.
    let world = World::new();
    let tenants = json!([{"namespace": "apps"}]);
    world.pass(&provider(json!({"relay": {"requireApiKeys": true, "tenants": tenants}}))).await.unwrap();
    let status = world.api.object("providers/local/status").unwrap();
    assert!(status.to_string().contains("spec.relay.tenants: this operator cannot grant"), "{status}");
    // A Provider that does not need the right is unaffected.
    let world = World::new();
    world.pass(&provider(json!({}))).await.unwrap();
    assert_eq!(world.condition("Reconciling").0, "True", "it waits for relays");
    assert_ne!(world.condition("Reconciling").1, "Forbidden");
}

/// Adds a Provider, and another one whose workers present tokens to its relay.
fn add_owner_and_guest(world: &mut World) -> (Provider, Provider) {
    let mut guest = provider(json!({"relayRef": {"name": "local"}, "workerServiceAccounts": ["gpu"]}));
    (guest.metadata.name, guest.metadata.uid) = (Some("guest".to_owned()), Some("u-2".to_owned()));
    let owner = provider(json!({}));
    for one in [&owner, &guest] {
        world.providers.apply_watcher_event(&watcher::Event::Apply(one.clone()));
    }
    (owner, guest)
}

#[tokio::test]
async fn missing_right_is_reported_by_sharer_that_needs_it() {
    let mut world = World::new();
    let (owner, guest) = add_owner_and_guest(&mut world);
    world.pass(&owner).await.unwrap();
    world.pass(&guest).await.expect("there is nothing to retry");
    world.changed(&owner).await.unwrap();
    assert_ne!(world.condition("Reconciling").1, "Forbidden", "it is not the owner's problem");
    let status = world.api.object("providers/guest/status").unwrap().to_string();
    assert!(status.contains("Forbidden") && status.contains("rbac.workerTokens=true"), "{status}");
    assert!(world.value("local-relay", "guest.worker-secret").is_some(), "it is served all the same");
}

#[tokio::test]
async fn sharer_without_right_publishes_its_rotation() {
    let mut world = World::new();
    let (owner, mut guest) = add_owner_and_guest(&mut world);
    for provider in [&owner, &guest, &owner] {
        world.changed(provider).await.unwrap();
        world.pass(provider).await.unwrap();
    }
    world.api.annotate(&format!("{SECRETS}/guest-worker"), "modelrelay.io/changed-at", "2026-01-01T00:00:00Z");
    guest.metadata.annotations = Some([("modelrelay.io/rotate".to_owned(), "1".to_owned())].into());
    world.shared.caches.triggers.provider("llm", "guest");
    world.pass(&guest).await.unwrap();
    assert!(world.api.events().iter().any(|event| event == "SecretRotationStarted"), "{:?}", world.api.events());
}

#[tokio::test]
async fn unreachable_binding_for_sharer_is_retried() {
    let mut world = World::with_binding("reviews");
    let (owner, _) = add_owner_and_guest(&mut world);
    // The binding does not exist yet.
    world.pass(&owner).await.unwrap();
    assert_ne!(world.condition("Reconciling").1, "APIError");
    let wake_at = world.shared.ledger().memories.values().next().unwrap().outcome.as_ref().unwrap().wake_at;
    assert!(wake_at.unwrap() < Timestamp::now() + SignedDuration::from_secs(11));
}

#[tokio::test]
async fn former_relay_keeps_its_right_until_it_ended() {
    let mut world = World::with_binding("reviews");
    let subject = |name: &str| json!({"kind": "ServiceAccount", "name": name, "namespace": "llm"});
    let put = |world: &World, subjects: Value| {
        let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reviews"});
        let metadata = json!({"name": "reviews", "resourceVersion": "7"});
        world.api.put(BINDING, json!({"metadata": metadata, "roleRef": role, "subjects": subjects}));
    };
    put(&world, json!([subject("moving-relay")]));
    // Its tenants went with spec.relay.
    let mut moving = provider(json!({"relayRef": {"name": "local"}}));
    (moving.metadata.name, moving.metadata.uid) = (Some("moving".to_owned()), Some("u-2".to_owned()));
    for one in [&by_token(), &moving] {
        world.providers.apply_watcher_event(&watcher::Event::Apply(one.clone()));
    }
    let deployment = |replicas: i32| -> Deployment {
        let owners =
            json!([{"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "name": "moving", "uid": "u-2"}]);
        let metadata = json!({"name": "moving-relay", "namespace": "llm", "ownerReferences": owners});
        let spec = json!({"replicas": replicas, "selector": {}, "template": {}});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    };
    let pod =
        json!({"metadata": {"name": "moving-1", "namespace": "llm", "labels": {"modelrelay.io/provider": "moving"}}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let subjects = |world: &World| world.api.object("clusterrolebindings/reviews").unwrap()["subjects"].clone();
    world.deployments.apply_watcher_event(&watcher::Event::Apply(deployment(1)));
    world.changed(&by_token()).await.unwrap();
    let both = json!([subject("local-relay"), subject("moving-relay")]);
    assert_eq!(subjects(&world), both);
    put(&world, both.clone());
    world.deployments.apply_watcher_event(&watcher::Event::Apply(deployment(0)));
    world.pods.apply_watcher_event(&watcher::Event::Apply(pod.clone()));
    world.changed(&by_token()).await.unwrap();
    assert_eq!(subjects(&world), both, "its Pods drain");
    world.pods.apply_watcher_event(&watcher::Event::Delete(pod));
    world.changed(&by_token()).await.unwrap();
    assert_eq!(subjects(&world), json!([subject("local-relay")]));
}

#[tokio::test]
async fn relay_reviews_tokens_only_while_accounts_are_listed() {
    let world = World::with_binding("reviews");
    let elsewhere = json!({"kind": "ServiceAccount", "name": "other-relay", "namespace": "research"});
    let binding = |version: &str, subjects: Value| {
        let metadata = json!({"name": "reviews", "resourceVersion": version});
        let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reviews"});
        json!({"metadata": metadata, "roleRef": role, "subjects": subjects})
    };
    world.api.put(BINDING, binding("7", json!([elsewhere])));
    world.pass(&by_token()).await.unwrap();
    let patched = world.api.object("clusterrolebindings/reviews").unwrap();
    let ours = json!({"kind": "ServiceAccount", "name": "local-relay", "namespace": "llm"});
    assert_eq!(patched["subjects"], json!([ours, elsewhere]));
    // Known, so not requested again.
    world.api.take_writes();
    world.changed(&by_token()).await.unwrap();
    assert!(world.api.take_writes().iter().all(|write| !write.contains("clusterrolebindings")));
    // Someone removed it.
    world.api.put(BINDING, binding("8", json!([elsewhere])));
    world.shared.caches.triggers.provider_reviewers("llm", "local");
    world.pass(&by_token()).await.unwrap();
    assert_eq!(world.api.object("clusterrolebindings/reviews").unwrap()["subjects"], json!([ours, elsewhere]));
    world.api.put(BINDING, binding("9", json!([ours, elsewhere])));
    world.changed(&with_metadata(json!({"generation": 2}), json!({}))).await.unwrap();
    assert_eq!(world.api.object("clusterrolebindings/reviews").unwrap()["subjects"], json!([elsewhere]));
}
