//! Passes that concern the Secrets: the life cycle of the worker secret as relays and workers mount it.

use super::*;

/// Runs a complete rotation with the annotation: the relays receive the new value and confirm it, and workers receive
/// it.
async fn rotate(world: &mut World, annotation: &str) {
    let provider = with_metadata(json!({"annotations": {"modelrelay.io/rotate": annotation}}), json!({}));
    world.changed(&provider).await.unwrap();
    world.relay(&world.expected_hash());
    world.pass(&provider).await.unwrap();
}

#[tokio::test]
async fn second_rotation_keeps_expiry_written_by_older_operator() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    let first = world.value("local-worker", "worker-secret").unwrap();
    rotate(&mut world, "monday").await;
    let second = world.value("local-worker", "worker-secret").unwrap();
    assert_ne!(first, second);
    // An hour ago, according to the annotation, which older operators write too.
    let hour_ago = Timestamp::from_second(Timestamp::now().as_second() + 23 * 3600).unwrap().to_string();
    world.api.annotate(&format!("{SECRETS}/local-relay"), "modelrelay.io/previous-until", &hour_ago);

    rotate(&mut world, "noon").await;
    let third = world.value("local-worker", "worker-secret").unwrap();
    assert!(third != second && third != first);
    let relay = world.api.object("secrets/local-relay").unwrap();
    let held: Vec<String> = relay["data"].as_object().unwrap().keys().cloned().collect();
    let values: Vec<Option<String>> = held.iter().map(|key| world.value("local-relay", key)).collect();
    for good in [&first, &second, &third] {
        assert!(values.contains(&Some(good.clone())), "{held:?}");
    }
    let yaml = world.value("local-relay", "relay.yaml").unwrap();
    assert!(yaml.contains(&format!("notAfter: {hour_ago}")), "{yaml}");
}

#[tokio::test]
async fn workers_receive_new_value_before_old_one_expires() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    let provider = with_metadata(json!({"annotations": {"modelrelay.io/rotate": "monday"}}), json!({}));
    world.changed(&provider).await.unwrap();
    world.relay(&world.expected_hash());
    // The operator stops after the first of the two writes.
    world.api.refuse(|method, path| (method == "PATCH" && path.ends_with("secrets/local-relay")).then_some(500));
    world.pass(&provider).await.unwrap_err();
    let new = world.value("local-worker", "worker-secret");
    assert_eq!(new, world.value("local-relay", "worker-secret"));
    assert!(!world.value("local-relay", "relay.yaml").unwrap().contains("notAfter"));
    world.api.refuse(|_, _| None);
    world.pass(&provider).await.unwrap();
    assert_eq!(world.value("local-worker", "worker-secret"), new);
    assert!(world.value("local-relay", "relay.yaml").unwrap().contains("notAfter"));
}

/// Adds a second relay Pod in this state, as a kubelet reports it.
fn add_relay_pod(world: &mut World, state: Value) {
    let started = Timestamp::now().to_string();
    let pod = json!({
        "metadata": {"name": "relay-2", "namespace": "llm", "labels": {"modelrelay.io/provider": "local"}},
        "spec": {"nodeName": "n", "containers": []},
        "status": {"startTime": started, "containerStatuses": [{
            "name": "relay", "state": state, "ready": false, "restartCount": 0, "image": "", "imageID": "",
        }]},
    });
    world.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
}

#[tokio::test]
async fn only_starting_relay_delays_rotation() {
    let states = [
        (json!({"waiting": {"reason": "ImagePullBackOff"}}), true),
        (json!({"waiting": {"reason": "CrashLoopBackOff"}}), true),
        (json!({"waiting": {"reason": "ContainerCreating"}}), false),
        (json!({"running": {}}), false),
    ];
    for (state, rotates) in states {
        let mut world = World::new();
        world.changed(&provider(json!({}))).await.unwrap();
        let first = world.value("local-worker", "worker-secret");
        add_relay_pod(&mut world, state.clone());
        rotate(&mut world, "monday").await;
        assert_eq!(world.value("local-worker", "worker-secret") != first, rotates, "{state}");
        world.relay(&world.expected_hash());
        // The wait may end by time alone.
        let provider = with_metadata(json!({"annotations": {"modelrelay.io/rotate": "monday"}}), json!({}));
        let next = world.pass(&provider).await.unwrap();
        let soon = Action::requeue(UNCONFIRMED_INTERVAL + Duration::from_millis(50));
        assert_eq!(next == soon, !rotates, "{state}: {next:?}");
    }
}

fn salt_of(yaml: &str) -> Option<&str> {
    yaml.lines().next()?.strip_prefix("# salt: ")
}

#[tokio::test]
async fn salted_configuration_hash_prevents_guessing_secret() {
    let mut world = World::new();
    let provider = provider(json!({}));
    world.changed(&provider).await.unwrap();
    let yaml = world.value("local-relay", "relay.yaml").unwrap();
    let salt = salt_of(&yaml).expect("a salt").to_owned();
    assert!(salt.len() >= 32, "{yaml}");
    let (hash, status) = (world.expected_hash(), world.api.object("providers/local/status").unwrap().to_string());
    assert!(!status.contains(&salt), "{status}");
    // Neither another pass nor another operator changes anything.
    world.relay(&hash);
    world.shared.forget(&("llm".into(), "local".into()));
    world.changed(&provider).await.unwrap();
    assert_eq!(world.value("local-relay", "relay.yaml"), Some(yaml));
    assert_eq!(world.expected_hash(), hash);

    let other = World::new();
    other.changed(&provider).await.unwrap();
    assert_ne!(salt_of(&other.value("local-relay", "relay.yaml").unwrap()), Some(salt.as_str()));
}

#[tokio::test]
async fn unsalted_configuration_gets_salt_without_rotation() {
    let mut world = World::new();
    let provider = provider(json!({}));
    world.changed(&provider).await.unwrap();
    let secret = world.value("local-worker", "worker-secret");
    let path = format!("{SECRETS}/local-relay");
    let yaml = world.value("local-relay", "relay.yaml").unwrap();
    let unsalted: String = yaml.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    world.api.0.lock().unwrap().objects.get_mut(&path).unwrap()["data"]["relay.yaml"] =
        json!(ByteString(unsalted.clone().into_bytes()));
    world.shared.forget(&("llm".into(), "local".into()));
    world.changed(&provider).await.unwrap();
    let salted = world.value("local-relay", "relay.yaml").unwrap();
    assert!(salt_of(&salted).is_some() && salted.ends_with(&unsalted), "{salted}");
    assert_eq!(world.value("local-worker", "worker-secret"), secret);
    assert_eq!(world.value("local-relay", "worker-secret-previous"), None);
    world.relay(&world.expected_hash());
    world.api.take_writes();
    world.shared.forget(&("llm".into(), "local".into()));
    world.changed(&provider).await.unwrap();
    assert_eq!(world.value("local-relay", "relay.yaml"), Some(salted));
}

#[tokio::test]
async fn foreign_secret_is_neither_read_nor_mounted() {
    let world = World::new();
    let mut theirs = foreign("Secret", "local-admin");
    theirs["data"] = json!({"token": ByteString(b"theirs".to_vec())});
    world.api.put(&format!("{SECRETS}/local-admin"), theirs);
    world.changed(&provider(json!({}))).await.unwrap_err();
    let writes = world.api.take_writes();
    assert!(!writes.iter().any(|write| write.contains("deployments") || write.contains("local-admin")), "{writes:?}");
    assert_eq!(world.condition("Stalled"), ("True".into(), "NameTaken".into()));
}

#[tokio::test]
async fn client_keys_stay_mounted_while_not_required() {
    let world = World::new();
    let mut keys = foreign("Secret", "local-api-keys");
    keys["metadata"]["labels"] =
        json!({"app.kubernetes.io/managed-by": "modelrelay-operator", "modelrelay.io/provider": "local"});
    keys["data"] = json!({"keys.json": ByteString(b"{}".to_vec())});
    world.api.put(&format!("{SECRETS}/local-api-keys"), keys);
    world.changed(&provider(json!({"relay": {"requireApiKeys": false}}))).await.unwrap();
    assert!(world.value("local-relay", "relay.yaml").unwrap().contains("requireApiKeys: false"));
    let unrequired = world.api.object("deployments/local-relay").unwrap()["spec"]["template"].clone();
    assert!(unrequired.to_string().contains("API_KEYS_SECRET"), "{unrequired}");
    assert!(world.api.object("roles/local-relay").is_some());

    let required = with_metadata(json!({"generation": 2}), json!({"relay": {"requireApiKeys": true}}));
    world.changed(&required).await.unwrap();
    assert!(world.value("local-relay", "relay.yaml").unwrap().contains("requireApiKeys: true"));
    assert_eq!(world.api.object("deployments/local-relay").unwrap()["spec"]["template"], unrequired);
}

#[tokio::test]
async fn numbers_are_written_soon_while_secret_is_missing() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.workers(&["a", "b"], Some("m"));
    let broken = with_metadata(json!({"generation": 2}), json!({"workerSecretRef": {"name": "mine", "key": "k"}}));
    assert_eq!(world.changed(&broken).await.unwrap(), Action::requeue(IDLE_INTERVAL));
    world.workers(&["a"], Some("m"));
    let next = world.pass(&broken).await.unwrap();
    assert_ne!(next, Action::requeue(IDLE_INTERVAL), "the status would show two workers for an hour");
}

#[tokio::test]
async fn user_secret_is_awaited_and_its_change_rotates() {
    let mut world = World::new();
    let provider = provider(json!({"workerSecretRef": {"name": "mine", "key": "k"}}));
    let action = world.changed(&provider).await.unwrap();
    assert_eq!(action, Action::requeue(IDLE_INTERVAL));
    assert_eq!(world.condition("Reconciling"), ("True".into(), "SecretNotFound".into()));
    assert_eq!(world.condition("Stalled").0, "False");

    let mine = |value: &str| {
        let mut secret = foreign("Secret", "mine");
        secret["data"] = json!({"k": ByteString(format!("{value}\n").into_bytes())});
        secret
    };
    world.api.put(&format!("{SECRETS}/mine"), mine("first"));
    world.changed(&provider).await.unwrap();
    assert_eq!(world.value("local-worker", "worker-secret").as_deref(), Some("first"));

    world.api.put(&format!("{SECRETS}/mine"), mine("second"));
    world.relay(&world.expected_hash());
    world.changed(&provider).await.unwrap();
    // The relay has not yet reported the configuration with both values.
    world.pass(&provider).await.unwrap();
    assert_eq!(world.value("local-worker", "worker-secret").as_deref(), Some("first"));
    assert_eq!(world.value("local-relay", "worker-secret-previous").as_deref(), Some("first"));
    world.relay(&world.expected_hash());
    world.pass(&provider).await.unwrap();
    assert_eq!(world.value("local-worker", "worker-secret").as_deref(), Some("second"));
    assert_eq!(world.value("local-relay", "worker-secret-previous").as_deref(), Some("first"));
    assert_eq!(world.api.object("secrets/mine").unwrap(), mine("second"));
}
