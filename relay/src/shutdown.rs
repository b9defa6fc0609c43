//! The first signal asks, the second ends.
//!
//! SIGTERM and SIGINT, or what Windows has in their place, both begin the orderly exit of `main`. A second one, of either
//! kind, ends the process at once with the code that a shell gives for it: somebody is waiting, and what was not finished by
//! then gets no more time.

use std::io;

use modelrelay_platform::signals::Signals;
use tokio::sync::watch;

pub use modelrelay_platform::signals::StopSignal;

/// Resolves at the first signal; clones all see the same one, also when it came before they asked.
#[derive(Debug, Clone)]
pub struct ShutdownSignal {
    seen: watch::Receiver<Option<StopSignal>>,
}

/// Begins to listen, before anything else is started, so that no signal is lost. Needs a tokio runtime.
#[expect(clippy::disallowed_methods, reason = "the second signal asks to end without finishing anything")]
pub fn listen() -> io::Result<ShutdownSignal> {
    let mut signals = Signals::listen()?;
    let (sender, seen) = watch::channel(None);
    tokio::spawn(async move {
        let first = signals.next().await;
        // Nobody may be listening any more; the second signal must work all the same.
        sender.send_replace(Some(first));
        let second = signals.next().await;
        tracing::warn!(signal = second.as_str(), "second signal, ending at once");
        std::process::exit(second.exit_code());
    });
    Ok(ShutdownSignal { seen })
}

impl ShutdownSignal {
    /// For a relay that another signal stops than the process's: it is sent here.
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

    /// Whether it has come.
    pub fn is_received(&self) -> bool {
        self.seen.borrow().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_clone_made_late_sees_the_signal_too() {
        let (sender, seen) = watch::channel(None);
        let mut early = ShutdownSignal { seen };
        assert!(!early.is_received());
        sender.send_replace(Some(StopSignal::Terminate));
        assert_eq!(early.recv().await, StopSignal::Terminate);
        assert_eq!(early.clone().recv().await, StopSignal::Terminate);
    }
}
