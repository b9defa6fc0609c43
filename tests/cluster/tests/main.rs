//! All tests on a cluster, in one binary: each binary would link the Kubernetes client again.

mod admit;
mod by_hand;
mod definitions;
mod hpa;
mod images;
mod injection;
mod lifecycle;
mod monitoring;
mod multiplexer;
mod operator;
mod providers;
mod restarts;
mod scale;
mod scaling;
mod traffic;
mod zero_refusals;
mod zones;
