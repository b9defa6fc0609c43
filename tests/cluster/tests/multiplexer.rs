//! Workers that hold one model at a time, as a cluster's users have them: clients of several models stream while the models
//! take each other's place, and no answer is cut.

mod deployments;
mod failures;
mod pods;
mod rights;
mod setup;
