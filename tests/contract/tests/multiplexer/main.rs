//! The worker with a multiplexer as a black box: real backends that it starts and stops, fake relays, and finally a
//! real one.

mod children;
mod credentials;
mod drain;
mod end_to_end;
mod endings;
mod failures;
mod fair;
mod fleet;
mod fleet_admin;
mod fleet_homes;
mod gpu;
mod metrics;
mod names;
mod old_relay;
mod outliers;
mod probe;
mod registration;
mod reload;
mod rig;
mod sleepers;
mod swap;
