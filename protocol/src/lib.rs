//! What relay and worker say to each other, and the rules both must agree on.

pub mod outbox;
