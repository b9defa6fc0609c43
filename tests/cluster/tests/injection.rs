//! Pods that get a worker by their label: they serve, keep their own fields, and report problems.

mod admission;
mod foreign;
mod pools;
mod serving;
mod setup;
