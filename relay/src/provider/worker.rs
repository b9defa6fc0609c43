//! One connected worker, as its provider knows it.

pub mod close;
