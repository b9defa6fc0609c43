//! What differs between operating systems and is the same in both programs: how a process is asked to stop and scheduled, who
//! may read a file, where log lines go when nobody has a terminal, how a start is reported, what the kernel does for a connection,
//! and what a service of Windows is.

pub mod files;
pub mod log;
pub mod own_program;
pub mod parent;
pub mod readiness;
pub mod scheduling;
pub mod service;
pub mod signals;
pub mod sockets;
