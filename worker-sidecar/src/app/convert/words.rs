//! Commands in llama-swap's format: one text with macros, comments and shell quoting.

use std::collections::BTreeMap;

/// The nesting limit of macros; deeper ones are circular.
const MAX_DEPTH: usize = 16;

/// The names that `${…}` may use.
pub(super) struct Macros<'a> {
    /// The macros of the file and of the model; the latter take precedence.
    pub(super) named: BTreeMap<String, String>,
    /// Looks up `${env.NAME}`.
    pub(super) variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Macros<'_> {
    /// Replaces every macro except `${PORT}`, which has the same meaning in `worker.yaml`, and `${PID}`.
    pub(super) fn expand(&self, text: &str) -> Result<String, String> {
        self.expand_within(text, 0)
    }

    /// Replaces every `${env.NAME}`, and nothing else.
    pub(super) fn expand_variables(&self, text: &str) -> Result<String, String> {
        replace(text, &|name| if name.starts_with("env.") { self.value(name).map(Some) } else { Ok(None) })
    }

    fn expand_within(&self, text: &str, depth: usize) -> Result<String, String> {
        if depth > MAX_DEPTH {
            return Err("the macros refer to each other in a circle".to_owned());
        }
        replace(text, &|name| match name {
            "PORT" | "PID" => Ok(None),
            _ => self.expand_within(&self.value(name)?, depth + 1).map(Some),
        })
    }

    fn value(&self, name: &str) -> Result<String, String> {
        match name.strip_prefix("env.") {
            Some(variable) => (self.variable)(variable)
                .ok_or_else(|| format!("${{{name}}} is not set in the environment: set {variable} and convert again")),
            None => self.named.get(name).cloned().ok_or_else(|| format!("unknown macro ${{{name}}}")),
        }
    }
}

/// Replaces each `${…}` for which `by` returns a text.
fn replace(text: &str, by: &dyn Fn(&str) -> Result<Option<String>, String>) -> Result<String, String> {
    let mut replaced = String::new();
    let mut rest = text;
    while let Some((before, (name, after))) =
        rest.split_once("${").and_then(|(before, from)| Some((before, from.split_once('}')?)))
    {
        replaced.push_str(before);
        replaced.push_str(&by(name)?.unwrap_or_else(|| format!("${{{name}}}")));
        rest = after;
    }
    replaced.push_str(rest);
    Ok(replaced)
}

/// Removes the lines that begin with `#`. Macros in them are ignored, even unknown ones.
pub(super) fn without_comments(command: &str) -> String {
    let lines: Vec<&str> = command.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    lines.join("\n")
}

/// Splits a command into words as llama-swap does: without comments, with a blank for a backslash at the end of a line
/// (trailing blanks are ignored), and otherwise like a POSIX shell.
pub(super) fn split(command: &str) -> Result<Vec<String>, String> {
    let text = without_comments(command);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.trim().strip_suffix('\\').map_or_else(|| line.to_owned(), |begun| format!("{begun} ")))
        .collect();
    let text = lines.join("\n");
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' => quoted(&mut letters, '\'', word.get_or_insert_default())?,
            '"' => quoted(&mut letters, '"', word.get_or_insert_default())?,
            '\\' => word.get_or_insert_default().extend(letters.next()),
            letter if letter.is_whitespace() => words.extend(word.take()),
            letter => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Reads up to the closing quote.
fn quoted(letters: &mut std::str::Chars<'_>, quote: char, word: &mut String) -> Result<(), String> {
    while let Some(letter) = letters.next() {
        match letter {
            letter if letter == quote => return Ok(()),
            '\\' if quote == '"' => match letters.next() {
                Some(next @ ('"' | '\\' | '$' | '`')) => word.push(next),
                Some(next) => word.extend(['\\', next]),
                None => break,
            },
            letter => word.push(letter),
        }
    }
    Err(format!("the command has an unclosed {quote}"))
}

/// Returns the value of a flag, as `--flag value` or `--flag=value`; the last one takes effect.
pub(super) fn flag<'a>(words: &'a [String], names: &[&str]) -> Option<&'a str> {
    let mut found = None;
    for (index, word) in words.iter().enumerate() {
        if names.contains(&word.as_str()) {
            found = words.get(index + 1).map(String::as_str);
        } else if let Some((name, value)) = word.split_once('=')
            && names.contains(&name)
        {
            found = Some(value);
        }
    }
    found
}
