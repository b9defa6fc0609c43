//! Installing, changing and uninstalling the chart, and installing without it. The users' objects stay and keep
//! serving.
//!
//! Each of these tests removes the release that all others share, and installs it again, so `.config/nextest.toml` runs
//! each alone.

mod certificates;
mod kustomize;
mod namespaces;
mod release;
mod shared;
mod story;
mod user;
