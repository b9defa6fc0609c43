//! Access to the API server: the client, the caches of the watches, and writes.

pub mod api;
pub mod apply;
pub mod cache;
pub mod follow;
#[cfg(test)]
pub(crate) mod testing;
