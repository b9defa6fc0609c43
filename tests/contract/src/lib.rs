//! An empty library: this crate contains only tests.
