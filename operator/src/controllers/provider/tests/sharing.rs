//! Providers that another Provider's relay serves.

use super::*;
use crate::spec::sharing;

const GRANT: &str = r#"{"relay": {"sharedWith": [{"namespace": "research"}]}}"#;

fn named(namespace: &str, name: &str, more: Value, spec: Value) -> Provider {
    let mut provider = with_metadata(more, spec);
    provider.metadata.name = Some(name.to_owned());
    provider.metadata.namespace = Some(namespace.to_owned());
    provider.metadata.uid = Some(format!("{namespace}-{name}"));
    provider
}

fn front() -> Provider {
    named("llm", "front", json!({}), serde_json::from_str(GRANT).unwrap())
}

fn chat(more: Value, spec: Value) -> Provider {
    let mut spec = spec;
    spec["relayRef"] = json!({"name": "front", "namespace": "llm"});
    named("research", "chat", more, spec)
}

impl World {
    /// Stores both Providers, and reconciles them until nothing is left to write.
    async fn share(&mut self, owner: &Provider, sharer: &Provider) {
        for provider in [owner, sharer] {
            self.providers.apply_watcher_event(&watcher::Event::Apply(provider.clone()));
        }
        for _ in 0..2 {
            for provider in [sharer, owner] {
                self.changed_one(provider).await;
            }
        }
        self.changed_one(sharer).await;
    }

    async fn changed_one(&self, provider: &Provider) {
        let (namespace, name) = sharing::key(provider);
        self.shared.caches.triggers.provider(&namespace, &name);
        // A failure is in the conditions.
        let _ = self.pass(provider).await;
    }

    /// Reports that the relay of `front` runs the configuration that was written last.
    fn front_runs_newest(&mut self) {
        let hash = self.shared.ctx.relays.expected("llm", "front").unwrap().hash;
        let pod = json!({
            "metadata": {"name": "front-1", "namespace": "llm", "labels": {"modelrelay.io/provider": "front"}},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        self.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        for (namespace, name) in [("llm", "front"), ("research", "chat")] {
            let report = RelayReport { config_hash: Some(hash.clone()), ..RelayReport::default() };
            let relays = [("front-1".to_owned(), Ok(report))].into();
            self.shared.ctx.relays.keep(namespace, name, RelaySnapshot { relays, ..RelaySnapshot::default() });
        }
    }

    fn shared_yaml(&self) -> String {
        self.value("front-relay", "relay.yaml").unwrap_or_default()
    }

    fn condition_of(&self, name: &str, type_: &str) -> (String, String) {
        let status = self.api.object(&format!("providers/{name}/status")).unwrap_or_default();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|condition| condition["type"] == type_);
        let text = |key: &str| found.and_then(|found| found[key].as_str()).unwrap_or_default().to_owned();
        (text("status"), text("reason"))
    }

    fn is_requested(&self, namespace: &str, name: &str) -> bool {
        self.shared.caches.triggers.take_changes(&ObjectRef::new(name).within(namespace)) != Changes::default()
    }
}

#[tokio::test]
async fn sharer_has_secrets_and_entry_but_no_relay() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({"models": [{"id": "m"}]})));
    world.share(&owner, &sharer).await;
    let writes = world.api.take_writes();
    let of_sharer: Vec<&String> = writes.iter().filter(|write| write.contains("/research/")).collect();
    let kinds = ["secrets/chat-relay", "secrets/chat-worker", "providers/chat/status"];
    assert!(of_sharer.iter().all(|write| kinds.iter().any(|kind| write.ends_with(kind))), "{of_sharer:?}");
    let yaml = world.shared_yaml();
    assert!(yaml.contains("- name: front\n") && yaml.contains("- name: chat.research\n"), "{yaml}");
    assert!(yaml.contains("- file: chat.research.worker-secret\n"), "{yaml}");
    let secret = world.value("chat-worker", "worker-secret");
    assert!(secret.is_some() && world.value("front-relay", "chat.research.worker-secret") == secret);
    assert_ne!(world.value("front-relay", "worker-secret"), secret, "each Provider has its own");
    let policy = world.api.object("networkpolicies/front-relay").unwrap();
    let peer = &policy["spec"]["ingress"][1]["from"][1]["namespaceSelector"]["matchLabels"];
    assert_eq!(peer, &json!({"kubernetes.io/metadata.name": "research"}));
}

#[tokio::test]
async fn sharer_is_ready_once_relays_know_it() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({})));
    for provider in [&owner, &sharer] {
        world.providers.apply_watcher_event(&watcher::Event::Apply(provider.clone()));
    }
    world.changed_one(&owner).await;
    world.front_runs_newest();
    world.changed_one(&sharer).await;
    assert_eq!(world.condition_of("chat", "Ready"), ("False".into(), "WaitingForRelays".into()));
    assert!(world.is_requested("llm", "front"), "the owner has a new entry to write");
    world.changed_one(&owner).await;
    assert!(world.is_requested("research", "chat"), "its entry was written");
    world.changed_one(&sharer).await;
    assert_eq!(world.condition_of("chat", "Programmed"), ("False".into(), "WaitingForRelays".into()));
    assert_eq!(world.condition_of("chat", "Ready").0, "False");
    world.front_runs_newest();
    world.pass(&sharer).await.unwrap();
    assert_eq!(world.condition_of("chat", "Programmed"), ("True".into(), "ConfigurationApplied".into()));
    assert_eq!(world.condition_of("chat", "Ready"), ("True".into(), "Serving".into()));
    let status = world.api.object("providers/chat/status").unwrap();
    let text = |field: &str| status[field].as_str().unwrap_or_default().to_owned();
    assert_eq!((text("relay"), text("nameAtRelay")), ("llm/front".into(), "chat.research".into()));
    assert_eq!(text("endpoint"), "http://front.llm.svc/v1");
    assert_eq!(text("workerEndpoint"), "http://front-workers.llm.svc:8081");
}

#[tokio::test]
async fn unusable_reference_stalls_with_its_reason() {
    let leaving = json!({"deletionTimestamp": "2026-11-01T00:00:00Z"});
    let grant: Value = serde_json::from_str(GRANT).unwrap();
    let cases = [
        (None, "RelayNotFound"),
        (Some(named("llm", "front", json!({}), json!({"relayRef": {"name": "other"}}))), "RelayChained"),
        (Some(named("llm", "front", json!({}), json!({}))), "RelayNotGranted"),
        (Some(named("llm", "front", leaving, grant)), "RelayDeleting"),
    ];
    for (owner, reason) in cases {
        let mut world = World::new();
        owner.into_iter().for_each(|owner| world.providers.apply_watcher_event(&watcher::Event::Apply(owner)));
        let sharer = chat(json!({}), json!({}));
        world.changed_one(&sharer).await;
        for (type_, status) in [("Ready", "False"), ("Stalled", "True"), ("Programmed", "False")] {
            assert_eq!(world.condition_of("chat", type_), (status.into(), reason.into()));
        }
        let writes = world.api.take_writes();
        assert!(writes.iter().all(|write| write.ends_with("/status")), "{reason}: {writes:?}");
        assert_eq!(world.api.object("providers/chat/status").unwrap().get("endpoint"), None);
    }
}

#[tokio::test]
async fn withdrawn_or_deleted_sharer_leaves_configuration() {
    for is_deleted in [true, false] {
        let mut world = World::new();
        let (owner, sharer) = (front(), chat(json!({}), json!({})));
        world.share(&owner, &sharer).await;
        world.front_runs_newest();
        world.pass(&sharer).await.unwrap();
        assert_eq!(world.condition_of("chat", "Ready").0, "True");
        let owner = if is_deleted {
            world.providers.apply_watcher_event(&watcher::Event::Delete(sharer.clone()));
            owner
        } else {
            let owner = named("llm", "front", json!({"generation": 2}), json!({}));
            world.providers.apply_watcher_event(&watcher::Event::Apply(owner.clone()));
            owner
        };
        world.changed_one(&owner).await;
        assert!(!world.shared_yaml().contains("chat"), "{}", world.shared_yaml());
        assert_eq!(world.value("front-relay", "chat.research.worker-secret"), None);
        if !is_deleted {
            world.changed_one(&sharer).await;
            assert_eq!(world.condition_of("chat", "Ready"), ("False".into(), "RelayNotGranted".into()));
        }
    }
}

#[tokio::test]
async fn invalid_sharer_keeps_its_previous_entry() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({"models": [{"id": "kept"}]})));
    world.share(&owner, &sharer).await;
    let yaml = world.shared_yaml();
    let invalid = chat(json!({"generation": 2}), json!({"models": [{"id": "a"}, {"id": "a"}]}));
    world.share(&owner, &invalid).await;
    assert_eq!(world.shared_yaml(), yaml);
    assert_eq!(world.condition_of("chat", "Stalled"), ("True".into(), "InvalidSpec".into()));
}

#[tokio::test]
async fn unparseable_sharer_keeps_its_entry_after_restart() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({"models": [{"id": "kept"}]})));
    world.share(&owner, &sharer).await;
    let yaml = world.shared_yaml();
    // A new operator cannot parse it.
    world.providers.apply_watcher_event(&watcher::Event::Delete(sharer.clone()));
    world.shared.ledger().memories.clear();
    world.shared.caches.unreadable_providers.note(&sharer, false);
    world.changed_one(&owner).await;
    assert_eq!(world.shared_yaml(), yaml);
    assert!(world.value("front-relay", "chat.research.worker-secret").is_some());
    world.shared.caches.unreadable_providers.note(&sharer, true);
    world.changed_one(&owner).await;
    assert!(!world.shared_yaml().contains("chat"), "it is gone");
}

#[tokio::test]
async fn rotation_of_sharer_waits_for_shared_relays() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({})));
    world.share(&owner, &sharer).await;
    world.front_runs_newest();
    let old = world.value("chat-worker", "worker-secret").unwrap();
    let path = "/api/v1/namespaces/research/secrets/chat-worker";
    world.api.annotate(path, "modelrelay.io/changed-at", "2026-01-01T00:00:00Z");
    let rotated = chat(json!({"annotations": {"modelrelay.io/rotate": "1"}}), json!({}));
    world.share(&owner, &rotated).await;
    let current = world.value("front-relay", "chat.research.worker-secret").unwrap();
    assert_ne!(current, old);
    assert_eq!(world.value("front-relay", "chat.research.worker-secret-previous"), Some(old.clone()));
    assert_eq!(world.value("chat-worker", "worker-secret"), Some(old), "a relay does not admit the new value yet");
    world.front_runs_newest();
    world.changed_one(&rotated).await;
    assert_eq!(world.value("chat-worker", "worker-secret"), Some(current));
}

#[tokio::test]
async fn unreadable_secret_of_sharer_keeps_its_entry() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({})));
    world.share(&owner, &sharer).await;
    let yaml = world.shared_yaml();
    world.api.refuse(|method, path| (method == "GET" && path.ends_with("/secrets/chat-relay")).then_some(500));
    world.changed_one(&owner).await;
    assert_eq!(world.shared_yaml(), yaml);
    assert_eq!(world.condition_of("front", "Stalled").0, "False", "it is not the owner's problem");
}

#[tokio::test]
async fn changed_user_secret_of_sharer_reaches_relay() {
    let mut world = World::new();
    let (owner, sharer) = (front(), chat(json!({}), json!({"workerSecretRef": {"name": "mine", "key": "k"}})));
    let path = "/api/v1/namespaces/research/secrets/mine";
    let put = |world: &World, value: &str| {
        let data = json!({"k": ByteString(value.as_bytes().to_vec())});
        world.api.put(path, json!({"metadata": {"name": "mine", "namespace": "research"}, "data": data}));
    };
    put(&world, "first-value-of-the-user-01");
    world.share(&owner, &sharer).await;
    world.front_runs_newest();
    world.pass(&sharer).await.unwrap();
    world.is_requested("llm", "front");
    // As the watch of Secrets does.
    put(&world, "second-value-of-the-user-02");
    world.changed_one(&sharer).await;
    assert!(world.is_requested("llm", "front"), "the owner writes the configuration");
    world.changed_one(&owner).await;
    let at_relay = world.value("front-relay", "chat.research.worker-secret");
    assert_eq!(at_relay.as_deref(), Some("second-value-of-the-user-02"));
}
