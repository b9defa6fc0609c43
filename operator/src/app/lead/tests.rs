use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::*;
use crate::cluster::testing;

/// An API server that has nothing but one Lease, perhaps.
#[derive(Clone, Default)]
struct FakeApi(Arc<Mutex<Option<Value>>>);

impl FakeApi {
    fn client(&self) -> Client {
        let api = self.clone();
        testing::client("mr-system", move |method, path, body| api.answer(method, path, body))
    }

    fn answer(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let status = |code: u16, reason: &str| {
            (
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason}),
            )
        };
        if path.contains("mutatingwebhookconfigurations") {
            return (
                200,
                json!({
                    "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
                    "metadata": {"name": "hooks", "uid": "u1"},
                }),
            );
        }
        let mut lease = self.0.lock().unwrap();
        match (method, lease.as_mut()) {
            ("POST", Some(_)) => return status(409, "AlreadyExists"),
            ("POST", None) => *lease = Some(body),
            (_, None) => return status(404, "NotFound"),
            ("PATCH", Some(lease)) => merge(lease, body),
            (_, Some(_)) => {}
        }
        (200, lease.clone().unwrap())
    }

    fn holder(&self) -> Option<String> {
        self.0.lock().unwrap().as_ref()?.pointer("/spec/holderIdentity")?.as_str().map(str::to_owned)
    }

    async fn wait_for_holder(&self, holder: &str) {
        while self.holder().as_deref() != Some(holder) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn merge(into: &mut Value, patch: Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                if value.is_null() {
                    into.remove(&key);
                } else {
                    merge(into.entry(key).or_insert(json!({})), value);
                }
            }
        }
        (into, patch) => *into = patch,
    }
}

fn candidacy(instance: &str) -> Candidacy {
    Candidacy {
        namespace: "mr-system".into(),
        lease: "operator".into(),
        instance: instance.into(),
        owner: "hooks".into(),
    }
}

#[tokio::test(start_paused = true)]
async fn lease_is_created_with_its_owner() {
    let api = FakeApi::default();
    let mut election = stand(&api.client(), candidacy("a")).await;
    election.leading.wait_for(|leads| *leads).await.unwrap();
    let lease = api.0.lock().unwrap().clone().unwrap();
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "u1", "{lease}");
    assert!(lease["metadata"]["labels"].get("app.kubernetes.io/instance").is_none(), "{lease}");
    election.resign().await;
    assert_eq!(api.holder(), None);
}

#[tokio::test(start_paused = true)]
async fn leader_recreates_deleted_lease_and_stays_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a")).await;
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let second = stand(&api.client(), candidacy("b")).await;
    // As Helm does when it upgrades a release that contained the lease. A new replica starts at the same time.
    *api.0.lock().unwrap() = None;
    let third = stand(&api.client(), candidacy("c")).await;
    api.wait_for_holder("a").await;
    // Longer than any replica waits for the leader.
    tokio::time::sleep(TRUST * 2).await;
    assert_eq!(api.holder().as_deref(), Some("a"));
    assert!(*first.leading.borrow() && !first.leading.has_changed().unwrap(), "it must have led all the time");
    assert!(!*second.leading.borrow() && !*third.leading.borrow());
}

#[tokio::test(start_paused = true)]
async fn standby_recreates_lease_of_vanished_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a")).await;
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let mut second = stand(&api.client(), candidacy("b")).await;
    first.guard.abort();
    drop(first);
    *api.0.lock().unwrap() = None;
    second.leading.wait_for(|leads| *leads).await.unwrap();
    assert_eq!(api.holder().as_deref(), Some("b"));
}

#[test]
fn leader_steps_down_before_unrenewed_lease_expires() {
    let (start, mut trust) = (Instant::now(), Trust::default());
    assert!(!trust.leads(Holder::Unknown, start));
    assert!(trust.leads(Holder::Me, start));
    assert!(trust.leads(Holder::Unknown, start + TRUST / 2));
    assert!(!trust.leads(Holder::Unknown, start + TRUST));
    assert!(trust.leads(Holder::Me, start + TRUST));
    assert!(!trust.leads(Holder::Other, start + TRUST));
    assert!(!trust.leads(Holder::Unknown, start + TRUST), "another holder was seen last");
    assert!(trust.leads(Holder::Me, start + TRUST));
    assert!(trust.leads(Holder::Gone, start + TRUST), "other replicas wait until the leader has recreated it");
    assert!(trust.leads(Holder::Vacant, start + TRUST));
    assert!(!trust.leads(Holder::Gone, start + TRUST * 2));
}

#[tokio::test]
async fn work_starts_with_lease_and_stops_without_it() {
    struct Running(Arc<AtomicUsize>);
    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let running = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = watch::channel(false);
    let counter = running.clone();
    let task = tokio::spawn(while_leading(receiver, move || {
        let counter = counter.clone();
        async move {
            counter.fetch_add(1, Ordering::SeqCst);
            let _running = Running(counter);
            std::future::pending::<()>().await;
        }
    }));
    let until = async |count: usize| {
        while running.load(Ordering::SeqCst) != count {
            tokio::task::yield_now().await;
        }
    };
    sender.send_replace(true);
    until(1).await;
    sender.send_replace(false);
    until(0).await;
    sender.send_replace(true);
    until(1).await;
    drop(sender);
    task.await.unwrap();
    assert_eq!(running.load(Ordering::SeqCst), 0);
}
