//! Providers from the user's view: created, used, changed, broken, deleted.

mod certificates;
mod configuration;
mod identity;
mod keys;
mod life;
mod objects;
mod serving;
mod setup;
mod sharing;
mod tenants;
