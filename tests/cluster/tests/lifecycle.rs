//! The chart comes, changes and goes, and is not the only way to install. What users made stays, and goes on serving.
//!
//! Each of these tests removes the release that all others share, and installs it again, so `.config/nextest.toml` runs each alone.

mod certificates;
mod kustomize;
mod namespaces;
mod release;
mod shared;
mod story;
mod user;
