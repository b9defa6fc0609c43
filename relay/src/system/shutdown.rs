//! The first signal begins the shutdown, the second ends the process.
//!
//! SIGTERM and SIGINT, or their equivalents on Windows, both begin the orderly exit of `main`. A second one, of either
//! kind, ends the process at once with the code that a shell reports for it: the operator is waiting, and unfinished
//! work gets no more time.

use std::io;

use modelrelay_platform::log;
use modelrelay_platform::signals::Signals;
use tokio::sync::watch;

pub use modelrelay_platform::signals::StopSignal;

/// Resolves at the first signal; all clones see the same one, also if it came before their first poll.
#[derive(Debug, Clone)]
pub struct ShutdownSignal {
    seen: watch::Receiver<Option<StopSignal>>,
}

/// Starts to listen, before anything else is started, so that no signal is lost. Needs a tokio runtime.
#[expect(clippy::disallowed_methods, reason = "the second signal ends the process without finishing requests")]
pub fn listen() -> io::Result<ShutdownSignal> {
    let mut signals = Signals::listen()?;
    let (sender, seen) = watch::channel(None);
    tokio::spawn(async move {
        let first = signals.next().await;
        // All receivers may be gone; the second signal must work all the same.
        sender.send_replace(Some(first));
        let second = signals.next().await;
        tracing::warn!(signal = second.as_str(), "second signal; exiting immediately");
        log::finish();
        std::process::exit(second.exit_code());
    });
    Ok(ShutdownSignal { seen })
}

impl ShutdownSignal {
    /// Creates a signal that another source than the process sends through this channel.
    pub fn sent_by(seen: watch::Receiver<Option<StopSignal>>) -> Self {
        Self { seen }
    }

    /// Waits for the first signal.
    pub async fn recv(&mut self) -> StopSignal {
        loop {
            if let Some(signal) = *self.seen.borrow_and_update() {
                return signal;
            }
            if self.seen.changed().await.is_err() {
                // The listener ends only with the process.
                std::future::pending::<()>().await;
            }
        }
    }

    /// True if it was received.
    pub fn is_received(&self) -> bool {
        self.seen.borrow().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn late_clone_receives_earlier_signal() {
        let (sender, seen) = watch::channel(None);
        let mut early = ShutdownSignal { seen };
        assert!(!early.is_received());
        sender.send_replace(Some(StopSignal::Terminate));
        assert_eq!(early.recv().await, StopSignal::Terminate);
        assert_eq!(early.clone().recv().await, StopSignal::Terminate);
    }
}
