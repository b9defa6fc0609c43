//! What relay and worker say to each other, and the rules both must agree on.

pub mod credit;
pub mod outbox;
pub mod text;
