//! The admission webhook and its certificates.

pub mod certs;
pub mod inject;
