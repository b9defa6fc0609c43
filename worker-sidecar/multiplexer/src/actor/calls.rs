//! Driver calls, in parallel with the slot's task: one at a time, a newer one ends the older; probes of the backend and
//! the killing of remains run in parallel with them.
//!
//! A driver may hang, panic, or take long to be dropped; the slot continues in each case. Every call ends with an event
//! or times out.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::Message;
use crate::Model;
use crate::config::EVICT_TIMEOUT;
use crate::driver::slot::SlotDriver;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::{DownCause, Event, Found, Generation, OpId, Outcome};

const PANICKED: &str = "its driver panicked";

/// One call.
#[derive(Clone, Debug)]
pub(super) enum SlotCall {
    Preflight { model: Model, resident: Option<Model> },
    Evict(Model),
    ForceEvict(Model),
    CheckMemory(Model),
    Load(Model, LoadKind),
    Probe(Option<Model>),
}

/// A slot's driver calls in progress.
#[derive(Debug)]
pub(super) struct Calls {
    driver: Arc<SlotDriver>,
    mailbox: mpsc::WeakUnboundedSender<Message>,
    /// Held by a call until all of it is dropped, so that the next call does not overlap with it.
    turn: Arc<Semaphore>,
    current: Option<Task>,
    probe: Option<Task>,
    watch: Option<(Generation, Task)>,
    /// Held while what is left of a model is killed: a load of the same model waits for that, or it would be killed
    /// too.
    discards: HashMap<Model, Arc<Semaphore>>,
}

/// A task that is aborted with its owner.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Calls {
    pub(super) fn new(driver: Arc<SlotDriver>, mailbox: mpsc::WeakUnboundedSender<Message>) -> Self {
        let turn = Arc::new(Semaphore::new(1));
        Self { driver, mailbox, turn, current: None, probe: None, watch: None, discards: HashMap::new() }
    }

    pub(super) fn driver(&self) -> &SlotDriver {
        &self.driver
    }

    /// Starts a call; the previous one ends.
    pub(super) fn start(&mut self, op: OpId, call: SlotCall) {
        let discarded = match &call {
            SlotCall::Load(model, _) => self.discards.get(model).cloned(),
            SlotCall::Preflight { .. }
            | SlotCall::Evict(_)
            | SlotCall::ForceEvict(_)
            | SlotCall::CheckMemory(_)
            | SlotCall::Probe(_) => None,
        };
        self.current = None;
        let turn = Arc::clone(&self.turn);
        self.current = Some(self.spawn(op, call, async move {
            let turn = turn.acquire_owned().await;
            if let Some(discarded) = discarded {
                drop(discarded.acquire().await);
            }
            turn
        }));
    }

    /// Starts a probe, in parallel with everything else.
    pub(super) fn probe(&mut self, op: OpId, model: Option<Model>) {
        self.probe = Some(self.spawn(op, SlotCall::Probe(model), std::future::ready(())));
    }

    /// `turn` returns the guard that the call holds until it ends.
    fn spawn<T: Send + 'static>(
        &self,
        op: OpId,
        call: SlotCall,
        turn: impl Future<Output = T> + Send + 'static,
    ) -> Task {
        let (driver, mailbox) = (Arc::clone(&self.driver), self.mailbox.clone());
        Task(tokio::spawn(async move {
            // Dropped after the call.
            let _turn = turn.await;
            let outcome = AssertUnwindSafe(call.run(&driver)).catch_unwind().await;
            let outcome = outcome.unwrap_or_else(|_| {
                tracing::error!(?call, "a driver panicked");
                call.panicked()
            });
            send_event(&mailbox, Event::Done { op, outcome });
        }))
    }

    /// Kills what is left of a model. Only the next load of that model waits for it.
    pub(super) fn discard(&mut self, model: Model) {
        let turn = self.discards.entry(Model::clone(&model)).or_insert_with(|| Arc::new(Semaphore::new(1)));
        // Acquired here and not in the task, so that a load that starts in this very step already waits for it.
        let turn = (Arc::clone(turn), Arc::clone(turn).try_acquire_owned());
        let driver = Arc::clone(&self.driver);
        drop(tokio::spawn(async move {
            let (turn, taken) = turn;
            let _taken = match taken {
                Ok(taken) => Some(taken),
                Err(_) => turn.acquire_owned().await.ok(),
            };
            let killing = AssertUnwindSafe(driver.force_evict(&model)).catch_unwind();
            match tokio::time::timeout(EVICT_TIMEOUT, killing).await {
                Ok(Ok(Outcome::ForceEvicted(Err(error)))) => {
                    tracing::warn!(model = &*model, error, "leftovers of a model could not be killed");
                }
                Ok(Ok(_)) => tracing::debug!(model = &*model, "leftovers of a model were killed"),
                Ok(Err(_)) => tracing::error!(model = &*model, "a driver panicked"),
                Err(_) => tracing::warn!(model = &*model, "leftovers of a model could not be removed in time"),
            }
            driver.forget(&model);
        }));
    }

    /// Reports when the backend of this generation ends by itself, if the driver can see that.
    pub(super) fn watch(&mut self, generation: Generation, model: Model) {
        if self.watch.as_ref().is_some_and(|(watched, _)| *watched == generation) {
            return;
        }
        let (driver, mailbox) = (Arc::clone(&self.driver), self.mailbox.clone());
        let task = Task(tokio::spawn(async move {
            let ended = AssertUnwindSafe(async { driver.driver().ended(&model).await }).catch_unwind();
            // A panic of the driver is no evidence of an end; the regular probes will detect one.
            if ended.await.is_ok() {
                send_event(&mailbox, Event::BackendDown { generation, cause: DownCause::Gone });
            }
        }));
        self.watch = Some((generation, task));
    }

    /// Ends all calls, and the worker's own backends.
    pub(super) fn stop(&mut self) -> impl Future<Output = ()> + Send + 'static {
        self.current = None;
        self.probe = None;
        self.watch = None;
        let (driver, turn) = (Arc::clone(&self.driver), Arc::clone(&self.turn));
        async move {
            if !driver.driver().capabilities().owns_backends {
                return;
            }
            let ending = async {
                let _turn = turn.acquire_owned().await;
                let models = driver.driver().models().into_iter();
                // In parallel: each may take its full grace period, and the worker's process manager allows little more
                // than one.
                join_all(models.filter(|model| driver.driver().owns(model)).map(|model| end(&driver, model))).await
            };
            if tokio::time::timeout(EVICT_TIMEOUT, ending).await.is_err() {
                tracing::warn!("the backends did not stop in time");
            }
        }
    }
}

/// Ends one of the worker's own backends: gracefully if possible, otherwise by force.
async fn end(driver: &SlotDriver, model: Model) {
    let error = match AssertUnwindSafe(driver.driver().stop(&model)).catch_unwind().await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => PANICKED.to_owned(),
    };
    tracing::warn!(model = &*model, error, "a backend could not be stopped; killing it");
    let killed = AssertUnwindSafe(driver.driver().force_evict(&model)).catch_unwind().await;
    let error = match killed {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => PANICKED.to_owned(),
    };
    tracing::warn!(model = &*model, error, "a backend could not be killed");
}

impl SlotCall {
    async fn run(&self, driver: &SlotDriver) -> Outcome {
        match self {
            Self::Preflight { model, resident } => driver.preflight(model, resident.as_ref()).await,
            Self::Evict(model) => driver.evict(model).await,
            Self::ForceEvict(model) => driver.force_evict(model).await,
            Self::CheckMemory(model) => driver.check_memory(model).await,
            Self::Load(model, kind) => driver.load(model, *kind).await,
            Self::Probe(model) => driver.probe(model.as_ref()).await,
        }
    }

    /// The outcome of a call that panicked: always a failure, never free memory.
    fn panicked(&self) -> Outcome {
        let why = || PANICKED.to_owned();
        match self {
            Self::Preflight { .. } => Outcome::Preflight(Err(why())),
            Self::Evict(_) => Outcome::Evicted(Err(why())),
            Self::ForceEvict(_) => Outcome::ForceEvicted(Err(why())),
            Self::CheckMemory(_) => Outcome::MemoryChecked { freed: false },
            Self::Load(..) => Outcome::Loaded(Err(LoadFailure::Driver(why()))),
            Self::Probe(_) => Outcome::Probed(Found::Silence),
        }
    }
}

/// Sends an event to the slot, if its task still runs.
fn send_event(mailbox: &mpsc::WeakUnboundedSender<Message>, event: Event) {
    if let Some(mailbox) = mailbox.upgrade() {
        let _ = mailbox.send(Message::Event(event));
    }
}
