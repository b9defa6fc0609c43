//! The heart of the relay: one provider's queue and registry.

mod effect;
mod event;

pub use effect::{Effect, Failure, ModelDemand, RequeueReason, Stage};
pub use event::{
    AttemptFailure, CancelReason, DEFAULT_COLD_TIMEOUT, Event, Grant, LoadFailure, LossCause,
    Model, NewRequest, NewWorker, Now, RequestKey, Settings, WorkerKey,
};
