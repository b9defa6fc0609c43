//! The limit of open files.
//!
//! Every connection is one. A shell and a service usually get 1,024, kept that low only for programs that use `select`;
//! what the machine really allows is the hard limit, and any process may raise itself to it.

/// Raises the limit as far as the machine allows. Where that fails the relay serves fewer connections at once.
#[cfg(unix)]
pub fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    // None is no limit at all.
    if limit.current.is_none() || limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(open_files = limit.current, %error, "the limit of open files could not be raised");
    }
}

/// Windows has none.
#[cfg(not(unix))]
pub fn raise_limit() {}
