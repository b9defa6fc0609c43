//! The form that all resources share: names, labels, annotations and conditions.

pub mod conditions;
pub mod names;
