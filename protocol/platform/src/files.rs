//! Files that are nobody else's business, what is certain about files after a crash, and what a text begins with.
//!
//! Unix has a mode. On Windows a new file inherits the access list of its folder: in a user's profile that is the user,
//! administrators and the system; elsewhere often everybody. Nothing is changed about that here.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;

/// What a file for its owner alone is made with.
pub const OWNER_ONLY: u32 = 0o600;

/// Has files that are made anew get this mode, where there are modes.
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

/// Whether the path still leads to this open file, or to another one that took its place.
pub fn is_in_place(path: &Path, file: &File) -> bool {
    match (std::fs::metadata(path), file.metadata()) {
        (Ok(there), Ok(here)) => identity(&there) == identity(&here),
        _ => false,
    }
}

/// Makes certain that the folder's newest names survive a crash. Windows writes these down in order by itself, and has no
/// call for it.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(windows) { Ok(()) } else { File::open(folder)?.sync_all() }
}

/// A file's text without the byte order mark that Windows' editors and shells may begin one with; nobody means it.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = std::fs::read_to_string(path)?;
    text.drain(..mark(text.as_bytes()));
    Ok(text)
}

/// How many bytes at the beginning are a byte order mark.
pub fn mark(text: &[u8]) -> usize {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if text.starts_with(MARK) { MARK.len() } else { 0 }
}

#[cfg(unix)]
fn identity(file: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (file.dev(), file.ino())
}

/// Its number cannot be asked for without unsafe code. One that took its name a moment ago may have got its time with it, but
/// not its length.
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
    fn a_file_that_was_moved_away_is_not_in_place_nor_is_another_of_its_name() {
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
    fn a_byte_order_mark_is_no_part_of_a_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        for (written, text) in [("\u{feff}one", "one"), ("\u{feff}", ""), ("o\u{feff}ne", "o\u{feff}ne"), ("", "")] {
            fs::write(&path, written).unwrap();
            assert_eq!(read_text(&path).unwrap(), text);
        }
    }
}
