//! Code that several targets share.

use std::path::{Path, PathBuf};

use arbitrary::Arbitrary;

/// The positions at which a stream of bytes is cut.
#[derive(Arbitrary, Clone, Debug)]
pub struct Cuts(Vec<u16>);

impl Cuts {
    /// Returns `bytes` in pieces of these sizes, including empty ones; the rest is the last piece.
    pub fn of<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = bytes;
        let mut sizes = self.0.iter();
        let mut is_over = false;
        std::iter::from_fn(move || match sizes.next() {
            Some(&size) => {
                let (piece, after) = rest.split_at(usize::from(size).min(rest.len()));
                rest = after;
                Some(piece)
            }
            None => (!std::mem::replace(&mut is_over, true)).then_some(rest),
        })
    }
}

/// A folder, in memory if possible, for the configuration file of each run. Programs read their file from disk, and
/// that is tested too.
pub struct ConfigFolder(tempfile::TempDir);

impl ConfigFolder {
    /// Creates the folder with the secret files that the corpus names.
    pub fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let folder = folder.expect("a folder");
        for name in ["secret", "other"] {
            std::fs::write(folder.path().join(name), format!("{name}-0123456789abcdef\n")).expect("a file");
        }
        Self(folder)
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    }
}

impl Default for ConfigFolder {
    fn default() -> Self {
        Self::new()
    }
}

/// True if a configuration names files that block or never end when they are read, which only an administrator can do.
pub fn names_devices(content: &[u8]) -> bool {
    ["/dev", "/proc", "/sys"].iter().any(|folder| content.windows(folder.len()).any(|at| at == folder.as_bytes()))
}

/// Asserts that an error is one line, whatever the file contains.
pub fn assert_one_line(message: &str) {
    assert!(!message.is_empty() && !message.contains(char::is_control), "not one line: {message:?}");
}

/// Returns the names that an error about an unknown key lists as the known ones: "expected one of `a`, `b`".
pub fn expected_names(message: &str) -> Vec<String> {
    let names = message.split_once("expected one of ").map_or("", |(_, names)| names);
    names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// True if an error repeats this secret. The part after ", expected " is not from the file, and may begin like a
/// secret.
pub fn shows(message: &str, secret: &str) -> bool {
    message.split(", expected ").next().unwrap_or_default().contains(secret)
}

/// Returns the long scalars below keys of these names, which no message may repeat. Short ones may occur by chance, and
/// one that also occurs elsewhere in the file is no secret.
pub fn secrets_below(yaml: &serde_yaml::Value, keys: &[&str]) -> Vec<String> {
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    collect(yaml, keys, false, &mut inside, &mut outside);
    inside.retain(|secret| secret.len() >= 8 && !outside.iter().any(|other| other.contains(secret.as_str())));
    inside
}

fn collect(
    yaml: &serde_yaml::Value,
    keys: &[&str],
    is_inside: bool,
    inside: &mut Vec<String>,
    outside: &mut Vec<String>,
) {
    match yaml {
        serde_yaml::Value::String(text) => if is_inside { inside } else { outside }.push(text.clone()),
        serde_yaml::Value::Sequence(items) => {
            items.iter().for_each(|item| collect(item, keys, is_inside, inside, outside));
        }
        serde_yaml::Value::Mapping(entries) => {
            for (key, value) in entries {
                let key = key.as_str().unwrap_or_default();
                outside.push(key.to_owned());
                collect(value, keys, is_inside || keys.contains(&key), inside, outside);
            }
        }
        serde_yaml::Value::Tagged(tagged) => collect(&tagged.value, keys, is_inside, inside, outside),
        serde_yaml::Value::Null | serde_yaml::Value::Bool(_) | serde_yaml::Value::Number(_) => {}
    }
}
