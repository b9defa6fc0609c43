//! The limit of open files.
//!
//! Every connection needs one. A shell and a service usually get 1,024, a low default kept for programs that use
//! `select`. The real limit of the machine is the hard limit, and any process may raise its own to it.

/// Raises the limit as far as the machine allows. If that fails, the relay serves fewer connections at once.
#[cfg(unix)]
pub fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    // `None` means no limit.
    if limit.current.is_none() || limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(open_files = limit.current, %error, "cannot raise the open file limit");
    }
}

/// Windows has no such limit.
#[cfg(not(unix))]
pub fn raise_limit() {}
