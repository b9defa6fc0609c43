//! The first signal asks, the second ends.
//!
//! SIGTERM and SIGINT both begin the orderly exit of `main`. A second one, of either kind, ends the process at once with
//! the code that a shell gives for it: somebody is waiting, and what was not finished by then gets no more time.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: an init system, a kubelet.
    Terminate,
}

impl StopSignal {
    /// The signal's name, for the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }

    /// What a process that this signal ended is said to have returned: 128 + its number.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Resolves at the first signal; clones all see the same one, also when it came before they asked.
#[derive(Debug, Clone)]
pub struct ShutdownSignal {
    seen: watch::Receiver<Option<StopSignal>>,
}

/// Begins to listen, before anything else is started, so that no signal is lost. Needs a tokio runtime.
pub fn listen() -> io::Result<ShutdownSignal> {
    let mut signals =
        Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? };
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

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!((StopSignal::Interrupt.exit_code(), StopSignal::Terminate.exit_code()), (130, 143));
    }

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
