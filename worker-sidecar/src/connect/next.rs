//! What to do once all is written, in the words of the shell that it is pasted into.

/// A shell, as far as its words differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shell {
    /// `sh` and its relatives.
    Posix,
    /// Windows' own.
    PowerShell,
}

impl Shell {
    /// The one that people have here.
    pub(super) const HERE: Self = if cfg!(windows) { Self::PowerShell } else { Self::Posix };

    fn unset(self, variables: &[String]) -> String {
        match self {
            Self::Posix => format!("unset {}", variables.join(" ")),
            Self::PowerShell => {
                let variables: Vec<String> = variables.iter().map(|variable| format!("Env:{variable}")).collect();
                format!("Remove-Item {}", variables.join(", "))
            }
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Posix => "modelrelay-worker",
            Self::PowerShell => r".\modelrelay-worker.exe",
        }
    }

    /// One word. What needs no quotes gets none, because it reads better.
    fn word(self, text: &str) -> String {
        let plain: &[u8] = match self {
            Self::Posix => b"-_./",
            Self::PowerShell => br"-_./\:",
        };
        if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || plain.contains(&byte)) {
            return text.to_owned();
        }
        match self {
            Self::Posix => format!("'{}'", text.replace('\'', r"'\''")),
            Self::PowerShell => format!("'{}'", doubled(text)),
        }
    }
}

/// What would stand in the way of a run of this file, and how to run it.
pub(super) fn next(file: &str, in_the_way: &[String], shell: Shell) -> String {
    let unset = match in_the_way {
        [] => String::new(),
        some => format!(
            "\nWhat is set here as variables would win over {file}: unset it first.\n\n  {}\n",
            shell.unset(some)
        ),
    };
    format!("{unset}\nNow run it:\n\n  {} --config {}\n", shell.program(), shell.word(file))
}

/// `PowerShell` takes curly quotes for quotes too.
fn doubled(text: &str) -> String {
    let mut doubled = String::with_capacity(text.len());
    for letter in text.chars() {
        if matches!(letter, '\'' | '\u{2018}'..='\u{201b}') {
            doubled.push(letter);
        }
        doubled.push(letter);
    }
    doubled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_is_told_in_its_words() {
        let set = ["PROXY_URL".to_owned(), "WORKER_SECRET".to_owned()];
        assert_eq!(
            next("worker.yaml", &set, Shell::Posix),
            "\nWhat is set here as variables would win over worker.yaml: unset it first.\n\n  \
            unset PROXY_URL WORKER_SECRET\n\nNow run it:\n\n  modelrelay-worker --config worker.yaml\n"
        );
        assert_eq!(
            next("worker.yaml", &set, Shell::PowerShell),
            "\nWhat is set here as variables would win over worker.yaml: unset it first.\n\n  \
            Remove-Item Env:PROXY_URL, Env:WORKER_SECRET\n\nNow run it:\n\n  .\\modelrelay-worker.exe --config worker.yaml\n"
        );
        assert_eq!(next("a/b.yaml", &[], Shell::Posix), "\nNow run it:\n\n  modelrelay-worker --config a/b.yaml\n");
    }

    #[test]
    fn a_file_stays_one_word() {
        for (file, posix, power_shell) in [
            ("Ann's $PATH.yaml", r"'Ann'\''s $PATH.yaml'", "'Ann''s $PATH.yaml'"),
            ("Ann’s.yaml", "'Ann’s.yaml'", "'Ann’’s.yaml'"),
            (r"C:\models\worker.yaml", r"'C:\models\worker.yaml'", r"C:\models\worker.yaml"),
        ] {
            assert_eq!((Shell::Posix.word(file).as_str(), Shell::PowerShell.word(file).as_str()), (posix, power_shell));
        }
    }
}
