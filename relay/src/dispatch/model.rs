//! The data of the core: events and effects, requests, workers and models, and the queue. It applies no rule of the
//! contract.

pub(super) mod assignment;
pub(super) mod cache;
pub(super) mod clock;
pub(super) mod demand;
pub(super) mod distance;
pub(super) mod drain_rate;
pub(super) mod effect;
pub(super) mod event;
pub(super) mod fairness;
pub(super) mod flows;
pub(super) mod homes;
pub(super) mod keys;
pub(super) mod models;
pub(super) mod order;
pub(super) mod owner;
pub(super) mod queue;
pub(super) mod registry;
pub(super) mod request;
pub(super) mod residency;
pub(super) mod select;
pub(super) mod shares;
pub(super) mod small_set;
pub(super) mod wait_list;
