//! The operator as a program on a cluster: two replicas, their certificates, what they ask for, hold, write and never say.
//!
//! Each of these tests disturbs the operator, or looks at what it does while nothing happens, so one runs at a time.

mod certificates;
mod deep;
mod leading;
mod quiet;
mod replicas;
mod secrets;

use modelrelay_cluster::{Cluster, PATIENCE, wait_until};
use tokio::sync::{Mutex, MutexGuard};

static TURN: Mutex<()> = Mutex::const_new(());

/// Waits until no other test of this binary runs.
async fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().await
}

/// Waits until what earlier tests left behind is deleted: the operator has work with that too, and nobody could tell whose it was.
async fn nothing_is_leaving(cluster: &Cluster) {
    wait_until("the namespaces of earlier tests to be gone", PATIENCE, async || {
        cluster.kubectl("get namespaces --field-selector status.phase=Terminating --output name").await.is_empty()
    })
    .await;
}
