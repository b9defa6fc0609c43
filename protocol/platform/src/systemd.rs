//! What systemd hears of a program that its unit starts with `Type=notify`.

/// Says that the start is done, which `systemctl start` waits for; nothing where nobody waits. Other systems' managers ask for
/// no such word.
pub fn tell_ready() {
    #[cfg(target_os = "linux")]
    if let Err(problem) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::error!(%problem, "systemd cannot be told that the start is done");
    }
}
