//! Serving requests: with one backend, or with the slots of a multiplexer.
//!
//! [`Serving`] is the only place that distinguishes the two; the rest of the worker calls its methods.

mod catalogue;
mod multiplexed;
mod single;

pub use catalogue::Failing;
pub use multiplexed::{Leased, MultiplexedBackend, PendingStart};
pub use single::SingleBackend;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use modelrelay_protocol::message::{Command, CommandResult, Demand, RequestClass, Slot, WorkerToRelay};
use modelrelay_protocol::version::Capability;
use serde_json::{Value, json};

use crate::backend::Backend;
use crate::link::{Advertised, CapacityAdmission, Held, Link, Links, ModelLoads, SlotGuard};
use crate::metrics::Metrics;
use crate::settings::{Live, SettingError};
use crate::shutdown::{Cause, Drain};

/// The part of a worker that serves requests.
#[derive(Debug)]
pub enum Serving {
    /// One backend, with concurrency slots and a catalogue of its models.
    Single(Arc<SingleBackend>),
    /// The slots of a multiplexer.
    Multiplexed(Arc<MultiplexedBackend>),
}

/// The parts of the worker that serving depends on.
#[derive(Clone, Debug)]
pub struct ServingContext {
    /// The settings that a reload changes.
    pub live: Arc<ArcSwap<Live>>,
    /// Live links.
    pub links: Arc<Links>,
    /// The drain state.
    pub drain: Arc<Drain>,
    /// The models whose requests the backend fails.
    pub failing: Arc<Failing>,
    /// The worker's metrics.
    pub metrics: Arc<Metrics>,
}

/// The admission of a request that has just arrived.
#[derive(Debug)]
pub enum Admission {
    /// It occupies capacity, except if it is held, and starts under this condition.
    Accepted(Option<SlotGuard>, Start),
    /// The relay must requeue it.
    AtCapacity,
    /// Its link is gone.
    Unlinked,
}

/// The condition under which a request starts.
#[derive(Debug)]
pub enum Start {
    /// At once.
    Now(Arc<SingleBackend>),
    /// When a slot becomes free.
    Held(Arc<SingleBackend>, Held),
    /// When its model is loaded.
    Leasing(PendingStart),
}

impl Serving {
    /// Starts the slots of a multiplexer at once; a single backend starts with [`Serving::run`]. Must be called within
    /// a runtime.
    pub fn start(context: &ServingContext) -> Result<Self, SettingError> {
        let slots = context.live.load().slots.clone();
        Ok(match slots {
            Some(slots) => Self::Multiplexed(MultiplexedBackend::start(slots, context.clone())?),
            None => Self::Single(Arc::new(SingleBackend::new(context.clone()))),
        })
    }

    /// Spawns the tasks that keep a single backend's capacity and models up to date.
    pub fn run(&self) {
        if let Self::Single(single) = self {
            tokio::spawn(Arc::clone(&single.capacity).run());
            let single = Arc::clone(single);
            tokio::spawn(async move { single.catalogue.run(&single).await });
        }
    }

    /// Adds a link that has registered with these models.
    pub fn attach(&self, link: &Arc<Link>, registered: &Advertised) {
        match self {
            Self::Single(single) => single.attach(link, registered),
            Self::Multiplexed(slots) => slots.attach(link, registered),
        }
    }

    /// Removes a link, and its requests with it.
    pub fn detach(&self, link: &Link) {
        match self {
            Self::Single(single) => single.capacity.leave(link.id),
            Self::Multiplexed(slots) => slots.with_seat(link, |multiplexer, seat| multiplexer.leave(seat)),
        }
    }

    /// Announces the models again, because the failing ones have changed.
    pub fn announce(&self) {
        match self {
            Self::Single(single) => single.catalogue.announce(),
            Self::Multiplexed(slots) => slots.announce(),
        }
    }

    /// Returns the models to advertise to relays.
    pub fn advertised(&self) -> Advertised {
        match self {
            Self::Single(single) => single.catalogue.advertised(),
            Self::Multiplexed(slots) => slots.advertised(),
        }
    }

    /// The number of running requests.
    pub fn running(&self) -> u32 {
        match self {
            Self::Single(single) => single.capacity.load(),
            Self::Multiplexed(slots) => slots.running(),
        }
    }

    /// The most requests that may run at once.
    pub fn max_concurrency(&self) -> u32 {
        match self {
            Self::Single(single) => single.live.load().max_concurrency,
            Self::Multiplexed(slots) => slots.multiplexer.capacity(),
        }
    }

    /// The number of requests that wait for a slot at the relay behind `link`, or here if the relay does not support
    /// grants. With a multiplexer, the slots have their own figures.
    pub fn waiting(&self, link: &Link) -> u32 {
        match self {
            Self::Single(single) => single.capacity.waiting(link.id),
            Self::Multiplexed(_) => 0,
        }
    }

    /// Returns the capability to announce, in addition to those of every worker.
    pub fn capability(&self) -> Option<Capability> {
        match self {
            Self::Single(_) => None,
            Self::Multiplexed(_) => Some(Capability::Slots1),
        }
    }

    /// Returns the loads of models that are in place. A backend's cache lasts as long as its load.
    pub fn loads(&self) -> ModelLoads {
        match self {
            Self::Single(single) => ModelLoads::from([(String::new(), single.catalogue.recoveries(), None)]),
            Self::Multiplexed(slots) => slots.loads(),
        }
    }

    /// Returns the id of the model of a request, which may use an alias.
    pub fn model_id(&self, name: &str) -> Arc<str> {
        match self {
            Self::Single(_) => name.into(),
            Self::Multiplexed(slots) => slots.model_id(name),
        }
    }

    /// Returns the slots to register, if there is a multiplexer.
    pub fn slots(&self) -> Option<Vec<Slot>> {
        match self {
            Self::Single(_) => None,
            Self::Multiplexed(slots) => Some(slots.multiplexer.slots().slots),
        }
    }

    /// Warns if a relay times out requests that the worker would still have served.
    pub fn check_patience(&self, link: &Link, patience: Duration) {
        match self {
            Self::Single(_) => {}
            Self::Multiplexed(slots) => slots.check_patience(link, patience),
        }
    }

    /// Admits a request that arrived for a model. With a multiplexer, it is queued when this returns.
    pub fn admit(&self, link: &Link, model: &str, class: RequestClass) -> Admission {
        match self {
            Self::Single(single) => match single.capacity.handle_request(link) {
                CapacityAdmission::Run(slot) => {
                    Admission::Accepted(Some(SlotGuard::Slot(slot)), Start::Now(Arc::clone(single)))
                }
                CapacityAdmission::Held(held) => Admission::Accepted(None, Start::Held(Arc::clone(single), held)),
                CapacityAdmission::AtCapacity => Admission::AtCapacity,
            },
            Self::Multiplexed(slots) => match slots.arrive(link, model, class) {
                Some(lease) => Admission::Accepted(Some(SlotGuard::Place(lease.ticket())), Start::Leasing(lease)),
                None => Admission::Unlinked,
            },
        }
    }

    /// A relay reported its waiting requests.
    pub fn handle_demand(&self, link: &Link, demand: &Demand) {
        match self {
            Self::Single(single) => {
                let waiting = demand.models.iter().fold(0_u32, |sum, model| sum.saturating_add(model.waiting));
                single.capacity.handle_demand(link.id, waiting);
            }
            Self::Multiplexed(slots) => {
                slots.with_seat(link, |multiplexer, seat| multiplexer.handle_demand(seat, demand));
            }
        }
    }

    /// A relay forwards an operator's order.
    pub fn handle_command(&self, link: &Link, command: Command) {
        match self {
            Self::Single(_) => link.push(&WorkerToRelay::CommandResult(CommandResult {
                op_id: command.op_id,
                ok: false,
                error: Some("this worker has no multiplexer".to_owned()),
            })),
            Self::Multiplexed(slots) => {
                slots.with_seat(link, |multiplexer, seat| multiplexer.handle_command(seat, &command));
            }
        }
    }

    /// A relay requests the models, and gets a reply.
    pub fn handle_refresh(&self, link: &Link) {
        match self {
            Self::Single(single) => single.catalogue.refresh(link.id),
            Self::Multiplexed(slots) => link.announce(&slots.advertised(), slots.running()),
        }
    }

    /// A relay sends no more requests over this link.
    pub fn handle_leaving(&self, link: &Link) {
        match self {
            Self::Single(single) => single.capacity.handle_leaving(link.id),
            Self::Multiplexed(slots) => slots.with_seat(link, |multiplexer, seat| multiplexer.handle_leaving(seat)),
        }
    }

    /// Any other message arrived.
    pub fn handle_message(&self, link: &Link) {
        match self {
            Self::Single(single) => single.capacity.handle_message(link.id),
            Self::Multiplexed(slots) => slots.with_seat(link, |multiplexer, seat| multiplexer.handle_message(seat)),
        }
    }

    /// A connection to a single backend failed: it gets no more requests. A slot checks its backends itself, here and
    /// below.
    pub fn handle_unreachable(&self, why: &impl Display) {
        if let Self::Single(single) = self {
            single.catalogue.handle_unreachable(&why.to_string());
        }
    }

    /// A single backend ended a response or a connection prematurely.
    pub fn handle_broken(&self) {
        if let Self::Single(single) = self {
            single.catalogue.poll_now();
        }
    }

    /// Probes a single backend after it has reset a connection; withdraws its models if it is lost.
    pub async fn check_after_reset(&self) {
        if let Self::Single(single) = self {
            single.catalogue.is_lost(single, &single.backend()).await;
        }
    }

    /// A relay was notified that a single backend has reset a connection. If the backend is healthy, its models are
    /// announced again, and the relay may send the request again.
    pub fn handle_reset_reported(&self, link: &Link) {
        if let Self::Single(single) = self {
            single.catalogue.refresh(link.id);
        }
    }

    /// True if a single backend, which failed a request, fails its health check too. Its models are withdrawn then.
    pub async fn is_lost(&self, backend: &Backend) -> bool {
        match self {
            Self::Single(single) => single.catalogue.is_lost(single, backend).await,
            Self::Multiplexed(_) => false,
        }
    }

    /// Returns why no request could ever be served; `None` once one could.
    pub fn never_served(&self) -> Option<String> {
        match self {
            Self::Single(single) => single.catalogue.never_served(),
            Self::Multiplexed(slots) => slots.never_served(),
        }
    }

    /// True unless an operator has to intervene.
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Single(_) => true,
            Self::Multiplexed(slots) => slots.multiplexer.is_ready(),
        }
    }

    /// Adds the state of the backend or of the slots to `/healthz`.
    pub async fn add_health(&self, health: &mut Value) {
        match self {
            Self::Single(single) => {
                let monitor = single.catalogue.monitor();
                health["backend_up"] = json!(monitor.is_healthy());
                health["backend"] = json!({
                    "condition": monitor.condition().as_str(),
                    "reason": monitor.reason(),
                    "since_secs": monitor.since().elapsed().as_secs(),
                });
            }
            Self::Multiplexed(slots) => health["slots"] = slots.multiplexer.health().await["slots"].take(),
        }
    }

    /// Updates the gauges of the slots before the metrics are read.
    pub async fn observe(&self) {
        if let Self::Multiplexed(slots) = self {
            slots.multiplexer.observe().await;
        }
    }

    /// Applies new settings, and logs changes that take effect only at the next start.
    pub fn reconfigure(&self, old: &Live, new: &Live) {
        if matches!(self, Self::Multiplexed(_)) != new.slots.is_some() {
            tracing::warn!("worker.yaml added or removed the multiplexer; restart the worker to apply it");
        }
        match self {
            Self::Single(single) => single.reconfigure(old, new),
            Self::Multiplexed(slots) => slots.reconfigure(old, new),
        }
    }

    /// Returns when a backend that was away has returned.
    pub async fn backend_returned(&self) {
        match self {
            Self::Single(single) => {
                let mut healthy = single.catalogue.healthy();
                let _ = healthy.wait_for(|healthy| !healthy).await;
                let _ = healthy.wait_for(|healthy| *healthy).await;
            }
            Self::Multiplexed(slots) => slots.backends_returned().await,
        }
    }

    /// A drain began. A `/drain` may be undone, and the waiting requests are then served.
    pub fn handle_drain(&self, cause: Cause) {
        if let (Cause::Admin | Cause::Signal, Self::Multiplexed(slots)) = (cause, self) {
            slots.multiplexer.give_back_held();
        }
    }

    /// Ends the slots and the worker's own backends for good.
    pub async fn stop(&self, timeout: Duration) {
        if let Self::Multiplexed(slots) = self {
            slots.multiplexer.stop(timeout).await;
        }
    }
}
