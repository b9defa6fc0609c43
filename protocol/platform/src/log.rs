//! The destination of log lines: standard error, or the file of a Windows service, which has no standard error.
//!
//! A thread of its own writes them. A reader of standard error that stops reading, such as a pager or a stuck log
//! collector, thus never stops the program: lines wait for it, and are dropped and counted once too many wait.
//!
//! The log rotates its file itself: a full file becomes `NAME.1` and replaces the previous one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

pub use self::fields::LineFields;
use self::lines::Lines;
use crate::files;

mod fields;
mod lines;

/// The time that writing the last lines may take at the end of the program.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);

static LINES: Lines = Lines::new();

/// Room for some hundred thousand lines. At most two files of this size exist.
const MAX_BYTES: u64 = 16 << 20;

static FILE: OnceLock<Mutex<LogFile>> = OnceLock::new();

/// Writes log lines and panics to this file from now on. Only the first call has an effect.
pub fn to_file(path: &Path) -> io::Result<()> {
    let file = LogFile::open(path.to_path_buf(), MAX_BYTES)?;
    let _ = FILE.set(Mutex::new(file));
    std::panic::set_hook(Box::new(|panic| print_error(&panic.to_string())));
    Ok(())
}

/// Starts the thread that writes log lines, and returns the constructor of a line's writer. [`finish`] must be called
/// before the program ends.
pub fn start() -> fn() -> LineWriter {
    LINES.begin();
    let started = thread::Builder::new().name("log".to_owned()).spawn(|| LINES.write_to(Destination));
    if started.is_err() {
        // Without a thread, each line is written by the thread that logs it.
        LINES.end(Duration::ZERO);
        LINES.write_to(Destination);
    }
    || LineWriter(())
}

/// Writes the lines that wait, within a second. Later lines are written by the thread that logs them.
pub fn finish() {
    LINES.end(FINISH_TIMEOUT);
}

/// Returns the number of log lines that were dropped because standard error was not read.
pub fn dropped_lines() -> u64 {
    LINES.dropped()
}

/// True if the log goes to a terminal, which can show colours.
pub fn is_terminal() -> bool {
    FILE.get().is_none() && io::stderr().is_terminal()
}

/// Prints in one line why the program ends, before a log is set up.
pub fn print_error(line: &str) {
    let _ = Destination.write_all(format!("{line}\n").as_bytes());
}

/// Writes one log line. Each write must pass a whole line.
#[derive(Debug)]
pub struct LineWriter(());

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.write_all(line).map(|()| line.len())
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        if LINES.push(line) { Ok(()) } else { Destination.write_all(line) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error, or the file.
#[derive(Debug)]
struct Destination;

impl Write for Destination {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_log_is_rotated_and_previous_one_replaced() {
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
    fn restarted_program_appends_to_its_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker.log");
        LogFile::open(path.clone(), 100).unwrap().write(b"one\n").unwrap();
        LogFile::open(path.clone(), 100).unwrap().write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }
}
