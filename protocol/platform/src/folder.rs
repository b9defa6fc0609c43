//! Changes in a folder, where the system reports them.
//!
//! A report saves the wait for the next read of a file, and no more than that: network mounts report nothing, Linux has a
//! limit of watches, and other systems are not supported. Callers therefore also read at an interval.

use std::path::Path;

/// A folder whose changes are reported on Linux.
///
/// Reported are files and links that appear under a name by a rename, which is how Kubernetes replaces the content of a
/// mounted Secret (`..data`) and how most programs write files, and files that are closed after a write. A file that is
/// being written is not: it would be read too early.
#[derive(Debug)]
pub struct FolderWatch {
    #[cfg(target_os = "linux")]
    // A pipe of events: tokio has no safe type for other descriptors.
    events: Option<tokio::net::unix::pipe::Receiver>,
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
        Self { events: open().inspect_err(report).ok() }
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
            while events.try_read(&mut buffer).is_ok_and(|bytes| bytes > 0) {
                is_changed = true;
            }
            if is_changed {
                return;
            }
        }
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
        std::future::pending().await
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

    #[tokio::test]
    async fn swapped_link_and_complete_file_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut watch = FolderWatch::around(&folder.path().join("relay.yaml"));
        assert!(is_pending(watch.changed()));
        std::os::unix::fs::symlink("v2", folder.path().join("..data_tmp")).expect("a link");
        fs::rename(folder.path().join("..data_tmp"), folder.path().join("..data")).expect("swapped");
        is_reported(&mut watch).await;
        assert!(is_pending(watch.changed()), "each change is reported once");
        fs::write(folder.path().join("relay.yaml"), "a").expect("written");
        is_reported(&mut watch).await;
    }

    #[tokio::test]
    async fn open_file_is_not_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("relay.yaml");
        let mut watch = FolderWatch::around(&path);
        let file = File::create(&path).expect("created");
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
