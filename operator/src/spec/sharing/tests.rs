use std::sync::Arc;

use serde_json::{Value, json};

use super::*;

fn provider(namespace: &str, name: &str, spec: &Value) -> Arc<Provider> {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    });
    Arc::new(serde_json::from_value(value).unwrap())
}

fn referring(namespace: &str, name: &str) -> Arc<Provider> {
    provider(namespace, name, &json!({"relayRef": {"name": "front", "namespace": "llm"}}))
}

fn front(shared_with: &Value) -> Arc<Provider> {
    provider("llm", "front", &json!({"relay": {"sharedWith": shared_with}}))
}

#[test]
fn names_of_two_namespaces_stay_distinct() {
    assert_eq!(name_at_relay(&referring("llm", "chat")), "chat");
    assert_eq!(name_at_relay(&referring("research", "chat")), "chat.research");
    assert_eq!(name_at_relay(&front(&json!([]))), "front");
    let same = provider("llm", "chat", &json!({"relayRef": {"name": "front"}}));
    assert_eq!((relay_key(&same), name_at_relay(&same)), (("llm".to_owned(), "front".to_owned()), "chat".to_owned()));
}

#[test]
fn other_namespaces_need_grant() {
    let cases = [
        (json!([]), "llm", "chat", true),
        (json!([]), "research", "chat", false),
        (json!([{"namespace": "research"}]), "research", "chat", true),
        (json!([{"namespace": "research"}]), "other", "chat", false),
        (json!([{"namespace": "research", "provider": "chat"}]), "research", "chat", true),
        (json!([{"namespace": "research", "provider": "code"}]), "research", "chat", false),
    ];
    for (grants, namespace, name, granted) in cases {
        let checked = check(&referring(namespace, name), Some(&front(&grants)));
        assert_eq!(checked.is_ok(), granted, "{grants} {namespace}/{name}");
        assert!(granted || matches!(checked, Err(SharingError::NotGranted(..))));
    }
}

#[test]
fn unusable_reference_names_its_reason() {
    let chat = referring("llm", "chat");
    let check = |owner: Option<&Provider>| check(&chat, owner).unwrap_err().to_string();
    assert!(check(None).contains("front does not exist in namespace llm"));
    assert!(
        check(Some(&provider("llm", "front", &json!({"relayRef": {"name": "x"}})))).contains("no relay of its own")
    );
    let mut leaving = Provider::clone(&front(&json!([])));
    leaving.metadata.deletion_timestamp = serde_json::from_value(json!("2026-11-01T00:00:00Z")).unwrap();
    assert!(check(Some(&leaving)).contains("is being deleted"));
    let itself = provider("llm", "self", &json!({"relayRef": {"name": "self"}}));
    assert!(matches!(super::check(&itself, Some(&itself)), Err(SharingError::Chained(..))));
}

#[test]
fn sharers_are_granted_and_ordered_by_namespace() {
    let owner = front(&json!([{"namespace": "a"}]));
    let own = provider("llm", "own", &json!({}));
    let all =
        [referring("a", "z"), referring("b", "x"), referring("llm", "chat"), own, owner.clone(), referring("a", "c")];
    let keys: Vec<ObjectKey> = sharers(&owner, &all).iter().map(|provider| key(provider)).collect();
    let expected = [("llm", "chat"), ("a", "c"), ("a", "z")];
    assert_eq!(keys, expected.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())));
}

#[test]
fn oldest_sharers_are_served_beyond_limit() {
    let made = |number: usize| {
        let mut provider = Provider::clone(&referring("llm", &format!("p{:02}", 99 - number)));
        let at = format!("2026-11-01T00:00:{number:02}Z");
        provider.metadata.creation_timestamp = serde_json::from_value(json!(at)).unwrap();
        Arc::new(provider)
    };
    let all: Vec<Arc<Provider>> = (0..=MAX_SHARERS).map(made).collect();
    let served = sharers(&front(&json!([])), &all);
    assert_eq!(served.len(), MAX_SHARERS);
    assert!(!served.iter().any(|provider| key(provider) == key(&all[MAX_SHARERS])), "the youngest is left out");
}

fn with_status(provider: &Provider, status: &Value) -> Arc<Provider> {
    let status = serde_json::from_value(status.clone()).unwrap();
    Arc::new(Provider { status: Some(status), ..provider.clone() })
}

#[test]
fn moving_provider_does_not_displace_served_one() {
    let made = |name: String, second: usize, status: Value| {
        let mut provider = Provider::clone(&referring("llm", &name));
        let at = format!("2026-11-01T00:00:{second:02}Z");
        provider.metadata.creation_timestamp = serde_json::from_value(json!(at)).unwrap();
        with_status(&provider, &status)
    };
    let guest = |number: usize| made(format!("p{number:02}"), number + 10, json!({"relay": "front"}));
    let mut all: Vec<Arc<Provider>> = (0..MAX_SHARERS).map(guest).collect();
    let is_served = |all: &[Arc<Provider>], name: &str| {
        sharers(&front(&json!([])), all).iter().any(|provider| provider.name_any() == name)
    };
    for status in [json!({"relay": "old"}), json!({"relay": "old", "moving": "WaitingForRelay"})] {
        all.truncate(MAX_SHARERS);
        all.push(made("old".to_owned(), 0, status));
        assert!(is_served(&all, "p31") && !is_served(&all, "old"));
    }
    // Its workers have a place already.
    all.truncate(MAX_SHARERS - 1);
    all.push(made("old".to_owned(), 0, json!({"relay": "old", "moving": "ConnectingWorkers"})));
    all.push(made("new".to_owned(), 59, json!({})));
    assert!(is_served(&all, "old") && !is_served(&all, "new"));
}

#[test]
fn provider_whose_move_is_refused_serves_its_own() {
    let moving = referring("llm", "chat");
    let other = provider("llm", "other", &json!({"relayRef": {"name": "chat"}}));
    let checked = |status: Value| check(&other, Some(&with_status(&moving, &status)));
    assert_eq!(checked(json!({"relay": "chat"})), Ok(()));
    let chained = [json!({"relay": "chat", "moving": "WaitingForRelay"}), json!({"relay": "front"}), json!({})];
    for status in chained {
        assert!(matches!(checked(status.clone()), Err(SharingError::Chained(..))), "{status}");
    }
    let itself =
        with_status(&provider("llm", "self", &json!({"relayRef": {"name": "self"}})), &json!({"relay": "self"}));
    assert!(matches!(check(&itself, Some(&itself)), Err(SharingError::Chained(..))));
}

#[test]
fn provider_leaves_own_relay_when_workers_connect() {
    let deployment = |uid: &str, replicas: i32| -> Deployment {
        let owners = json!([{"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "name": "chat", "uid": uid}]);
        let spec = json!({"replicas": replicas, "selector": {}, "template": {}});
        serde_json::from_value(json!({"metadata": {"name": "chat-relay", "ownerReferences": owners}, "spec": spec}))
            .unwrap()
    };
    let at_step = |step: Option<MovingStep>| {
        let mut provider = Provider::clone(&referring("llm", "chat"));
        provider.metadata.uid = Some("mine".to_owned());
        provider.status = Some(ProviderStatus { moving: step, ..Default::default() });
        provider
    };
    let mine = deployment("mine", 1);
    let stays = |step| is_at_own_relay(&at_step(step), Some(&mine));
    assert!(stays(None) && stays(Some(MovingStep::WaitingForRelay)));
    assert!(!stays(Some(MovingStep::ConnectingWorkers)) && !stays(Some(MovingStep::Draining)));
    for gone in [None, Some(deployment("mine", 0)), Some(deployment("predecessor", 1))] {
        assert!(!is_at_own_relay(&at_step(None), gone.as_ref()));
    }
}
