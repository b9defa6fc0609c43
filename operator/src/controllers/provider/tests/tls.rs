//! Passes that concern the Secret of `spec.relay.tls`.

use super::*;
use crate::relays::tls::tests::{HOST, json_of, pair};

const SECRET: &str = "/api/v1/namespaces/llm/secrets/relay-tls";

fn with_certificate() -> Provider {
    provider(json!({"relay": {"tls": {"secretName": "relay-tls"}}}))
}

fn message(world: &World, type_: &str) -> String {
    let status = world.api.object("providers/local/status").unwrap();
    let conditions = status["conditions"].as_array().unwrap().clone();
    let found = conditions.into_iter().find(|condition| condition["type"] == type_).unwrap();
    found["message"].as_str().unwrap().to_owned()
}

fn speaks_tls(world: &World) -> bool {
    world.api.object("deployments/local-relay").unwrap().to_string().contains("TLS_CERT_FILE")
}

#[tokio::test]
async fn relay_enables_tls_only_with_valid_secret() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    let hash = world.expected_hash();
    world.relay(&hash);
    world.api.take_writes();
    let (certificate, key) = pair(&[HOST]);
    let other_key = pair(&[HOST]).1;
    let cases = [
        (None, "SecretNotFound", "Secret relay-tls does not exist"),
        (Some(json_of(&[("tls.crt", &certificate)])), "SecretNotFound", "has no key tls.key"),
        (Some(json_of(&[("tls.crt", &certificate), ("tls.key", &other_key)])), "SecretInvalid", "does not belong"),
    ];
    for (secret, reason, wanted) in cases {
        if let Some(secret) = secret {
            world.api.put(SECRET, secret);
        }
        let next = world.changed(&with_certificate()).await.unwrap();
        assert_eq!(next, Action::requeue(IDLE_INTERVAL));
        for condition in ["Ready", "Reconciling"] {
            assert_eq!(world.condition(condition).1, reason);
        }
        let message = message(&world, "Ready");
        assert!(
            message.starts_with("spec.relay.tls.secretName: Secret relay-tls ") && message.contains(wanted),
            "{message}"
        );
        assert!(message.ends_with("Relays keep serving with the previous configuration"), "{message}");
        assert!(!speaks_tls(&world), "a relay was rolled out that cannot start");
    }
    world.api.put(SECRET, json_of(&[("tls.crt", &certificate), ("tls.key", &key)]));
    world.changed(&with_certificate()).await.unwrap();
    assert!(speaks_tls(&world));
    assert_eq!(world.condition("Ready"), ("True".into(), "Serving".into()));
}

#[tokio::test]
async fn renewed_certificate_reaches_relays_without_rollout() {
    let mut world = World::new();
    let (certificate, key) = pair(&[HOST]);
    world.api.put(SECRET, json_of(&[("tls.crt", &certificate), ("tls.key", &key)]));
    world.changed(&with_certificate()).await.unwrap();
    let hash = world.expected_hash();
    world.relay(&hash);
    world.pass(&with_certificate()).await.unwrap();
    let annotation = |world: &World| {
        world.api.object("pods/relay-1").unwrap()["metadata"]["annotations"]["modelrelay.io/tls-version"].clone()
    };
    assert_eq!(annotation(&world), "7");
    world.api.take_writes();
    let mut renewed = json_of(&[("tls.crt", &certificate), ("tls.key", &key)]);
    renewed["metadata"]["resourceVersion"] = json!("8");
    world.api.put(SECRET, renewed);
    world.changed(&with_certificate()).await.unwrap();
    assert_eq!((annotation(&world), world.api.take_writes()), (json!("8"), vec!["PATCH pods/relay-1".to_owned()]));
}
