use serde_json::json;

use super::*;
use crate::crd::Provider;
use crate::manifests::config::relay_config;
use crate::spec::provider::validate;
use crate::spec::rotation::{Plan, Previous};

fn valid(name: &str, spec: &serde_json::Value) -> ValidatedProvider {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": name, "namespace": "llm", "uid": "u-1"}, "spec": spec,
    });
    let provider: Provider = serde_json::from_value(value).unwrap();
    validate(&provider, &[]).unwrap()
}

fn secrets(current: &str) -> RelaySide {
    let until = "2026-12-01T00:00:00Z".parse().ok();
    let previous = vec![Previous { value: Secret::new(format!("{current}-old")), until }];
    RelaySide { current: Secret::new(current), previous, acted_on: None }
}

fn plan() -> Plan {
    Plan {
        current: Secret::new("own"),
        previous: Vec::new(),
        worker: Secret::new("own"),
        worker_changed_at: "2026-11-01T00:00:00Z".parse().unwrap(),
        acted_on: None,
        events: Vec::new(),
        wake_at: None,
    }
}

#[test]
fn written_configuration_is_read_back_unchanged() {
    let settings = json!({
        "models": [{"id": "m", "aliases": ["n"]}], "queue": {"maxBytes": 5_000_000, "timeout": "10s"},
        "fairness": {"mode": "fifo"}, "workerServiceAccounts": ["gpu"],
    });
    let chat = SharedEntry::of(&valid("chat", &settings), "chat", &secrets("a"));
    let far = SharedEntry::of(&valid("chat", &json!({})), "chat.research", &secrets("b"));
    let salt = Secret::new("0123456789012345678901234567890123456789012");
    let config = relay_config(&valid("front", &json!({})), &plan(), &salt, &[chat.clone(), far.clone()]);
    let decode = |value: &serde_json::Value| {
        let bytes: k8s_openapi::ByteString = serde_json::from_value(value.clone()).unwrap();
        String::from_utf8(bytes.0).unwrap()
    };
    let data = config.manifest.value["data"].as_object().unwrap();
    let data: BTreeMap<String, String> = data.iter().map(|(key, value)| (key.clone(), decode(value))).collect();
    let applied = AppliedConfig::read(&data).unwrap();
    assert_eq!((applied.hash.as_str(), applied.salt.as_ref()), (config.hash.as_str(), Some(&salt)));
    assert_eq!(applied.entry("chat"), Some(&chat));
    assert_eq!(applied.entry("chat.research"), Some(&far));
    assert!(applied.has_secrets("chat", &secrets("a")) && !applied.has_secrets("chat", &secrets("b")));
    assert_eq!(applied.entries.len(), 3);
    let keys: Vec<&str> = data.keys().map(String::as_str).collect();
    let expected = [
        "chat.research.worker-secret",
        "chat.research.worker-secret-previous",
        "chat.worker-secret",
        "chat.worker-secret-previous",
        "relay.yaml",
        "worker-secret",
    ];
    assert_eq!(keys, expected);
}

#[test]
fn size_of_entry_is_what_it_adds_to_secret() {
    let models: Vec<_> =
        (0..99).map(|number| json!({"id": format!("model {number}: x"), "aliases": ["a\u{e4}"]})).collect();
    let models = models.into_iter().enumerate().map(|(number, mut model)| {
        model["aliases"] = json!([format!("a{number}"), format!("# {number}")]);
        model
    });
    let settings =
        json!({"models": models.collect::<Vec<_>>(), "workerServiceAccounts": ["gpu"], "queue": {"timeout": "10s"}});
    let entry = SharedEntry::of(&valid("chat", &settings), "chat.research", &secrets("a"));
    let size = |sharers: &[SharedEntry]| -> usize {
        let config = relay_config(&valid("front", &json!({})), &plan(), &Secret::new("salt"), sharers);
        let data = config.manifest.value["data"].as_object().unwrap().clone();
        let value =
            |value: serde_json::Value| serde_json::from_value::<k8s_openapi::ByteString>(value).unwrap().0.len();
        data.into_iter().map(|(key, bytes)| if key == "relay.yaml" { 0 } else { key.len() } + value(bytes)).sum()
    };
    let added = size(std::slice::from_ref(&entry)) - size(&[]);
    assert_eq!(added, entry.bytes());
}

#[test]
fn sharer_receives_no_request_without_its_models() {
    let settings = json!({"models": [{"id": "m"}], "defaultModel": "m", "fallbackModel": "m"});
    let entry = SharedEntry::of(&valid("chat", &settings), "chat", &secrets("a"));
    assert_eq!((entry.yaml.get("defaultModel"), entry.yaml.get("fallbackModel")), (None, None));
    assert!(entry.yaml.get("models").is_some());
}

#[test]
fn entries_of_all_sharers_fit_into_secret() {
    const SECRET_BYTES: usize = 1 << 20;
    const { assert!(MAX_ENTRY_BYTES * crate::spec::sharing::MAX_SHARERS <= SECRET_BYTES * 3 / 4) };
    let models: Vec<_> = (0..256).map(|number| json!({"id": format!("{number}{}", "x".repeat(250))})).collect();
    let large = SharedEntry::of(&valid("chat", &json!({"models": models})), "chat", &secrets("a"));
    assert!(large.bytes() > MAX_ENTRY_BYTES);
}
