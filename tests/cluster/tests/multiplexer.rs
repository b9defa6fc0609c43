//! Workers that hold one model at a time, as in production: clients of several models stream while the models replace
//! each other, and no response is truncated.

mod deployments;
mod failures;
mod pods;
mod rights;
mod setup;
