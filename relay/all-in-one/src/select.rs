//! The program that a command line means: the relay, the worker, or `modelrelay` itself.

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// A word before the program's own: this process is a part of its [parent](modelrelay_platform::parent).
pub(crate) const PART: &str = "part";

/// A program with a command line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Relay,
    Worker,
}

/// A command line, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    /// `None`: a command of `modelrelay` itself.
    pub(crate) program: Option<Program>,
    /// True if a parent runs this process as a part of itself.
    pub(crate) is_part: bool,
    /// The program's command line, beginning with its name.
    pub(crate) words: Vec<OsString>,
}

impl Program {
    const ALL: [Self; 2] = [Self::Relay, Self::Worker];

    /// The word that selects it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Worker => "worker",
        }
    }

    /// The name that help shows.
    fn title(self) -> OsString {
        format!("modelrelay {}", self.word()).into()
    }

    fn of_word(word: &OsStr) -> Option<Self> {
        Self::ALL.into_iter().find(|program| word == program.word())
    }

    /// By the name of its file: `modelrelay-worker install` copies this file under that name.
    fn of_file(file: &OsStr) -> Option<Self> {
        let name = Path::new(file).file_stem()?.to_str()?;
        Self::of_word(name.strip_prefix("modelrelay-")?.as_ref())
    }
}

/// Takes a command line apart. A word wins over the name of the file, because a program starts itself again by its
/// word.
pub(crate) fn selected(mut words: Vec<OsString>) -> Selection {
    let is_part = words.get(1).is_some_and(|word| word == PART);
    if is_part {
        words.remove(1);
    }
    let by_word = words.get(1).and_then(|word| Program::of_word(word));
    if let Some(program) = by_word {
        words.splice(..2, [program.title()]);
    }
    let program = by_word.or_else(|| Program::of_file(words.first()?));
    Selection { program, is_part, words }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(words: &[&str]) -> (Option<Program>, bool, String) {
        let selection = selected(words.iter().map(OsString::from).collect());
        let words: Vec<_> = selection.words.iter().map(|word| word.to_string_lossy()).collect();
        (selection.program, selection.is_part, words.join("|"))
    }

    #[test]
    fn first_word_selects_the_program() {
        let relay = Some(Program::Relay);
        assert_eq!(selection(&["m", "relay", "--port", "1"]), (relay, false, "modelrelay relay|--port|1".to_owned()));
        assert_eq!(selection(&["m", "part", "worker"]), (Some(Program::Worker), true, "modelrelay worker".to_owned()));
        assert_eq!(selection(&["m", "up", "relay"]), (None, false, "m|up|relay".to_owned()));
        assert_eq!(selection(&["m"]), (None, false, "m".to_owned()));
    }

    #[test]
    fn file_name_selects_unless_a_word_does() {
        let worker = Some(Program::Worker);
        assert_eq!(
            selection(&["/bin/modelrelay-worker", "demo"]),
            (worker, false, "/bin/modelrelay-worker|demo".to_owned())
        );
        assert_eq!(selection(&["/bin/modelrelay-worker", "worker", "demo"]).2, "modelrelay worker|demo");
        assert_eq!(selection(&["modelrelay-relay.exe"]).0, Some(Program::Relay));
        assert_eq!(selection(&["/bin/modelrelay-operator"]).0, None);
    }
}
