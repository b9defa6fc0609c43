//! Actions that run to their end, even if no caller waits for them any more.
//!
//! A server continues an action after the connection is closed: it wakes although the load was abandoned. A call that
//! undoes the action must not overtake it, or it finds a server that sleeps and wakes a moment later. So an action that
//! must not be left half done runs in its own task, and the call that undoes it waits for the task first.

use std::sync::Arc;

use tokio::sync::Mutex;

use super::DriverError;

/// One backend's actions, run one after the other.
#[derive(Clone, Debug, Default)]
pub struct Sequence(Arc<Mutex<()>>);

impl Sequence {
    /// Runs an action to its end, after those before it.
    pub async fn run<T>(
        &self,
        order: impl Future<Output = Result<T, DriverError>> + Send + 'static,
    ) -> Result<T, DriverError>
    where
        T: Send + 'static,
    {
        let turn = Arc::clone(&self.0).lock_owned().await;
        let task = tokio::spawn(async move {
            let result = order.await;
            drop(turn);
            result
        });
        // Only a panic or the end of the runtime leads here.
        task.await.unwrap_or_else(|error| Err(DriverError::Abandoned(error.to_string())))
    }

    /// Waits until no action is in progress.
    pub async fn settled(&self) {
        drop(self.0.lock().await);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn abandoned_order_finishes_before_next_order() {
        let (sequence, (finish, finished)) = (Sequence::default(), oneshot::channel::<()>());
        let first =
            sequence.run(async move { finished.await.map_err(|error| DriverError::NotOurs(error.to_string())) });
        let given_up = tokio::time::timeout(std::time::Duration::from_millis(1), first).await;
        assert!(given_up.is_err());
        assert!(sequence.0.try_lock().is_err(), "it is under way still");
        finish.send(()).unwrap();
        sequence.settled().await;
        assert_eq!(sequence.run(async { Ok(1) }).await, Ok(1));
    }
}
