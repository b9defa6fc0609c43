//! One connected worker, as its provider knows it.

pub mod close;
pub mod failures;
pub mod link;
pub mod pace;
pub mod places;
pub mod register;
pub mod slots;
mod worker_info;
