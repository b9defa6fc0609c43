//! Workers of a Provider that another Provider's relay serves.

use super::*;
use crate::relays::tls::tests::{json_of, pair};

const SECRET: &str = "/api/v1/namespaces/front/secrets/relay-tls";

#[tokio::test]
async fn workers_dial_shared_relay_by_name_at_relay() {
    let mut scene = Scene::new(&json!({}));
    let referring = testing::provider("llm", "local", &json!({"relayRef": {"name": "all", "namespace": "front"}}));
    scene.providers.apply_watcher_event(&watcher::Event::Apply(referring));
    let tls = json!({"secretName": "relay-tls"});
    let yaml = |scene: &Scene| scene.server.lock().unwrap().objects[CONFIG_MAP]["data"].clone();
    let (certificate, key) = pair(&["all-workers.front.svc"]);
    let authority = pair(&["ca"]).0;
    let entries = [("tls.crt", certificate.as_str()), ("tls.key", &key), ("ca.crt", &authority)];
    scene.server.lock().unwrap().objects.insert(SECRET.to_owned(), json_of(&entries));
    // Without a grant, nothing is read from the other namespace.
    scene.providers.apply_watcher_event(&watcher::Event::Apply(testing::provider(
        "front",
        "all",
        &json!({"relay": {"tls": tls}}),
    )));
    scene.reconcile().await.unwrap();
    assert_eq!(yaml(&scene).get("ca.crt"), None);
    let text = yaml(&scene)["worker.yaml"].as_str().unwrap().to_owned();
    assert!(text.contains("relay: dns+https://"), "the secret must not be sent unencrypted: {text}");
    let shared = json!({"relay": {"tls": tls, "sharedWith": [{"namespace": "llm"}]}});
    scene.providers.apply_watcher_event(&watcher::Event::Apply(testing::provider("front", "all", &shared)));
    scene.reconcile().await.unwrap();
    let text = yaml(&scene)["worker.yaml"].as_str().unwrap().to_owned();
    assert!(text.contains("relay: dns+https://all-workers.front.svc:8081\n"), "{text}");
    assert!(text.contains("\nprovider: local.llm\n"), "{text}");
    assert_eq!(yaml(&scene)["ca.crt"], json!(authority));
    let template = scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["template"]["spec"].to_string();
    assert!(template.contains(r#""secretName":"local-worker""#), "the secret is that of its own Provider: {template}");
}

#[tokio::test]
async fn workers_of_moving_provider_stay_until_its_step() {
    let mut scene = Scene::new(&json!({}));
    let deployment = json!({
        "metadata": {
            "name": "local-relay", "namespace": "llm",
            "ownerReferences": [{"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "name": "local", "uid": "u"}],
        },
        "spec": {"replicas": 1, "selector": {}, "template": {}},
    });
    scene.deployments.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(deployment).unwrap()));
    scene.providers.apply_watcher_event(&watcher::Event::Apply(testing::provider("llm", "all", &json!({}))));
    let cases = [("WaitingForRelay", "local"), ("ConnectingWorkers", "all"), ("Draining", "all")];
    for (step, relay) in cases {
        let mut moving = testing::provider("llm", "local", &json!({"relayRef": {"name": "all"}}));
        moving.metadata.uid = Some("u".to_owned());
        moving.status = serde_json::from_value(json!({"moving": step})).unwrap();
        scene.providers.apply_watcher_event(&watcher::Event::Apply(moving));
        scene.reconcile().await.unwrap();
        let yaml = scene.server.lock().unwrap().objects[CONFIG_MAP]["data"]["worker.yaml"].as_str().unwrap().to_owned();
        assert!(yaml.contains(&format!("relay: dns+http://{relay}-workers.llm.svc:8081\n")), "{step}: {yaml}");
    }
}
