//! One behaviour per test, with the exact effects on one screen; and random histories against a reference model.

mod affinity;
mod capacity;
mod clocks;
mod demand;
mod drain;
mod harness;
mod history;
mod joint;
mod queue;
mod requeue;
mod scale;
mod select;
mod settings;
mod snapshot;
