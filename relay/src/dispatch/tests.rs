//! One behaviour per test, with the exact effects on one screen; and random histories against a reference model.

mod affinity;
mod capacity;
mod choice;
mod clocks;
mod contention;
mod demand;
mod drain;
mod fair;
mod gates;
mod harness;
mod history;
mod homes;
mod joint;
mod names;
mod outliers;
mod queue;
mod requeue;
mod scale;
mod select;
mod settings;
mod shared_homes;
mod shares;
mod silence;
mod slots;
mod snapshot;
mod swaps;
