//! The signals that stop a process.
//!
//! Unix has SIGINT and SIGTERM. A [parent](crate::parent) closes standard input on every system. Windows has Ctrl-C.
//! Ctrl-Break, the closing of the console, a system shutdown, and the service manager's stop are handled like SIGTERM.
//! After the console is closed, Windows gives a process five seconds, whatever it requests.

use std::io;

/// A request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: an init system, a kubelet.
    Terminate,
}

impl StopSignal {
    /// The name for the log.
    pub fn as_str(self) -> &'static str {
        match (self, cfg!(windows)) {
            (Self::Interrupt, false) => "SIGINT",
            (Self::Terminate, false) => "SIGTERM",
            (Self::Interrupt, true) => "Ctrl-C",
            (Self::Terminate, true) => "stop",
        }
    }

    /// The exit code that shells report for a process that this signal ended: 128 + its number.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// A listener for all stop signals.
#[derive(Debug)]
pub struct Signals(of_system::Signals);

impl Signals {
    /// Starts listening. Requires a tokio runtime.
    pub fn listen() -> io::Result<Self> {
        of_system::Signals::listen().map(Self)
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> StopSignal {
        self.0.next().await
    }
}

#[cfg(unix)]
mod of_system {
    use std::io;

    use tokio::signal::unix::{Signal, SignalKind, signal};

    use super::StopSignal;
    use crate::parent;

    #[derive(Debug)]
    pub(super) struct Signals {
        interrupt: Signal,
        terminate: Signal,
    }

    impl Signals {
        pub(super) fn listen() -> io::Result<Self> {
            Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
        }

        pub(super) async fn next(&mut self) -> StopSignal {
            tokio::select! {
                _ = self.interrupt.recv() => StopSignal::Interrupt,
                _ = self.terminate.recv() => StopSignal::Terminate,
                () = parent::stop_requested() => StopSignal::Terminate,
            }
        }
    }
}

#[cfg(windows)]
mod of_system {
    use std::io;

    use tokio::signal::windows::{
        CtrlBreak, CtrlC, CtrlClose, CtrlShutdown, ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown,
    };

    use super::StopSignal;
    use crate::{parent, service};

    #[derive(Debug)]
    pub(super) struct Signals {
        interrupt: CtrlC,
        break_key: CtrlBreak,
        close: CtrlClose,
        shutdown: CtrlShutdown,
    }

    impl Signals {
        pub(super) fn listen() -> io::Result<Self> {
            Ok(Self {
                interrupt: ctrl_c()?,
                break_key: ctrl_break()?,
                close: ctrl_close()?,
                shutdown: ctrl_shutdown()?,
            })
        }

        pub(super) async fn next(&mut self) -> StopSignal {
            tokio::select! {
                _ = self.interrupt.recv() => StopSignal::Interrupt,
                _ = self.break_key.recv() => StopSignal::Terminate,
                _ = self.close.recv() => StopSignal::Terminate,
                // The service manager has notified a service already. The handler only keeps this signal from ending
                // the process.
                _ = self.shutdown.recv(), if !service::is_running() => StopSignal::Terminate,
                () = service::stop_requested() => StopSignal::Terminate,
                () = parent::stop_requested() => StopSignal::Terminate,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_shell_convention() {
        assert_eq!((StopSignal::Interrupt.exit_code(), StopSignal::Terminate.exit_code()), (130, 143));
    }
}
