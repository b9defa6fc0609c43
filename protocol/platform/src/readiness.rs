//! Reports to the process manager that this program is ready: to systemd (`Type=notify`), or to its parent process
//! ([`crate::parent`]).

use crate::parent;

/// Reports that the start is complete. `systemctl start` and `modelrelay up` wait for it; without either it does
/// nothing.
pub fn report() {
    #[cfg(target_os = "linux")]
    if let Err(problem) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::error!(%problem, "cannot notify systemd of readiness");
    }
    parent::report_ready();
}
