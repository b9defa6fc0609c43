//! A Provider that moves from a relay of its own to another Provider's.

use super::*;
use crate::manifests::testing;

fn named(name: &str, generation: i64, spec: Value) -> Provider {
    with_metadata(json!({"name": name, "uid": format!("uid-{name}"), "generation": generation}), spec)
}

fn front() -> Provider {
    named("front", 1, json!({}))
}

fn chat() -> Provider {
    named("chat", 2, json!({"relayRef": {"name": "front"}}))
}

fn pod_of(name: &str, label: &str, value: &str, containers: Value) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "namespace": "llm", "labels": {label: value}},
        "spec": {"nodeName": "n", "containers": containers},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    });
    serde_json::from_value(pod).unwrap()
}

fn relay_pod(provider: &str) -> Pod {
    pod_of(&format!("{provider}-1"), "modelrelay.io/provider", provider, json!([]))
}

/// Two Providers with relays, and a pool of `chat` with one worker.
struct Scene {
    world: World,
    chat: Provider,
}

impl Scene {
    async fn new() -> Self {
        Self::of(&front(), chat()).await
    }

    /// `owner` and `chat`, which had a relay of its own until now.
    async fn of(owner: &Provider, chat: Provider) -> Self {
        Self::after(named("chat", 1, json!({})), owner, chat).await
    }

    /// `owner` and `chat`, which was `before` until now.
    async fn after(before: Provider, owner: &Provider, chat: Provider) -> Self {
        let mut world = World::new();
        world.providers.apply_watcher_event(&watcher::Event::Apply(owner.clone()));
        world.providers.apply_watcher_event(&watcher::Event::Apply(before.clone()));
        for provider in [owner, &before] {
            world.shared.caches.triggers.provider("llm", &provider.name_any());
            world.pass(provider).await.unwrap();
            world.pods.apply_watcher_event(&watcher::Event::Apply(relay_pod(&provider.name_any())));
        }
        let pool = testing::pool(&json!({"provider": "chat"}));
        world.pools.apply_watcher_event(&watcher::Event::Apply(pool));
        world.api.take_writes();
        let mut scene = Self { world, chat };
        scene.put_worker(true);
        scene.watch();
        scene
    }

    /// Makes the worker of `chat` ready, or not.
    fn put_worker(&mut self, is_ready: bool) {
        let worker = json!([{"name": "modelrelay-worker", "env": [{"name": "WORKER_CONFIG", "value": "/etc/modelrelay/config/worker.yaml"}]}]);
        let mut worker = pod_of("vllm-1", "modelrelay.io/pool", "llama", worker);
        if !is_ready {
            worker.status = None;
        }
        self.world.pool_pods.apply_watcher_event(&watcher::Event::Apply(worker));
    }

    /// Delivers the objects of `chat` to the caches.
    fn watch(&mut self) {
        if let Some(status) = self.world.api.object("providers/chat/status") {
            self.chat.status = serde_json::from_value(status).unwrap();
        }
        self.world.providers.apply_watcher_event(&watcher::Event::Apply(self.chat.clone()));
        let deployment = self.world.api.object("deployments/chat-relay").unwrap();
        self.world.deployments.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(deployment).unwrap()));
    }

    /// Runs a pass of `chat`, by an operator that knows nothing of the passes before, and returns the step.
    async fn step(&mut self) -> String {
        self.world.shared.ledger().memories.clear();
        // A failure is in the conditions.
        let _ = self.world.pass(&self.chat).await;
        self.watch();
        let status = self.world.api.object("providers/chat/status").unwrap();
        status["moving"].as_str().unwrap_or("-").to_owned()
    }

    async fn owner_pass(&self) {
        self.owner_pass_of(&front()).await;
    }

    async fn owner_pass_of(&self, owner: &Provider) {
        self.world.shared.caches.triggers.provider("llm", "front");
        // A failure is in the conditions.
        let _ = self.world.pass(owner).await;
    }

    /// Continues until the workers are directed to the relay of `front`.
    async fn connect(&mut self) {
        self.step().await;
        self.owner_pass().await;
        self.front_reports(&[]);
        assert_eq!(self.step().await, "ConnectingWorkers");
    }

    /// The last condition of the move's step.
    fn awaits(&self) -> String {
        self.condition("Reconciling").2
    }

    /// Reports the relay of `front`, which runs its newest configuration, with these workers of `chat`.
    fn front_reports(&self, workers: &[&str]) {
        let relays = &self.world.shared.ctx.relays;
        let config_hash = relays.expected("llm", "front").map(|expected| expected.hash);
        let report = RelayReport { config_hash, ..RelayReport::default() };
        let worker = |name: &&str| {
            let relays = ["front-1".to_owned()].into();
            let report = WorkerReport { name: (*name).to_owned(), links: 1, relays, ..WorkerReport::default() };
            (format!("instance-{name}"), report)
        };
        let snapshot = RelaySnapshot {
            relays: [("front-1".to_owned(), Ok(report))].into(),
            workers: workers.iter().map(worker).collect(),
            ..RelaySnapshot::default()
        };
        relays.keep("llm", "front", RelaySnapshot { workers: Default::default(), ..snapshot.clone() });
        relays.keep("llm", "chat", snapshot);
    }

    fn selected(&self) -> String {
        let service = self.world.api.object("services/chat").unwrap();
        service["spec"]["selector"]["modelrelay.io/provider"].as_str().unwrap().to_owned()
    }

    fn replicas(&self) -> i64 {
        self.world.api.object("deployments/chat-relay").unwrap()["spec"]["replicas"].as_i64().unwrap()
    }

    fn is_at_own_relay(&self) -> bool {
        self.world.shared.caches.is_at_own_relay(&self.chat)
    }

    fn condition(&self, type_: &str) -> (String, String, String) {
        let status = self.world.api.object("providers/chat/status").unwrap();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.into_iter().find(|condition| condition["type"] == type_).unwrap();
        let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
        (text("status"), text("reason"), text("message"))
    }
}

#[tokio::test]
async fn move_switches_service_after_every_worker_connected() {
    let mut scene = Scene::new().await;
    assert_eq!(scene.step().await, "WaitingForRelay");
    assert!(scene.is_at_own_relay(), "workers stay until the other relay knows them");
    assert_eq!(scene.condition("Ready").2, "its own relay serves until the move to that of front");
    scene.owner_pass().await;
    assert_eq!(scene.step().await, "WaitingForRelay", "no relay has reported its entry");
    scene.front_reports(&[]);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert!(!scene.is_at_own_relay(), "workers dial the other relay");
    // The last report may still be that of its own relay, with the same worker.
    let own = RelayReport::default();
    let worker = WorkerReport { name: "vllm-1".to_owned(), links: 1, ..WorkerReport::default() };
    let snapshot = RelaySnapshot {
        relays: [("chat-1".to_owned(), Ok(own))].into(),
        workers: [("i".to_owned(), worker)].into(),
        ..RelaySnapshot::default()
    };
    scene.world.shared.ctx.relays.keep("llm", "chat", snapshot);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    scene.front_reports(&["another"]);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    let (_, reason, message) = scene.condition("Reconciling");
    assert!(reason == "MovingRelay" && message.contains("workers of vllm-1 connect"), "{reason}: {message}");
    assert_eq!((scene.selected().as_str(), scene.replicas()), ("chat", 1));
    scene.front_reports(&["vllm-1"]);
    scene.world.api.take_writes();
    assert_eq!(scene.step().await, "Draining");
    assert_eq!((scene.selected().as_str(), scene.replicas()), ("front", 0));
    let writes = scene.world.api.take_writes();
    assert_eq!(writes, ["PATCH services/chat", "PATCH deployments/chat-relay", "PATCH providers/chat/status"]);
}

#[tokio::test]
async fn own_relay_keeps_its_secrets_until_it_ended() {
    let mut scene = Scene::new().await;
    let secrets = |scene: &Scene| {
        ["relay", "worker"].map(|name| scene.world.api.object(&format!("secrets/chat-{name}")).unwrap()["data"].clone())
    };
    let before = secrets(&scene);
    scene.step().await;
    scene.owner_pass().await;
    let secret = scene.world.value("chat-worker", "worker-secret");
    assert!(secret.is_some() && scene.world.value("front-relay", "chat.worker-secret") == secret);
    scene.front_reports(&["vllm-1"]);
    // A rotation waits for the end of the move.
    scene.chat.metadata.annotations = Some([("modelrelay.io/rotate".to_owned(), "1".to_owned())].into());
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert_eq!(scene.step().await, "Draining");
    assert_eq!(scene.step().await, "Draining", "a Pod of its relay is left");
    assert_eq!(secrets(&scene), before);
    scene.world.pods.apply_watcher_event(&watcher::Event::Delete(relay_pod("chat")));
    assert_eq!(scene.step().await, "-");
    assert_eq!(scene.world.value("chat-relay", "relay.yaml"), None);
    assert!(scene.world.value("chat-relay", "worker-secret-previous").is_some(), "the rotation begins");
    assert_eq!(scene.selected(), "front", "clients keep their address");
}

#[tokio::test]
async fn impossible_move_leaves_own_relay_serving() {
    let requires_keys = named("front", 1, json!({"relay": {"requireApiKeys": true}}));
    let with_tls = named("front", 1, json!({"relay": {"tls": {"secretName": "t"}}}));
    let chained = named("front", 1, json!({"relayRef": {"name": "other"}}));
    let elsewhere = named("chat", 2, json!({"relayRef": {"name": "front", "namespace": "elsewhere"}}));
    let with_default = named("chat", 2, json!({"relayRef": {"name": "front"}, "defaultModel": "llama"}));
    let with_fallback = named("chat", 2, json!({"relayRef": {"name": "front"}, "fallbackModel": "llama"}));
    let cases = [
        (front(), with_default, "InvalidSpec", "spec.defaultModel does not apply"),
        (front(), with_fallback, "InvalidSpec", "spec.fallbackModel does not apply"),
        (requires_keys, chat(), "InvalidSpec", "requires API keys"),
        (with_tls, chat(), "InvalidSpec", "clients of Service chat use http, and Provider front has https"),
        (chained, chat(), "RelayChained", "has no relay of its own"),
        (front(), elsewhere, "RelayNotFound", "does not exist"),
    ];
    for (owner, chat, reason, message) in cases {
        let mut scene = Scene::of(&front(), chat).await;
        scene.world.providers.apply_watcher_event(&watcher::Event::Apply(owner.clone()));
        scene.front_reports(&["vllm-1"]);
        for _ in 0..3 {
            assert_eq!(scene.step().await, "-", "{message}");
            scene.owner_pass_of(&owner).await;
        }
        assert_eq!(scene.condition("Ready").0, "True", "{message}");
        let entry = scene.world.value("front-relay", "chat.worker-secret");
        assert_eq!(entry, None, "its catalogue must not take requests: {message}");
        let stalled = scene.condition("Stalled");
        assert!(stalled.1 == reason && stalled.2.contains(message), "{stalled:?}");
        assert!(scene.is_at_own_relay());
        assert_eq!((scene.selected().as_str(), scene.replicas()), ("chat", 1));
    }
}

#[tokio::test]
async fn provider_whose_clients_would_lose_stays() {
    let cases = [
        (json!({"requireApiKeys": true}), "relay requires API keys"),
        (json!({"service": {"workers": true}}), "has a port for workers"),
    ];
    for (relay, message) in cases {
        let before = named("chat", 1, json!({"relay": relay}));
        let mut scene = Scene::after(before, &front(), chat()).await;
        scene.front_reports(&["vllm-1"]);
        for _ in 0..3 {
            assert_eq!(scene.step().await, "-");
        }
        let stalled = scene.condition("Stalled");
        assert!(stalled.1 == "InvalidSpec" && stalled.2.contains(message), "{stalled:?}");
        assert_eq!((scene.selected().as_str(), scene.replicas()), ("chat", 1));
    }
}

#[tokio::test]
async fn port_for_workers_moves_to_owner_with_one() {
    let before = named("chat", 1, json!({"relay": {"service": {"workers": true}}}));
    let owner = named("front", 1, json!({"relay": {"service": {"workers": true}}}));
    let mut scene = Scene::after(before, &owner, chat()).await;
    assert_eq!(scene.step().await, "WaitingForRelay");
}

#[tokio::test]
async fn relay_that_others_refer_to_stays() {
    let mut scene = Scene::new().await;
    let other = named("other", 1, json!({"relayRef": {"name": "chat"}}));
    scene.world.providers.apply_watcher_event(&watcher::Event::Apply(other));
    assert_eq!(scene.step().await, "-");
    assert_eq!(scene.condition("Stalled").1, "InvalidSpec");
    let other = scene.world.shared.caches.providers.state().into_iter().find(|it| it.name_any() == "other").unwrap();
    assert!(scene.world.shared.caches.relay_of(&other).is_ok(), "the relay of chat goes on serving it");
}

#[tokio::test]
async fn provider_that_refers_later_does_not_stop_move() {
    let mut scene = Scene::new().await;
    assert_eq!(scene.step().await, "WaitingForRelay");
    let other = named("other", 1, json!({"relayRef": {"name": "chat"}}));
    scene.world.providers.apply_watcher_event(&watcher::Event::Apply(other.clone()));
    scene.owner_pass().await;
    scene.front_reports(&["vllm-1"]);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert!(scene.world.shared.caches.relay_of(&other).is_err());
}

#[tokio::test]
async fn move_waits_for_pool_that_starts() {
    let mut scene = Scene::new().await;
    scene.step().await;
    scene.owner_pass().await;
    scene.front_reports(&[]);
    scene.put_worker(false);
    assert_eq!(scene.step().await, "WaitingForRelay");
    assert!(scene.awaits().contains("a worker of WorkerPool llama is ready"), "{}", scene.awaits());
    scene.put_worker(true);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    scene.put_worker(false);
    scene.front_reports(&["vllm-1"]);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert!(scene.awaits().contains("a worker of WorkerPool llama is ready"), "{}", scene.awaits());
    scene.put_worker(true);
    assert_eq!(scene.step().await, "Draining");
}

#[tokio::test]
async fn refused_nudge_does_not_stop_move() {
    let mut scene = Scene::new().await;
    scene.connect().await;
    scene.world.api.refuse(|method, path| (method == "PATCH" && path.ends_with("/pods/vllm-1")).then_some(403));
    scene.world.api.take_writes();
    assert_eq!(scene.step().await, "ConnectingWorkers");
    for _ in 0..3 {
        // By the same operator, unlike a step.
        scene.world.pass(&scene.chat).await.unwrap();
    }
    let (_, reason, message) = scene.condition("Reconciling");
    assert!(reason == "MovingRelay" && message.contains("workers of vllm-1 connect"), "{reason}: {message}");
    let nudges = scene.world.api.take_writes().iter().filter(|write| write.as_str() == "PATCH pods/vllm-1").count();
    assert_eq!(nudges, 1, "the interval has not passed");
    scene.front_reports(&["vllm-1"]);
    assert_eq!(scene.step().await, "Draining");
}

#[tokio::test]
async fn unready_relays_get_workers_but_no_clients() {
    let mut scene = Scene::new().await;
    let mut unready = relay_pod("front");
    unready.status.as_mut().unwrap().conditions = None;
    scene.world.pods.apply_watcher_event(&watcher::Event::Apply(unready));
    scene.connect().await;
    scene.front_reports(&["vllm-1"]);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert_eq!(scene.awaits(), "waiting until a relay of Provider front is ready");
    scene.world.pods.apply_watcher_event(&watcher::Event::Apply(relay_pod("front")));
    assert_eq!(scene.step().await, "Draining");
}

#[tokio::test]
async fn link_to_leaving_relay_does_not_count() {
    let mut scene = Scene::new().await;
    scene.connect().await;
    scene.front_reports(&["vllm-1"]);
    let mut snapshot = RelaySnapshot::clone(&scene.world.shared.ctx.relays.of("llm", "chat").unwrap());
    snapshot.workers.values_mut().for_each(|worker| worker.relays = ["front-leaving".to_owned()].into());
    scene.world.shared.ctx.relays.keep("llm", "chat", snapshot);
    assert_eq!(scene.step().await, "ConnectingWorkers");
    assert!(scene.awaits().contains("vllm-1"), "{}", scene.awaits());
}

#[tokio::test]
async fn relay_scaled_up_after_move_ends_again() {
    let mut scene = Scene::new().await;
    scene.connect().await;
    scene.front_reports(&["vllm-1"]);
    let serving = scene.world.api.object("deployments/chat-relay").unwrap();
    assert_eq!(scene.step().await, "Draining");
    let path = "/apis/apps/v1/namespaces/llm/deployments/chat-relay";
    scene.world.api.put(path, serving);
    scene.watch();
    assert!(!scene.is_at_own_relay(), "workers stay at the other relay");
    assert_eq!(scene.step().await, "Draining");
    assert_eq!((scene.selected().as_str(), scene.replicas()), ("front", 0));
}

#[tokio::test]
async fn disabled_provider_says_that_its_relay_serves() {
    let disabled = named("chat", 2, json!({"relayRef": {"name": "front"}, "enabled": false}));
    let mut scene = Scene::of(&front(), disabled).await;
    scene.step().await;
    let (ready, _, message) = scene.condition("Ready");
    assert!(ready == "True" && message.contains("although spec.enabled is false"), "{message}");
}

#[tokio::test]
async fn removed_reference_ends_move_while_workers_connect() {
    let mut scene = Scene::new().await;
    scene.connect().await;
    scene.chat = named("chat", 3, json!({}));
    assert_eq!(scene.step().await, "-");
    assert_eq!((scene.selected().as_str(), scene.replicas()), ("chat", 1));
    scene.owner_pass().await;
    assert_eq!(scene.world.value("front-relay", "chat.worker-secret"), None);
}

#[tokio::test]
async fn removed_reference_ends_move_before_workers_connect() {
    let mut scene = Scene::new().await;
    assert_eq!(scene.step().await, "WaitingForRelay");
    scene.chat = named("chat", 3, json!({}));
    assert_eq!(scene.step().await, "-");
    assert_eq!((scene.selected().as_str(), scene.replicas()), ("chat", 1));
    assert!(scene.world.value("chat-relay", "relay.yaml").is_some());
}
