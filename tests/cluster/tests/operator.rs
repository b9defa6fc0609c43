//! The operator as a program on a cluster: two replicas, their certificates, their requests and writes, their memory,
//! and their secrecy.
//!
//! Each of these tests disturbs the operator, or checks its behaviour while idle, so `.config/nextest.toml` runs each
//! alone.

mod certificates;
mod deep;
mod leading;
mod quiet;
pub(crate) mod replicas;
mod secrets;
