//! Private files, durability of files after a crash, and byte order marks.
//!
//! Unix has file modes. On Windows a new file inherits the access list of its folder: in a user's profile that is the
//! user, administrators and the system; elsewhere often all users. This module does not change that.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;

/// The mode of a file that only its owner may access.
pub const OWNER_ONLY: u32 = 0o600;

/// Creates new files with this mode, on systems that have modes.
pub fn with_mode(options: &mut OpenOptions, mode: u32) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(mode)
    }
    #[cfg(not(unix))]
    {
        let _ = mode;
        options
    }
}

/// True if the path still leads to this open file and not to one that replaced it.
pub fn is_in_place(path: &Path, file: &File) -> bool {
    match (std::fs::metadata(path), file.metadata()) {
        (Ok(there), Ok(here)) => identity(&there) == identity(&here),
        _ => false,
    }
}

/// Makes new names in the folder survive a crash. Windows orders these writes itself and has no call for it.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(windows) { Ok(()) } else { File::open(folder)?.sync_all() }
}

/// Reads a file's text without the byte order mark that Windows editors and shells may put at its beginning.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = std::fs::read_to_string(path)?;
    text.drain(..mark(text.as_bytes()));
    Ok(text)
}

/// The length of the byte order mark at the beginning, in bytes; 0 if the text has none.
pub fn mark(text: &[u8]) -> usize {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if text.starts_with(MARK) { MARK.len() } else { 0 }
}

#[cfg(unix)]
fn identity(file: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (file.dev(), file.ino())
}

/// Reading the file's index would need unsafe code. A file that replaced another a moment ago may have inherited its
/// creation time, but not its length.
#[cfg(windows)]
fn identity(file: &Metadata) -> (u64, u64) {
    use std::os::windows::fs::MetadataExt;
    (file.creation_time(), file.file_size())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn moved_or_replaced_file_is_not_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "one").unwrap();
        let file = File::open(&path).unwrap();
        assert!(is_in_place(&path, &file));
        fs::rename(&path, folder.path().join("log.1")).unwrap();
        assert!(!is_in_place(&path, &file));
        fs::write(&path, "").unwrap();
        assert!(!is_in_place(&path, &file));
    }

    #[test]
    fn byte_order_mark_is_stripped_from_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        for (written, text) in [("\u{feff}one", "one"), ("\u{feff}", ""), ("o\u{feff}ne", "o\u{feff}ne"), ("", "")] {
            fs::write(&path, written).unwrap();
            assert_eq!(read_text(&path).unwrap(), text);
        }
    }
}
