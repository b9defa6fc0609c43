//! The destination of log lines: standard error, or the file of a Windows service, which has no standard error.
//!
//! The log rotates its file itself: a full file becomes `NAME.1` and replaces the previous one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::files;

/// Room for some hundred thousand lines. At most two files of this size exist.
const MAX_BYTES: u64 = 16 << 20;

static FILE: OnceLock<Mutex<LogFile>> = OnceLock::new();

/// Writes log lines and panics to this file from now on. Only the first call has an effect.
pub fn to_file(path: &Path) -> io::Result<()> {
    let file = LogFile::open(path.to_path_buf(), MAX_BYTES)?;
    let _ = FILE.set(Mutex::new(file));
    std::panic::set_hook(Box::new(|panic| complain(&panic.to_string())));
    Ok(())
}

/// Returns the writer of log lines. Each call must pass a whole line.
pub fn writer() -> Writer {
    Writer(())
}

/// True if the log goes to a terminal, which can show colours.
pub fn is_terminal() -> bool {
    FILE.get().is_none() && io::stderr().is_terminal()
}

/// Prints in one line why the program ends, before a log is set up.
pub fn complain(line: &str) {
    let _ = writer().write_all(format!("{line}\n").as_bytes());
}

/// Writes log lines.
#[derive(Debug)]
pub struct Writer(());

impl Write for Writer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.write_all(line).map(|()| line.len())
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        match FILE.get() {
            Some(file) => lock(file).write(line),
            None => io::stderr().write_all(line),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match FILE.get() {
            Some(_) => Ok(()),
            None => io::stderr().flush(),
        }
    }
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    /// `None` after a failure: the next line tries to open it again.
    file: Option<File>,
    bytes: u64,
    max_bytes: u64,
}

impl LogFile {
    fn open(path: PathBuf, max_bytes: u64) -> io::Result<Self> {
        let mut log = Self { path, file: None, bytes: 0, max_bytes };
        log.file()?;
        Ok(log)
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if self.bytes >= self.max_bytes {
            // The file is closed first. If it cannot be renamed, it grows, and the next line tries again.
            self.file = None;
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            let _ = fs::rename(&self.path, older);
        }
        let written = self.file()?.write_all(line);
        self.bytes += line.len() as u64;
        written.inspect_err(|_| self.file = None)
    }

    fn file(&mut self) -> io::Result<&mut File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => {
                let mut options = OpenOptions::new();
                let file = files::with_mode(options.append(true).create(true), files::OWNER_ONLY).open(&self.path)?;
                self.bytes = file.metadata()?.len();
                file
            }
        };
        Ok(self.file.insert(file))
    }
}

fn lock(file: &Mutex<LogFile>) -> MutexGuard<'_, LogFile> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_is_moved_away_and_the_one_before_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker.log");
        let mut log = LogFile::open(path.clone(), 8).unwrap();
        for line in ["first\n", "2nd\n", "third\n", "4th\n", "fifth\n"] {
            log.write(line.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "fifth\n");
        assert_eq!(fs::read_to_string(folder.path().join("worker.log.1")).unwrap(), "third\n4th\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_program_that_is_started_again_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker.log");
        LogFile::open(path.clone(), 100).unwrap().write(b"one\n").unwrap();
        LogFile::open(path.clone(), 100).unwrap().write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }
}
