//! Providers as their users meet them: made, asked, changed, broken, deleted.

mod certificates;
mod configuration;
mod identity;
mod keys;
mod life;
mod objects;
mod serving;
mod setup;
