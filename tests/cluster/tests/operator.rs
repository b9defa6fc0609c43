//! The operator as a program on a cluster: two replicas, their certificates, what they ask for, hold, write and never say.
//!
//! Each of these tests disturbs the operator, or checks what it does while nothing happens, so `.config/nextest.toml` runs each alone.

mod certificates;
mod deep;
mod leading;
mod quiet;
mod replicas;
mod secrets;
