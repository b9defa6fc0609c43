//! The program `modelrelay-relay`.

use std::process::ExitCode;

/// Returns memory to the system after a burst, which glibc's allocator does not.
#[cfg(all(unix, feature = "jemalloc"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    modelrelay_relay::app::program::run(std::env::args_os().collect())
}
