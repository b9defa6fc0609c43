//! The state that relays report, and the certificate that they serve with.

pub mod state;
pub mod tls;
