use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::*;
use crate::cluster::testing;

/// An API server that has nothing but one Lease, perhaps.
#[derive(Clone, Default)]
struct FakeApi {
    lease: Arc<Mutex<Option<Value>>>,
    requests: Arc<Mutex<Vec<String>>>,
    writes: Arc<AtomicUsize>,
    is_down: Arc<AtomicBool>,
}

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
        self.requests.lock().unwrap().push(method.to_owned());
        if self.is_down.load(Ordering::SeqCst) {
            return status(500, "InternalError");
        }
        let mut lease = self.lease.lock().unwrap();
        match (method, lease.as_mut()) {
            ("POST", Some(_)) => return status(409, "AlreadyExists"),
            (_, None) if method != "POST" => return status(404, "NotFound"),
            ("PUT", Some(there)) if there["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] => {
                return status(409, "Conflict");
            }
            ("POST" | "PUT", _) => {
                let version = self.writes.fetch_add(1, Ordering::SeqCst).to_string();
                let mut written = body;
                written["metadata"]["resourceVersion"] = json!(version);
                *lease = Some(written);
            }
            _ => {}
        }
        (200, lease.clone().unwrap())
    }

    fn remove(&self) {
        *self.lease.lock().unwrap() = None;
    }

    fn holder(&self) -> Option<String> {
        self.lease.lock().unwrap().as_ref()?.pointer("/spec/holderIdentity")?.as_str().map(str::to_owned)
    }

    async fn wait_for_holder(&self, holder: &str) {
        while self.holder().as_deref() != Some(holder) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
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
    let mut election = stand(&api.client(), candidacy("a"));
    election.leading.wait_for(|leads| *leads).await.unwrap();
    let lease = api.lease.lock().unwrap().clone().unwrap();
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "u1", "{lease}");
    assert!(lease["metadata"]["labels"].get("app.kubernetes.io/instance").is_none(), "{lease}");
    election.resign().await;
    assert_eq!(api.holder(), None);
}

#[tokio::test(start_paused = true)]
async fn leader_recreates_deleted_lease_and_stays_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let second = stand(&api.client(), candidacy("b"));
    // As Helm does when it upgrades a release that contained the lease. A new replica starts at the same time.
    api.remove();
    let third = stand(&api.client(), candidacy("c"));
    api.wait_for_holder("a").await;
    // Longer than any replica waits for the leader.
    tokio::time::sleep(LEASE_DURATION * 2).await;
    assert_eq!(api.holder().as_deref(), Some("a"));
    assert!(*first.leading.borrow() && !first.leading.has_changed().unwrap(), "it must have led all the time");
    assert!(!*second.leading.borrow() && !*third.leading.borrow());
}

#[tokio::test(start_paused = true)]
async fn standby_recreates_lease_of_vanished_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let mut second = stand(&api.client(), candidacy("b"));
    first.candidate.abort();
    drop(first);
    api.remove();
    second.leading.wait_for(|leads| *leads).await.unwrap();
    assert_eq!(api.holder().as_deref(), Some("b"));
}

#[tokio::test(start_paused = true)]
async fn leader_steps_down_before_unrenewed_lease_expires() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    api.is_down.store(true, Ordering::SeqCst);
    let began = Instant::now();
    first.leading.wait_for(|leads| !*leads).await.unwrap();
    assert!(began.elapsed() <= RENEW_DEADLINE, "{:?}", began.elapsed());
    api.is_down.store(false, Ordering::SeqCst);
    // No other replica wants it.
    first.leading.wait_for(|leads| *leads).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn lost_leader_is_replaced_after_its_lease() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let mut second = stand(&api.client(), candidacy("b"));
    tokio::time::sleep(LEASE_DURATION * 2).await;
    assert!(!*second.leading.borrow());
    first.candidate.abort();
    let began = Instant::now();
    second.leading.wait_for(|leads| *leads).await.unwrap();
    let took = began.elapsed();
    // Its last renewal was up to one interval before.
    assert!(took >= LEASE_DURATION - RENEW_INTERVAL && took <= LEASE_DURATION + RENEW_INTERVAL, "{took:?}");
    let lease = api.lease.lock().unwrap().clone().unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 2, "{lease}");
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_acquired_with_next_read() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let mut second = stand(&api.client(), candidacy("b"));
    tokio::time::sleep(LEASE_DURATION).await;
    let began = Instant::now();
    first.resign().await;
    second.leading.wait_for(|leads| *leads).await.unwrap();
    assert!(began.elapsed() <= RENEW_INTERVAL, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lease_that_another_writer_changed_is_released() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    // As after a renewal whose response was lost.
    api.lease.lock().unwrap().as_mut().unwrap()["metadata"]["resourceVersion"] = json!("renewed");
    first.resign().await;
    assert_eq!(api.holder(), None);
}

#[tokio::test(start_paused = true)]
async fn renewal_is_one_request() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    api.requests.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let sent = api.requests.lock().unwrap().clone();
    assert!((11..=12).contains(&sent.len()) && sent.iter().all(|method| method == "PUT"), "{sent:?}");
}

#[tokio::test(start_paused = true)]
async fn foreign_change_of_held_lease_keeps_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let _ = first.leading.borrow_and_update();
    api.lease.lock().unwrap().as_mut().unwrap()["metadata"]["resourceVersion"] = json!("annotated");
    tokio::time::sleep(LEASE_DURATION * 2).await;
    assert!(*first.leading.borrow() && !first.leading.has_changed().unwrap());
    assert_eq!(api.lease.lock().unwrap().as_ref().unwrap()["spec"]["leaseTransitions"], 1);
}

#[tokio::test(start_paused = true)]
async fn cleared_holder_makes_no_second_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let second = stand(&api.client(), candidacy("b"));
    let _ = first.leading.borrow_and_update();
    // The second replica reads the lease before the first one renews it.
    tokio::time::sleep(RENEW_INTERVAL + Duration::from_secs(1)).await;
    for _ in 0..3 {
        let mut lease = api.lease.lock().unwrap().clone().unwrap();
        lease["spec"]["holderIdentity"] = Value::Null;
        lease["metadata"]["resourceVersion"] = json!("cleared");
        *api.lease.lock().unwrap() = Some(lease);
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert!(*first.leading.borrow() && !*second.leading.borrow());
    }
    assert!(!first.leading.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn shortened_lease_makes_no_second_leader() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let second = stand(&api.client(), candidacy("b"));
    api.lease.lock().unwrap().as_mut().unwrap()["spec"]["leaseDurationSeconds"] = json!(1);
    tokio::time::sleep(RENEW_INTERVAL * 2).await;
    assert!(*first.leading.borrow() && !*second.leading.borrow());
}

#[tokio::test(start_paused = true)]
async fn new_replica_outwaits_leader_of_deleted_lease() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    // Only the leader is cut off.
    api.is_down.store(true, Ordering::SeqCst);
    api.remove();
    let other = FakeApi { is_down: Arc::default(), ..api.clone() };
    let mut second = stand(&other.client(), candidacy("b"));
    second.leading.wait_for(|leads| *leads).await.unwrap();
    assert!(!*first.leading.borrow(), "both lead");
}

#[tokio::test(start_paused = true)]
async fn deleted_lease_is_outwaited_like_expired_one() {
    let api = FakeApi::default();
    let mut first = stand(&api.client(), candidacy("a"));
    first.leading.wait_for(|leads| *leads).await.unwrap();
    let other = FakeApi { is_down: Arc::default(), ..api.clone() };
    let mut second = stand(&other.client(), candidacy("b"));
    tokio::time::sleep(RENEW_INTERVAL * 2).await;
    api.is_down.store(true, Ordering::SeqCst);
    api.remove();
    first.leading.wait_for(|leads| !*leads).await.unwrap();
    let stopped = Instant::now();
    second.leading.wait_for(|leads| *leads).await.unwrap();
    assert!(stopped.elapsed() >= LEASE_DURATION - RENEW_DEADLINE - Duration::from_secs(1), "{:?}", stopped.elapsed());
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
