//! Passes that concern the conditions and the numbers of the status.

use super::*;

#[tokio::test]
async fn provider_without_service_is_not_ready() {
    for (code, reason) in [(403, "Forbidden"), (409, "ApiError"), (500, "ApiError")] {
        let mut world = World::new();
        world.api.refuse(move |method, path| (method == "PATCH" && path.ends_with("/services/local")).then_some(code));
        let provider = provider(json!({}));
        world.changed(&provider).await.unwrap_err();
        world.relay(&world.expected_hash());
        world.changed(&provider).await.unwrap_err();
        assert_eq!(world.condition("Ready"), ("False".into(), reason.into()), "{code}");

        world.api.refuse(|_, _| None);
        world.changed(&provider).await.unwrap();
        assert_eq!(world.condition("Ready"), ("True".into(), "Serving".into()), "{code}");
        // Once the Service exists, a passing error does not affect readiness.
        world.touched::<Service>("local", "theirs", Now::There);
        world.api.refuse(move |method, path| (method == "PATCH" && path.ends_with("/services/local")).then_some(code));
        world.changed(&provider).await.unwrap_err();
        assert_eq!(world.condition("Ready").0, "True", "{code}");
    }
}

#[tokio::test]
async fn provider_with_unrestorable_service_is_not_ready() {
    for (code, reason) in [(403, "Forbidden"), (500, "ApiError")] {
        let mut world = World::new();
        let provider = provider(json!({}));
        world.changed(&provider).await.unwrap();
        world.relay(&world.expected_hash());
        world.changed(&provider).await.unwrap();
        assert_eq!(world.condition("Ready").0, "True");

        world.api.0.lock().unwrap().objects.remove("/api/v1/namespaces/llm/services/local").unwrap();
        world.touched::<Service>("local", "theirs", Now::Gone);
        world.api.refuse(move |method, path| (method == "PATCH" && path.ends_with("/services/local")).then_some(code));
        world.changed(&provider).await.unwrap_err();
        assert_eq!(world.condition("Ready"), ("False".into(), reason.into()), "{code}");

        world.api.refuse(|_, _| None);
        world.changed(&provider).await.unwrap();
        assert_eq!(world.condition("Ready"), ("True".into(), "Serving".into()), "{code}");
    }
}

#[tokio::test]
async fn unwritten_configuration_is_not_programmed() {
    for (refused, code, reason) in [("GET", 500, "ApiError"), ("PATCH", 403, "Forbidden")] {
        let mut world = World::new();
        world.changed(&provider(json!({}))).await.unwrap();
        world.relay(&world.expected_hash());
        world.changed(&provider(json!({}))).await.unwrap();
        assert_eq!(world.condition("Programmed").0, "True", "{reason}");

        world
            .api
            .refuse(move |method, path| (method == refused && path.ends_with("/secrets/local-relay")).then_some(code));
        let newer = with_metadata(json!({"generation": 2}), json!({"queue": {"maxLength": 7}}));
        world.changed(&newer).await.unwrap_err();
        assert_eq!(world.condition("Programmed"), ("False".into(), reason.into()));
        // The running relays still serve.
        assert_eq!(world.condition("Ready").0, "True", "{reason}");
    }
}

#[tokio::test]
async fn missing_user_secret_keeps_generation_unprogrammed() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.relay(&world.expected_hash());
    world.changed(&provider(json!({}))).await.unwrap();
    let newer = with_metadata(json!({"generation": 2}), json!({"workerSecretRef": {"name": "mine", "key": "k"}}));
    world.changed(&newer).await.unwrap();
    assert_eq!(world.condition("Programmed"), ("False".into(), "SecretNotFound".into()));
}

#[tokio::test]
async fn transient_error_after_restart_leaves_provider_ready() {
    let mut world = World::new();
    let fresh = provider(json!({}));
    world.changed(&fresh).await.unwrap();
    world.relay(&world.expected_hash());
    world.changed(&fresh).await.unwrap();
    let status = serde_json::from_value(world.api.object("providers/local/status").unwrap()).unwrap();
    let served = Provider { status: Some(status), ..fresh };

    world.shared.forget(&("llm".into(), "local".into()));
    world.api.refuse(|method, path| (method == "GET" && path.contains("/secrets/")).then_some(500));
    world.changed(&served).await.unwrap_err();
    assert_eq!(world.condition("Ready"), ("True".into(), "Serving".into()));
}

#[tokio::test]
async fn programmed_follows_relays_without_object_writes() {
    let mut world = World::new();
    let provider = provider(json!({}));
    world.changed(&provider).await.unwrap();
    world.relay("older");
    world.pass(&provider).await.unwrap();
    assert_eq!(world.condition("Programmed"), ("False".into(), "WaitingForRelays".into()));
    world.relay(&world.expected_hash());
    world.api.take_writes();
    world.pass(&provider).await.unwrap();
    assert_eq!(world.condition("Programmed"), ("True".into(), "ConfigurationApplied".into()));
    let writes = world.api.take_writes();
    assert!(writes.iter().all(|write| write.contains("pods/relay-1") || write.contains("/status")), "{writes:?}");
}

#[tokio::test]
async fn first_worker_and_model_are_published_immediately() {
    let mut world = World::new();
    let provider = provider(json!({}));
    world.changed(&provider).await.unwrap();
    world.workers(&[], None);
    world.pass(&provider).await.unwrap();
    let steps: [(&[&str], Option<&str>, bool); 5] = [
        (&["a"], None, true),
        (&["a"], Some("m"), true),
        (&["a", "b"], Some("m"), false),
        (&[], None, false),
        (&["a"], Some("m"), false),
    ];
    for (workers, model, told) in steps {
        world.workers(workers, model);
        world.api.take_writes();
        world.pass(&provider).await.unwrap();
        let is_told = world.api.take_writes().contains(&"PATCH providers/local/status".to_owned());
        assert_eq!(is_told, told, "{workers:?} {model:?}");
    }
}
