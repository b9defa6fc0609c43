//! Operating system differences that both programs share: how a process receives a stop and how it is scheduled, file
//! permissions, changes in a folder, where the log goes without a terminal, how a complete start is reported, socket
//! options, and Windows services.

pub mod files;
pub mod folder;
pub mod log;
pub mod own_program;
pub mod parent;
pub mod readiness;
pub mod scheduling;
pub mod service;
pub mod signals;
pub mod sockets;
