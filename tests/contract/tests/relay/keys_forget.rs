//! Revoked API keys are forgotten after `REVOKED_KEYS_KEPT_DAYS`.

use modelrelay_harness::{
    fake_kubernetes::{DATA_KEY, FakeKubernetes, Mount},
    relay::{Relay, RelayBuilder},
};
use serde_json::{Value, json};

use crate::keys_secret::{names, new_key, relay_in};

const FILE: &str = "modelrelay-keys.json";

/// Returns keys that were revoked long ago, in the future (by another clock), and at a time that was not stored.
fn stored() -> String {
    let revoked = |id: &str, at: Option<&str>| {
        let mut key = json!({
            "id": id, "name": id, "sha256": "00".repeat(32), "created_at": "2020-01-01T00:00:00Z", "revoked": true, "limits": {},
        });
        if let Some(at) = at {
            key["revoked_at"] = json!(at);
        }
        key
    };
    let keys = [
        revoked("old", Some("2020-01-01T00:00:00Z")),
        revoked("new", Some("2999-01-01T00:00:00Z")),
        revoked("timeless", None),
    ];
    json!({"version": 1, "keys": keys}).to_string()
}

fn with_keys() -> RelayBuilder {
    Relay::builder().file(FILE, stored())
}

fn ids(keys: &[Value]) -> Vec<&str> {
    let mut ids: Vec<&str> = keys.iter().map(|key| key["id"].as_str().expect("an id")).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn key_revoked_long_ago_is_forgotten() {
    let relay = with_keys().start().await;
    relay.eventually("a key is forgotten", || async { names(&relay).await == ["new", "timeless"] }).await;
    let text: Value = serde_json::from_str(&relay.read_file(FILE)).expect("JSON");
    let keys = text["keys"].as_array().expect("a list");
    assert_eq!(ids(keys), ["new", "timeless"]);
    assert!(keys.iter().all(|key| key["revoked_at"].is_string()), "the time begins at the first start: {text}");
}

#[tokio::test]
async fn zero_days_keep_revoked_keys() {
    let relay = with_keys().env("REVOKED_KEYS_KEPT_DAYS", "0").start().await;
    let relay = relay.restart().await;
    assert_eq!(names(&relay).await, ["new", "old", "timeless"]);
    assert_eq!(relay.read_file(FILE), stored(), "the relay wrote the file");
}

#[tokio::test]
async fn revocation_time_is_stored_and_listed() {
    let relay = Relay::start().await;
    let (id, _) = new_key(&relay, "k").await;
    let list = || async { relay.admin_json("/admin/keys").await["keys"][0].clone() };
    assert!(list().await["revoked_at"].is_null());
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    let revoked_at = list().await["revoked_at"].as_str().expect("a time").to_owned();
    assert!(relay.read_file(FILE).contains(&revoked_at), "{revoked_at}");
}

#[tokio::test]
async fn several_relays_forget_keys_of_secret_once() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.change(|data| {
        data.insert(DATA_KEY.to_owned(), stored().into_bytes());
    });
    let mount = Mount::new();
    mount.sync(&kubernetes);
    let first = relay_in(&kubernetes, &mount).start().await;
    first.eventually("a key is forgotten", || async { names(&first).await == ["new", "timeless"] }).await;
    let keys = kubernetes.keys();
    assert_eq!(ids(&keys), ["new", "timeless"]);
    assert!(keys.iter().all(|key| key["revoked_at"].is_string()));
    // Its mount is outdated.
    let second = relay_in(&kubernetes, &mount).start().await;
    second.eventually("the key is gone there", || async { names(&second).await == ["new", "timeless"] }).await;
    assert_eq!(kubernetes.writes(), 1);
}
