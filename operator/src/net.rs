//! HTTP servers: connections and bodies within limits.

pub(crate) mod accept;
pub(crate) mod intake;
