//! What asks a process to stop.
//!
//! Unix has SIGINT and SIGTERM. A [parent](crate::parent) closes standard input on every system. Windows has Ctrl-C, and counts as SIGTERM: Ctrl-Break, the closing of the console, its own
//! shutdown, and the service manager's stop. After a closed console it leaves a process five seconds, whatever that asks for.

use std::io;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: an init system, a kubelet.
    Terminate,
}

impl StopSignal {
    /// Its name, for the log.
    pub fn as_str(self) -> &'static str {
        match (self, cfg!(windows)) {
            (Self::Interrupt, false) => "SIGINT",
            (Self::Terminate, false) => "SIGTERM",
            (Self::Interrupt, true) => "Ctrl-C",
            (Self::Terminate, true) => "stop",
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

/// All of them, heard from now on.
#[derive(Debug)]
pub struct Signals(of_system::Signals);

impl Signals {
    /// Begins to listen. Needs a tokio runtime.
    pub fn listen() -> io::Result<Self> {
        of_system::Signals::listen().map(Self)
    }

    /// Waits for the next one.
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
                () = parent::stop_asked() => StopSignal::Terminate,
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
                // To a service its manager has said so before. Unheard, but listened to, it ends nothing.
                _ = self.shutdown.recv(), if !service::is_running() => StopSignal::Terminate,
                () = service::stop_asked() => StopSignal::Terminate,
                () = parent::stop_asked() => StopSignal::Terminate,
            }
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
}
