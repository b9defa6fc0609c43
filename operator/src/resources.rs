//! The form that all resources share: names, labels, annotations and conditions; and what their namespaces require.

pub mod conditions;
pub mod names;
pub mod namespaces;
