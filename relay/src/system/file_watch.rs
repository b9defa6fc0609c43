//! Follows a small file by its content.
//!
//! A mounted Secret changes by a swapped symlink, which shows in no modification time that could be trusted. So the
//! file is read each second and compared by its hash.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use modelrelay_platform::files;
use sha2::{Digest, Sha256};

use crate::system::blocking;

/// The time between two reads of a file.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// The content of a file, or why it cannot be read.
pub type Content = Result<Vec<u8>, String>;

/// One file, and its last state.
#[derive(Debug)]
pub struct FileWatch {
    path: PathBuf,
    limit: u64,
    seen: Option<LastRead>,
}

#[derive(Debug, PartialEq, Eq)]
enum LastRead {
    Digest([u8; 32]),
    Unreadable(String),
}

impl FileWatch {
    /// Creates a watch of a file of at most `limit` bytes, without a first read.
    pub fn new(path: &Path, limit: u64) -> Self {
        Self { path: path.to_path_buf(), limit, seen: None }
    }

    /// Returns the content if it differs from the last read. Blocks.
    pub fn poll(&mut self) -> Option<Content> {
        let (content, seen) = read(&self.path, self.limit);
        self.take(content, seen)
    }

    /// Waits until a read differs from the last one. Cancel safe: the next call returns a change that a dropped one
    /// found.
    pub async fn changed(&mut self) -> Content {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let (path, limit) = (self.path.clone(), self.limit);
            // A file on a network mount may be slow, and must not block a thread that serves requests.
            let Ok((content, seen)) = blocking::run(move || read(&path, limit)).await else { continue };
            if let Some(content) = self.take(content, seen) {
                return content;
            }
        }
    }

    fn take(&mut self, content: Content, seen: LastRead) -> Option<Content> {
        let seen = Some(seen);
        (self.seen != seen).then(|| {
            self.seen = seen;
            content
        })
    }
}

/// Reads a file's content without a byte order mark. An error if it is larger than `limit` bytes.
pub fn read_bounded(path: &Path, limit: u64) -> Content {
    let cannot_read = |error: std::io::Error| format!("cannot read the file: {error}");
    let mut bytes = Vec::new();
    File::open(path).map_err(cannot_read)?.take(limit + 1).read_to_end(&mut bytes).map_err(cannot_read)?;
    if bytes.len() as u64 > limit {
        return Err(format!("the file exceeds {limit} bytes"));
    }
    bytes.drain(..files::mark(&bytes));
    Ok(bytes)
}

fn read(path: &Path, limit: u64) -> (Content, LastRead) {
    let content = read_bounded(path, limit);
    let seen = match &content {
        Ok(bytes) => LastRead::Digest(Sha256::digest(bytes).into()),
        Err(why) => LastRead::Unreadable(why.clone()),
    };
    (content, seen)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn poll_reports_each_content_and_failure_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let mut watch = FileWatch::new(&path, 3);
        assert!(watch.poll().is_some_and(|content| content.is_err_and(|why| why.contains("cannot read the file"))));
        assert!(watch.poll().is_none());
        fs::write(&path, "one").expect("written");
        assert_eq!(watch.poll(), Some(Ok(b"one".to_vec())));
        assert!(watch.poll().is_none());
        fs::write(&path, "four").expect("written");
        assert!(watch.poll().is_some_and(|content| content.is_err_and(|why| why.contains("exceeds 3 bytes"))));
        fs::write(&path, "one").expect("written");
        assert_eq!(watch.poll(), Some(Ok(b"one".to_vec())));
    }

    #[test]
    fn byte_order_mark_is_stripped_from_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "\u{feff}one").expect("written");
        assert_eq!(read_bounded(&path, 9), Ok(b"one".to_vec()));
    }

    #[tokio::test]
    async fn changed_returns_new_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "one").expect("written");
        let mut watch = FileWatch::new(&path, 9);
        watch.poll();
        fs::write(&path, "two").expect("written");
        assert_eq!(watch.changed().await, Ok(b"two".to_vec()));
    }
}
