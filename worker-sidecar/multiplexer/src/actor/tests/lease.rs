//! Every lease is released once, however its holder ends.

use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use modelrelay_protocol::message::{Demand, RequestClass};
use modelrelay_protocol::secret::Secret;
use tokio::time::Instant;

use super::harness::{EVICT, KEY, LOAD, Stage, pass, secs};
use crate::actor::{PendingLease, now};
use crate::effect::LeaseEnd;
use crate::error::SlotError;
use crate::event::RequestKey;

#[tokio::test(start_paused = true)]
async fn lease_names_its_backend_and_load() {
    let stage = Stage::new(&["a", "b"]).await;
    let lease = stage.send_request("a").await.unwrap();
    assert_eq!((lease.url().as_str(), lease.generation(), &**lease.model()), ("http://127.0.0.1:1/a", 1, "a"));
    assert_eq!(lease.key(), Some(&Secret::new(KEY)));
    assert_eq!(stage.driver().log(), ["load a"]);
}

#[tokio::test(start_paused = true)]
async fn lease_is_released_when_holder_panics() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let lease = stage.send_request("a").await.unwrap();
    assert_eq!(stage.counts().await, (1, 0));
    let holder = tokio::spawn(async move {
        let _lease = lease;
        pass(1.0).await;
        panic!("as the test wants it");
    });
    assert!(holder.await.unwrap_err().is_panic());
    assert_eq!(stage.counts().await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_not_released_again() {
    let stage = Stage::serving("a", &["a"]).await;
    let (first, second) = (stage.send_request("a").await.unwrap(), stage.send_request("a").await.unwrap());
    first.release(true).await;
    assert_eq!(stage.counts().await, (1, 0));
    drop(second);
    assert_eq!(stage.counts().await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn swap_waits_for_last_byte_of_stream() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let stream = stage.send_request("a").await.unwrap();
    // Past the quantum of a.
    pass(20.0).await;
    let began = Instant::now();
    let other = stage.send_request("b");
    let streaming = async {
        for _ in 0..20 {
            pass(1.0).await;
        }
        stream.release(true).await;
    };
    let (lease, ()) = tokio::join!(other, streaming);
    assert_eq!(began.elapsed(), secs(20.0) + EVICT + LOAD);
    assert_eq!(&**lease.unwrap().model(), "b");
}

#[tokio::test(start_paused = true)]
async fn lease_for_vanished_caller_is_returned() {
    let stage = Stage::serving("a", &["a"]).await;
    let arriving = stage.send_request("a");
    pass(1.0).await;
    assert_eq!(stage.counts().await, (1, 0), "the lease is on its way");
    drop(arriving);
    assert_eq!(stage.counts().await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn request_cancelled_as_lease_arrives_leaves_nothing() {
    for before_the_load in [true, false] {
        let stage = Stage::new(&["a"]).await;
        let arriving = stage.send_request("a");
        pass(if before_the_load { 0.5 } else { LOAD.as_secs_f64() }).await;
        drop(arriving);
        pass(5.0).await;
        assert_eq!(stage.counts().await, (0, 0));
        assert_eq!(stage.resident().await.as_deref(), Some("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn due_swap_waits_for_lease_granted_simultaneously() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let (first, other) = (stage.send_request("a"), stage.send_request("b"));
    // The result has not been received yet, but the lease is already in effect.
    pass(25.0).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    let first = first.await.unwrap();
    assert_eq!(first.generation(), 1);
    first.release(true).await;
    assert_eq!(other.await.unwrap().generation(), 2);
}

#[tokio::test(start_paused = true)]
async fn release_after_sever_spares_next_generation() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let laggard = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let other = stage.send_request("b").await.unwrap();
    assert_eq!(laggard.cancelled().await, LeaseEnd::Swap);
    assert_eq!(laggard.cancelled().await.error(), Some(SlotError::Severed));
    assert_eq!(stage.counts().await, (1, 0));
    laggard.release(false).await;
    assert_eq!(stage.counts().await, (1, 0));
    drop(other);
    assert_eq!(stage.counts().await, (0, 0));
}

/// Returns the result of `look` at the very instant at which the future is woken.
async fn result_when_woken<T: Send + 'static>(
    mut future: std::pin::Pin<Box<dyn Future<Output = ()>>>,
    look: impl Fn() -> T + Send + Sync + 'static,
) -> T {
    struct Witness<T, F>(F, Mutex<Option<T>>);
    impl<T: Send, F: Fn() -> T + Send + Sync> Wake for Witness<T, F> {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().get_or_insert_with(&self.0);
        }
    }
    let witness = Arc::new(Witness(look, Mutex::new(None)));
    let waker = Waker::from(Arc::clone(&witness));
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    pass(0.01).await;
    let seen = witness.1.lock().unwrap().take();
    seen.expect("it was woken")
}

// A relay that reads the end of a request must already have read its new grant.
#[tokio::test(start_paused = true)]
async fn grant_is_queued_before_release_completes() {
    let stage = Stage::serving("a", &["a"]).await;
    let mut leases = Vec::new();
    for _ in 0..4 {
        leases.push(stage.send_request("a").await.unwrap());
    }
    assert_eq!(stage.told.granted("a"), Some(0));
    assert_eq!(stage.send("a").await.unwrap_err(), SlotError::AtCapacity);
    let (release, told) = (leases.pop().unwrap().release(true), Arc::clone(&stage.told));
    assert_eq!(result_when_woken(Box::pin(release), move || told.granted("a")).await, Some(1));
    assert!(stage.send("a").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn slot_update_is_sent_before_refusal() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let _running = stage.send_request("a").await.unwrap();
    assert_eq!(stage.told.slots_now().slots[0].wanted, 0);
    let (refused, told) = (stage.mux.arrive(stage.new, ("b", RequestClass::Normal), now()), Arc::clone(&stage.told));
    let refused = async move { assert_eq!(refused.await.unwrap_err(), SlotError::AtCapacity) };
    assert_eq!(result_when_woken(Box::pin(refused), move || told.slots_now().slots[0].wanted).await, 1);
}

#[tokio::test(start_paused = true)]
async fn messages_of_link_are_handled_in_order() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    // The demand from before the request is superseded: the last report is that nothing waits.
    stage.demand("b", 1);
    let arriving = stage.mux.arrive(stage.new, ("a", RequestClass::Normal), now());
    stage.mux.handle_demand(stage.new, &Demand::default());
    let lease = arriving.await;
    drop(lease);
    pass(60.0).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"), "nothing was swapped for a demand that was withdrawn");
    assert_eq!(stage.driver().log(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn backend_without_address_is_probed_and_serves_nothing() {
    let stage = Stage::serving("a", &["a"]).await;
    stage.driver().serve(None);
    assert_eq!(stage.send_request("a").await.unwrap_err(), SlotError::BackendLost);
    // It is loaded again for the next request, once its back-off is over, because no request has completed.
    pass(3.0).await;
    assert_eq!(stage.send_request("a").await.unwrap().generation(), 2);
    assert_eq!(stage.driver().log(), ["force a", "load a"]);
}

#[tokio::test]
async fn request_to_ended_slot_task_fails() {
    let (mailbox, gone) = tokio::sync::mpsc::unbounded_channel();
    drop(gone);
    let (answer, answered) = tokio::sync::oneshot::channel();
    drop(answer);
    let arriving = PendingLease::new(RequestKey(1), answered, mailbox);
    assert_eq!(arriving.await.unwrap_err(), SlotError::Quarantined);
}
