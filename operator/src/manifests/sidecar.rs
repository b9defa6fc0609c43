//! The worker in a Pod.
