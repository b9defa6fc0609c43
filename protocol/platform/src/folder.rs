//! Changes of a file, where the system reports those of its folder.
//!
//! A report saves the wait for the next read of a file, and no more than that: network mounts report nothing, Linux has
//! a limit of watches, and other systems are not supported. Callers therefore also read at an interval.

use std::path::Path;

/// The link that Kubernetes replaces to change all files of a mounted Secret at once.
#[cfg(target_os = "linux")]
const MOUNTED_DATA: &[u8] = b"..data";

/// The bytes of an event before its name, and the place of the name's length in them: `struct inotify_event`.
#[cfg(target_os = "linux")]
const EVENT_HEADER: (usize, std::ops::Range<usize>) = (16, 12..16);

/// The folder of a file whose changes are reported on Linux.
///
/// Reported is that the file, or the link to all files of a mounted Secret, appears under its name by a rename, or is
/// closed after a write. A file that is being written is not: it would be read too early. Nor is any other file of the
/// folder, such as the old version that an editor keeps.
#[derive(Debug)]
pub struct FolderWatch {
    #[cfg(target_os = "linux")]
    // A pipe of events: tokio has no safe type for other descriptors.
    events: Option<tokio::net::unix::pipe::Receiver>,
    #[cfg(target_os = "linux")]
    name: Vec<u8>,
}

#[cfg(target_os = "linux")]
impl FolderWatch {
    /// Follows the folder that contains `file`; without a report if that is impossible. Needs a tokio runtime.
    pub fn around(file: &Path) -> Self {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
        let open = || {
            let events = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
            add_watch(&events, parent.unwrap_or(Path::new(".")), WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE)?;
            tokio::net::unix::pipe::Receiver::from_owned_fd_unchecked(events)
        };
        let report = |error: &std::io::Error| tracing::debug!(%error, "changes of the folder are not reported");
        let name = file.file_name().map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default();
        Self { events: open().inspect_err(report).ok(), name }
    }

    /// Waits for a change since the last call; never completes if none is reported. Cancel safe.
    pub async fn changed(&mut self) {
        let Some(events) = &self.events else { return std::future::pending().await };
        let mut buffer = [0; 4096];
        loop {
            // Fails only while the runtime ends.
            let Ok(()) = events.readable().await else { return std::future::pending().await };
            let mut is_changed = false;
            // The last attempt, which would block, resets the readiness.
            while let Ok(bytes) = events.try_read(&mut buffer)
                && bytes > 0
            {
                is_changed |= self.concerns(&buffer[..bytes]);
            }
            if is_changed {
                return;
            }
        }
    }

    /// True if one of these events concerns the file. An event without a name, such as that of an overflow, may.
    fn concerns(&self, mut events: &[u8]) -> bool {
        let (header, length) = EVENT_HEADER;
        while let Some(length) = events.get(length.clone()).and_then(|bytes| bytes.try_into().ok()) {
            let end = header + u32::from_ne_bytes(length) as usize;
            let padded = events.get(header..end).unwrap_or_default();
            let name = padded.split(|byte| *byte == 0).next().unwrap_or_default();
            if name.is_empty() || name == self.name || name == MOUNTED_DATA {
                return true;
            }
            events = events.get(end..).unwrap_or_default();
        }
        false
    }
}

#[cfg(not(target_os = "linux"))]
impl FolderWatch {
    /// Follows nothing.
    pub fn around(_file: &Path) -> Self {
        Self {}
    }

    /// Never completes.
    pub async fn changed(&mut self) {
        std::future::pending::<()>().await;
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::{self, File};
    use std::task::{Context, Waker};
    use std::time::Duration;

    use super::*;

    /// True if a future is pending at its first poll.
    fn is_pending(future: impl Future) -> bool {
        std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    async fn is_reported(watch: &mut FolderWatch) {
        tokio::time::timeout(Duration::from_secs(30), watch.changed()).await.expect("a report");
    }

    /// Lets the runtime receive the events that wait: it looks for them at least every 61 polls of a task.
    async fn receive() {
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn swapped_link_and_complete_file_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut watch = FolderWatch::around(&folder.path().join("relay.yaml"));
        assert!(is_pending(watch.changed()));
        std::os::unix::fs::symlink("v2", folder.path().join("..data_tmp")).expect("a link");
        fs::rename(folder.path().join("..data_tmp"), folder.path().join("..data")).expect("swapped");
        is_reported(&mut watch).await;
        receive().await;
        assert!(is_pending(watch.changed()), "each change is reported once");
        fs::write(folder.path().join("relay.yaml"), "a").expect("written");
        is_reported(&mut watch).await;
    }

    #[tokio::test]
    async fn other_files_are_not_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("relay.yaml");
        fs::write(&path, "a").expect("written");
        let mut watch = FolderWatch::around(&path);
        fs::rename(&path, folder.path().join("relay.yaml~")).expect("kept by an editor");
        for number in 0..500 {
            fs::write(folder.path().join(format!("log-{number}")), "a").expect("written");
        }
        receive().await;
        assert!(is_pending(watch.changed()));
        fs::write(&path, "b").expect("written");
        is_reported(&mut watch).await;
        receive().await;
        assert!(is_pending(watch.changed()));
    }

    #[tokio::test]
    async fn open_file_is_not_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("relay.yaml");
        let mut watch = FolderWatch::around(&path);
        let file = File::create(&path).expect("created");
        receive().await;
        assert!(is_pending(watch.changed()));
        drop(file);
        is_reported(&mut watch).await;
    }

    #[tokio::test]
    async fn missing_folder_reports_nothing() {
        let mut watch = FolderWatch::around(Path::new("/nonexistent/folder/relay.yaml"));
        assert!(is_pending(watch.changed()));
    }
}
