//! Questions to whoever sits at the terminal. They go to standard error, as a log would; standard output is for results.

use std::io::{self, IsTerminal, Write};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// A terminal, and how it was when we came.
#[derive(Debug)]
pub(super) struct Terminal {
    modes: Termios,
}

impl Terminal {
    /// Where there is somebody to ask.
    pub(super) fn open() -> Option<Self> {
        let stdin = io::stdin();
        let modes = tcgetattr(&stdin).ok()?;
        (stdin.is_terminal() && io::stderr().is_terminal()).then_some(Self { modes })
    }

    /// A line, without blanks around it; the default for an empty one.
    pub(super) fn ask(&self, question: &str, default: Option<&str>) -> Result<String, String> {
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

    /// A line that does not appear on the screen.
    pub(super) fn ask_hidden(&self, question: &str) -> Result<String, String> {
        let mut modes = self.modes.clone();
        modes.local_modes.remove(LocalModes::ECHO);
        // The end of the line alone is shown, or the next words would stand behind the question.
        modes.local_modes.insert(LocalModes::ECHONL);
        let failed = |error| format!("the terminal cannot hide what is typed: {error}");
        // What was typed before the question was not meant for it, and may be on the screen already.
        tcsetattr(io::stdin(), OptionalActions::Flush, &modes).map_err(failed)?;
        let line = read_line(&format!("{question}: "));
        self.restore();
        line.map(|line| line.trim().to_owned())
    }

    /// Yes or no; no for an empty line.
    pub(super) fn confirm(&self, question: &str) -> Result<bool, String> {
        let line = read_line(&format!("{question} [y/N]: "))?;
        Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
    }

    /// As it was when we came: also when somebody leaves in the middle of a question.
    pub(super) fn restore(&self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.modes);
    }
}

fn read_line(question: &str) -> Result<String, String> {
    let failed = |error| format!("the terminal cannot be read: {error}");
    let mut stderr = io::stderr();
    stderr.write_all(question.as_bytes()).and_then(|()| stderr.flush()).map_err(failed)?;
    let mut line = String::new();
    match io::stdin().read_line(&mut line).map_err(failed)? {
        0 => Err("the input ended before the last answer; nothing was written".to_owned()),
        _ => Ok(line),
    }
}
