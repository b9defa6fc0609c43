//! Pods that get a worker by their label: that they serve, keep what is theirs, and are told what is wrong.

mod admission;
mod foreign;
mod pools;
mod serving;
mod setup;
