//! The shells that printed commands are pasted into.

/// A shell, as far as its syntax differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shell {
    /// `sh` and its relatives.
    Posix,
    /// The Windows shell.
    PowerShell,
}

impl Shell {
    /// The usual shell of this system.
    pub const HERE: Self = if cfg!(windows) { Self::PowerShell } else { Self::Posix };

    /// Formats the text as one word. A text that needs no quotes gets none, which is easier to read.
    pub fn word(self, text: &str) -> String {
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

/// `PowerShell` treats curly quotes as quotes too.
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
    fn file_name_is_quoted_as_one_word() {
        for (file, posix, power_shell) in [
            ("Ann's $PATH.yaml", r"'Ann'\''s $PATH.yaml'", "'Ann''s $PATH.yaml'"),
            ("Ann’s.yaml", "'Ann’s.yaml'", "'Ann’’s.yaml'"),
            (r"C:\models\worker.yaml", r"'C:\models\worker.yaml'", r"C:\models\worker.yaml"),
        ] {
            assert_eq!((Shell::Posix.word(file).as_str(), Shell::PowerShell.word(file).as_str()), (posix, power_shell));
        }
    }
}
