//! A file of lines that is only appended to: the audit log, the request journal and the usage ledger.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use modelrelay_platform::files;

/// A file of lines that its owner alone can read. If it was moved away, as logrotate does, the next line creates it
/// again.
#[derive(Debug)]
pub(super) struct AppendFile {
    path: PathBuf,
    file: File,
    /// The size at which the file is moved away; `None` for no limit.
    limit: Option<u64>,
    /// True if the last line is incomplete.
    is_torn: bool,
}

impl AppendFile {
    /// Opens or creates a file that may grow without a limit.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        Ok(Self { file: open(&path)?, is_torn: ends_within_line(&path), path, limit: None })
    }

    /// Opens or creates a file of at most `limit` bytes. It is moved to a second file of that size, which is
    /// overwritten.
    pub(super) fn open_limited(path: PathBuf, limit: u64) -> io::Result<Self> {
        Ok(Self { limit: Some(limit), ..Self::open(path)? })
    }

    /// Makes everything that was written survive a failure of the machine, if the kind of file allows that.
    pub(super) fn sync(&self) -> io::Result<()> {
        match self.file.sync_data() {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            synced => synced,
        }
    }

    /// The path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends complete lines. After an error, part of them may be in a file without a limit, and none in one with a
    /// limit.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        if !files::is_in_place(&self.path, &self.file) {
            self.reopen()?;
        }
        let mut before = self.file.metadata()?.len();
        let torn = u64::from(self.is_torn);
        if self.limit.is_some_and(|limit| before > 0 && before + torn + lines.len() as u64 > limit) {
            fs::rename(&self.path, previous(&self.path))?;
            self.reopen()?;
            before = self.file.metadata()?.len();
        }
        if self.is_torn {
            self.file.write_all(b"\n")?;
            self.is_torn = false;
            before += 1;
        }
        self.file.write_all(lines).inspect_err(|_| {
            let has_grown = self.file.metadata().is_ok_and(|now| now.len() > before);
            // A file without a limit may have several writers, so it is not cut.
            self.is_torn = has_grown && (self.limit.is_none() || self.file.set_len(before).is_err());
        })
    }

    fn reopen(&mut self) -> io::Result<()> {
        self.file = open(&self.path)?;
        self.is_torn = false;
        Ok(())
    }
}

/// True if the last line is incomplete, because its writer was killed.
fn ends_within_line(path: &Path) -> bool {
    let last_byte = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::End(-1))?;
        let mut byte = [0];
        file.read_exact(&mut byte)?;
        io::Result::Ok(byte)
    };
    // An error means that it is empty, or no file that has an end.
    last_byte().is_ok_and(|byte| byte != *b"\n")
}

/// The path to which a full file is moved.
fn previous(path: &Path) -> PathBuf {
    next_to(path, ".1")
}

/// The path with an ending added.
pub(super) fn next_to(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn open(path: &Path) -> io::Result<File> {
    files::with_mode(OpenOptions::new().append(true).create(true), files::OWNER_ONLY).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_file_is_moved_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut file = AppendFile::open_limited(path.clone(), 10).unwrap();
        let contents = || [path.clone(), previous(&path)].map(|path| fs::read_to_string(path).unwrap_or_default());
        for (line, expected) in [
            ("one\n", ["one\n", ""]),
            ("two\ntw\n", ["two\ntw\n", "one\n"]),
            ("3\n", ["two\ntw\n3\n", "one\n"]),
            ("4\n", ["4\n", "two\ntw\n3\n"]),
            ("longer than the limit\n", ["longer than the limit\n", "4\n"]),
        ] {
            file.write(line.as_bytes()).unwrap();
            assert_eq!(contents(), expected);
        }
        let names = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 2);
    }

    #[test]
    fn existing_lines_count_towards_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "12345678\n").unwrap();
        let mut file = AppendFile::open_limited(path.clone(), 10).unwrap();
        file.write(b"9\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "9\n");
        assert_eq!(fs::read_to_string(previous(&path)).unwrap(), "12345678\n");
    }

    #[test]
    fn incomplete_line_is_ended_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "one\ntw").unwrap();
        let mut file = AppendFile::open(path.clone()).unwrap();
        file.write(b"three\n").unwrap();
        file.sync().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntw\nthree\n");
    }

    #[test]
    fn moved_file_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut file = AppendFile::open(path.clone()).unwrap();
        file.write(b"one\n").unwrap();
        fs::rename(&path, folder.path().join("away")).unwrap();
        file.write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
    }

    #[test]
    fn unmovable_file_does_not_exceed_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut file = AppendFile::open_limited(path.clone(), 5).unwrap();
        file.write(b"one\n").unwrap();
        // A folder cannot be replaced with a file.
        fs::create_dir(previous(&path)).unwrap();
        assert!(file.write(b"two\n").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\n");
        fs::remove_dir(previous(&path)).unwrap();
        file.write(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
    }
}
