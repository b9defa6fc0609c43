//! Private files, durability of files after a crash, and byte order marks.
//!
//! Unix has file modes. On Windows a new file inherits the access list of its folder: in a user's profile that is the
//! user, administrators and the system; elsewhere often all users. This module does not change that.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter};
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

/// Creates a file that only its owner may access, in place of one that a crash may have left behind. It is always a new
/// one, so that its mode is right and a link is not followed.
pub fn create_private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) | Ok(()) => {}
    }
    with_mode(OpenOptions::new().write(true).create_new(true), OWNER_ONLY).open(path)
}

/// Replaces a file by a new one that only its owner may access, up to and including the rename; [`sync_folder`] makes
/// that survive a crash. `temporary` is in the same folder. Returns the new size, in bytes. After an error the old file
/// is unchanged.
pub fn replace_private(
    path: &Path,
    temporary: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<u64> {
    let written = create_private(temporary).and_then(|file| {
        let mut writer = BufWriter::new(file);
        write(&mut writer)?;
        let file = writer.into_inner()?;
        file.sync_all()?;
        let size = file.metadata()?.len();
        fs::rename(temporary, path)?;
        Ok(size)
    });
    if written.is_err() {
        // Its bytes may be the reason why the disk is full.
        let _ = fs::remove_file(temporary);
    }
    written
}

/// The folder of a file.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// True if the path still leads to this open file and not to one that replaced it.
pub fn is_in_place(path: &Path, file: &File) -> bool {
    match (fs::metadata(path), file.metadata()) {
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
    let mut text = fs::read_to_string(path)?;
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
    use std::io::Write;

    use super::*;

    #[test]
    fn failed_replacement_keeps_file_and_leaves_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let (path, new) = (folder.path().join("file"), folder.path().join("file.new"));
        fs::write(&new, "left behind by a crash").unwrap();
        assert_eq!(replace_private(&path, &new, |file| file.write_all(b"one")).unwrap(), 3);
        let full = |file: &mut BufWriter<File>| {
            file.write_all(b"two")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        assert_eq!(replace_private(&path, &new, full).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_without_folder_is_in_present_one() {
        assert_eq!([folder_of(Path::new("a")), folder_of(Path::new("/b/a"))], [Path::new("."), Path::new("/b")]);
    }

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
