//! HTTP without the relay's state: paths, errors, and the common part of all responses.

pub mod base_path;
pub mod body;
pub mod fallback;
pub mod framing;
pub mod problem;
pub mod respond;
pub mod url_forms;
