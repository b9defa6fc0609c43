//! API keys in a Kubernetes Secret that several relays share: `API_KEYS_SECRET`.

use modelrelay_harness::{
    client::Request,
    fake_kubernetes::{DATA_KEY, Data, FakeKubernetes, Mount},
    relay::{Relay, RelayBuilder},
};
use serde_json::{Value, json};

/// A relay in a Pod that has the Secret mounted here.
pub(crate) fn relay_in(kubernetes: &FakeKubernetes, mount: &Mount) -> RelayBuilder {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true");
    kubernetes.variables(mount).into_iter().fold(relay, |relay, (name, value)| relay.env(name, &value))
}

pub(crate) async fn new_key(relay: &Relay, name: &str) -> (String, String) {
    let key = relay.admin_post("/admin/keys", &json!({ "name": name })).await.with_status(201).json();
    let text = |name: &str| key[name].as_str().unwrap_or_else(|| panic!("no {name} in {key}")).to_owned();
    (text("id"), text("secret"))
}

/// Two relays with one Secret, and a key that the first one created and both know.
pub(crate) struct TwoRelays {
    pub(crate) kubernetes: FakeKubernetes,
    pub(crate) here: Mount,
    pub(crate) there: Mount,
    pub(crate) one: Relay,
    pub(crate) other: Relay,
    pub(crate) id: String,
    pub(crate) key: String,
}

impl TwoRelays {
    pub(crate) async fn start() -> Self {
        let kubernetes = FakeKubernetes::start().await;
        let (here, there) = (Mount::new(), Mount::new());
        let one = relay_in(&kubernetes, &here).start().await;
        let (id, key) = new_key(&one, "k").await;
        there.sync(&kubernetes);
        let other = relay_in(&kubernetes, &there).start().await;
        Self { kubernetes, here, there, one, other, id, key }
    }
}

pub(crate) async fn admits(relay: &Relay, key: &str) -> bool {
    relay.fetch(Request::get("/v1/models").bearer(key)).await.status == 200
}

pub(crate) async fn names(relay: &Relay) -> Vec<String> {
    let answer = relay.admin_json("/admin/keys").await;
    let keys = answer["keys"].as_array().expect("a list");
    let mut names: Vec<String> = keys.iter().map(|key| key["name"].as_str().expect("a name").to_owned()).collect();
    names.sort();
    names
}

fn stored<'a>(keys: &'a [Value], id: &str) -> &'a Value {
    keys.iter().find(|key| key["id"] == id).unwrap_or_else(|| panic!("no key {id} among {keys:?}"))
}

#[tokio::test]
async fn new_key_applies_elsewhere_after_mount_update() {
    let kubernetes = FakeKubernetes::start().await;
    let (here, there) = (Mount::new(), Mount::new());
    let (one, other) = tokio::join!(relay_in(&kubernetes, &here).start(), relay_in(&kubernetes, &there).start());
    let (_, key) = new_key(&one, "k").await;
    assert!(admits(&one, &key).await && !admits(&other, &key).await);
    there.sync(&kubernetes);
    other.eventually("the other relay lets the key in", || admits(&other, &key)).await;
    let data = kubernetes.data().expect("a Secret");
    let text = String::from_utf8_lossy(&data[DATA_KEY]);
    let hidden = key.rsplit('-').next().expect("a secret part");
    assert!(!text.contains(hidden), "the Secret holds the key itself: {text}");
}

#[tokio::test]
async fn revocation_applies_elsewhere_after_mount_update() {
    let TwoRelays { kubernetes, here, there: _there, one, other, id, key } = TwoRelays::start().await;
    assert!(admits(&other, &key).await);
    // The other relay revokes a key that the first one created.
    assert_eq!(other.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    assert!(!admits(&other, &key).await && admits(&one, &key).await);
    here.sync(&kubernetes);
    one.eventually("the revocation arrives", || async { !admits(&one, &key).await }).await;
    assert_eq!(one.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
}

#[tokio::test]
async fn concurrent_writes_of_relays_lose_no_key() {
    let kubernetes = FakeKubernetes::start().await;
    let (here, there) = (Mount::new(), Mount::new());
    let (one, other) = tokio::join!(relay_in(&kubernetes, &here).start(), relay_in(&kubernetes, &there).start());
    let mut requests = Vec::new();
    for round in 0..6 {
        for (relay, which) in [(&one, "one"), (&other, "other")] {
            let body = json!({ "name": format!("{which}-{round}") });
            let request = Request::post("/admin/keys", &body).bearer(modelrelay_harness::relay::ADMIN_TOKEN);
            requests.push(relay.begin(request));
        }
    }
    for answer in requests {
        let _ = answer.reply().await.with_status(201);
    }
    assert_eq!(kubernetes.keys().len(), 12);
    for (relay, mount) in [(&one, &here), (&other, &there)] {
        mount.sync(&kubernetes);
        relay.eventually("all keys are accepted", || async { names(relay).await.len() == 12 }).await;
    }
}

#[tokio::test]
async fn other_data_in_secret_is_kept() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.change(|data| {
        data.insert("theirs".to_owned(), b"as it is".to_vec());
    });
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    new_key(&relay, "k").await;
    assert_eq!(kubernetes.data().expect("a Secret").get("theirs").map(Vec::as_slice), Some(&b"as it is"[..]));
}

#[tokio::test]
async fn keys_survive_restart_through_mount_alone() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (_, kept) = new_key(&relay, "kept").await;
    let (id, revoked) = new_key(&relay, "revoked").await;
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    mount.sync(&kubernetes);
    let relay = relay.restart().await;
    let reads = kubernetes.reads();
    assert!(admits(&relay, &kept).await && !admits(&relay, &revoked).await);
    assert_eq!(kubernetes.reads(), reads, "the API server received a request");
}

#[tokio::test]
async fn key_checks_never_call_api_server() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    for _ in 0..20 {
        assert!(!admits(&relay, "mr-abcdefghijkm-unknown").await);
    }
    assert_eq!((kubernetes.reads(), kubernetes.writes(), kubernetes.refusals()), (0, 0, 0));
}

#[tokio::test]
async fn outdated_mount_removes_no_fresh_key() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (_, first) = new_key(&relay, "first").await;
    let behind = kubernetes.data().expect("a Secret");
    let (_, second) = new_key(&relay, "second").await;
    let reads = kubernetes.reads();
    mount.show(&behind);
    relay.eventually("the relay lists the keys", || async { kubernetes.reads() > reads }).await;
    assert!(admits(&relay, &first).await && admits(&relay, &second).await);
    assert_eq!(names(&relay).await, ["first", "second"]);
}

#[tokio::test]
async fn key_removed_from_secret_is_rejected() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (_, stays) = new_key(&relay, "stays").await;
    let with_one = kubernetes.data().expect("a Secret");
    let (_, goes) = new_key(&relay, "goes").await;
    mount.sync(&kubernetes);
    kubernetes.change(|data| *data = with_one);
    mount.sync(&kubernetes);
    relay.eventually("the key is gone", || async { !admits(&relay, &goes).await }).await;
    assert!(admits(&relay, &stays).await);
    assert_eq!(names(&relay).await, ["stays"]);
}

#[tokio::test]
async fn broken_keys_are_reported_keeping_previous_keys() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (_, key) = new_key(&relay, "k").await;
    mount.sync(&kubernetes);
    let good = kubernetes.data().expect("a Secret");
    for broken in [Data::from([(DATA_KEY.to_owned(), b"{\"version\": 9}".to_vec())]), Data::new()] {
        mount.show(&broken);
        let broken = || async { relay.metric("modelrelay_api_keys_last_reload_successful").await == 0.0 };
        relay.eventually("the metric shows broken keys", broken).await;
        let detail = relay.get("/readyz").await.json();
        let error = detail["api_keys"]["error"].as_str().unwrap_or_else(|| panic!("no error in {detail}"));
        assert!(error.contains(DATA_KEY), "{error}");
        assert!(admits(&relay, &key).await);
        mount.show(&good);
        let whole = || async { relay.metric("modelrelay_api_keys_last_reload_successful").await == 1.0 };
        relay.eventually("the metric shows whole keys", whole).await;
        assert_eq!(relay.get("/readyz").await.json()["api_keys"]["error"], Value::Null);
    }
}

#[tokio::test]
async fn keys_of_deleted_secret_return_with_next_change() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (_, key) = new_key(&relay, "before").await;
    mount.sync(&kubernetes);
    let relay = relay.restart().await;
    kubernetes.delete();
    mount.sync(&kubernetes);
    relay.log().wait_for_line("keeping previous keys").await;
    kubernetes.recreate();
    new_key(&relay, "after").await;
    assert_eq!(kubernetes.keys().len(), 2);
    assert!(admits(&relay, &key).await);
}

#[tokio::test]
async fn late_time_of_use_does_not_undo_revocation() {
    let TwoRelays { kubernetes, here: _here, there: _there, one, mut other, id, key } = TwoRelays::start().await;
    assert!(admits(&other, &key).await);
    assert_eq!(one.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    // The other relay has not learned of it, and writes its own state when it ends.
    other.process().terminate().await;
    assert!(other.process().wait_exit().await.success());
    let keys = kubernetes.keys();
    let record = stored(&keys, &id);
    assert_eq!(record["revoked"], true, "{record}");
    assert!(record["last_used_at"].is_string(), "{record}");
}

#[tokio::test]
async fn last_use_is_written_once_by_several_relays() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let first = relay_in(&kubernetes, &mount).start().await;
    let (id, key) = new_key(&first, "k").await;
    mount.sync(&kubernetes);
    let (second, third) = tokio::join!(relay_in(&kubernetes, &mount).start(), relay_in(&kubernetes, &mount).start());
    assert_eq!(kubernetes.writes(), 1);
    for relay in [&first, &second, &third] {
        assert!(admits(relay, &key).await);
    }
    for mut relay in [first, second, third] {
        relay.process().terminate().await;
        assert!(relay.process().wait_exit().await.success());
        // The mount is outdated: the next relay's write depends on the Secret's content.
        let written = kubernetes.keys();
        assert!(stored(&written, &id)["last_used_at"].is_string());
        assert_eq!(kubernetes.writes(), 2);
    }
}

#[tokio::test]
async fn relay_without_key_use_writes_nothing() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let mut relay = relay_in(&kubernetes, &mount).start().await;
    new_key(&relay, "k").await;
    let (reads, writes) = (kubernetes.reads(), kubernetes.writes());
    relay.process().terminate().await;
    assert!(relay.process().wait_exit().await.success());
    assert_eq!((kubernetes.reads(), kubernetes.writes()), (reads, writes));
}
