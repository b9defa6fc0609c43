//! Slots with their tasks, on the runtime's clock and with a driver that the test plays.

#![expect(
    clippy::disallowed_methods,
    reason = "the mailbox is that of a slot, and a slow `drop` blocks its thread as a real one does"
)]

mod cancel;
mod driver;
mod end;
mod harness;
mod history;
mod lease;
#[cfg(unix)] // like the harness that reads it
mod log;
mod names;
mod races;
mod relays;
mod several;
mod storm;
mod swap;
mod world;
