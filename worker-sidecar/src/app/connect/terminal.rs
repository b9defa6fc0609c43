//! Questions on the terminal. They go to standard error, like a log; standard output is for results.

use std::io::{self, IsTerminal, Write};

use hidden::Modes;

/// A terminal and its original modes.
#[derive(Debug)]
pub(super) struct Terminal {
    modes: Modes,
}

impl Terminal {
    /// Opens the terminal; `None` if the program is not interactive.
    pub(super) fn open() -> Option<Self> {
        let stdin = io::stdin();
        let modes = Modes::now()?;
        (stdin.is_terminal() && io::stderr().is_terminal()).then_some(Self { modes })
    }

    /// Reads a line, without surrounding blanks; the default if it is empty.
    pub(super) fn prompt(&self, question: &str, default: Option<&str>) -> Result<String, String> {
        loop {
            let hint = default.map_or_else(String::new, |default| format!(" [{default}]"));
            let line = read_line(&format!("{question}{hint}: "))?;
            match (line.trim(), default) {
                ("", Some(default)) => return Ok(default.to_owned()),
                ("", None) => {}
                (line, _) => return Ok(line.to_owned()),
            }
        }
    }

    /// Reads a line without echo.
    pub(super) fn prompt_hidden(&self, question: &str) -> Result<String, String> {
        self.modes.read_hidden(&format!("{question}: ")).map(|line| line.trim().to_owned())
    }

    /// Reads yes or no; no for an empty line.
    pub(super) fn confirm(&self, question: &str) -> Result<bool, String> {
        let line = read_line(&format!("{question} [y/N]: "))?;
        Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
    }

    /// Restores the original modes, also when the user quits during a question.
    pub(super) fn restore(&self) {
        self.modes.restore();
    }
}

fn read_line(question: &str) -> Result<String, String> {
    let failed = |error| format!("cannot read from the terminal: {error}");
    let mut stderr = io::stderr();
    stderr.write_all(question.as_bytes()).and_then(|()| stderr.flush()).map_err(failed)?;
    let mut line = String::new();
    match io::stdin().read_line(&mut line).map_err(failed)? {
        0 => Err("the input ended before the last answer; nothing was written".to_owned()),
        _ => Ok(line),
    }
}

#[cfg(unix)]
mod hidden {
    use std::io;

    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    #[derive(Debug)]
    pub(super) struct Modes(Termios);

    impl Modes {
        pub(super) fn now() -> Option<Self> {
            tcgetattr(io::stdin()).ok().map(Self)
        }

        pub(super) fn read_hidden(&self, question: &str) -> Result<String, String> {
            let mut modes = self.0.clone();
            modes.local_modes.remove(LocalModes::ECHO);
            // Only the end of the line is echoed, or the next text would follow the question on the same line.
            modes.local_modes.insert(LocalModes::ECHONL);
            let failed = |error| format!("cannot turn off terminal echo: {error}");
            // Input from before the question was not meant for it, and may already be on the screen.
            tcsetattr(io::stdin(), OptionalActions::Flush, &modes).map_err(failed)?;
            let line = super::read_line(question);
            self.restore();
            line
        }

        pub(super) fn restore(&self) {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        }
    }
}

/// The modes of a Windows console require unsafe code, so a library hides the input.
#[cfg(windows)]
mod hidden {
    #[derive(Debug)]
    pub(super) struct Modes;

    impl Modes {
        #[allow(clippy::unnecessary_wraps)] // On Unix there may be none.
        pub(super) fn now() -> Option<Self> {
            Some(Self)
        }

        #[allow(clippy::unused_self)]
        pub(super) fn read_hidden(&self, question: &str) -> Result<String, String> {
            rpassword::prompt_password(question).map_err(|error| format!("cannot turn off console echo: {error}"))
        }

        /// A shell sets its console's modes itself, before each line.
        #[allow(clippy::unused_self)]
        pub(super) fn restore(&self) {}
    }
}
