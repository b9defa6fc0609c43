//! A Secret as the kubelet mounts it: files that are links through one link, which is swapped.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use super::{Data, FakeKubernetes};

/// One Pod's mount of the Secret, empty at first: it is optional.
#[derive(Debug)]
pub struct Mount {
    folder: TempDir,
    version: AtomicU32,
}

impl Default for Mount {
    fn default() -> Self {
        Self::new()
    }
}

impl Mount {
    /// Creates an empty mount.
    ///
    /// # Panics
    /// If this machine has no room for files.
    #[must_use]
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let mount = Self { folder, version: AtomicU32::new(0) };
        mount.show(&Data::new());
        mount
    }

    /// The path of a file in the mount, whether it exists or not.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Mounts the present content of the Secret, as the kubelet does; nothing if the Secret does not exist.
    pub fn sync(&self, kubernetes: &FakeKubernetes) {
        self.show(&kubernetes.data().unwrap_or_default());
    }

    /// Mounts this content, as the kubelet does.
    ///
    /// # Panics
    /// If this machine has no room for files.
    pub fn show(&self, data: &Data) {
        let version = format!("..{}", self.version.fetch_add(1, Ordering::Relaxed));
        let (current, next) = (self.folder.path().join("..data"), self.folder.path().join("..data_tmp"));
        std::fs::create_dir(self.folder.path().join(&version)).expect("a folder");
        for (name, content) in data {
            std::fs::write(self.folder.path().join(&version).join(name), content).expect("a file");
        }
        symlink(&version, &next).expect("a link");
        std::fs::rename(next, current).expect("a swapped link");
        for entry in std::fs::read_dir(self.folder.path()).expect("a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with("..") && !data.contains_key(&name) {
                std::fs::remove_file(entry.path()).expect("a removed link");
            }
        }
        for name in data.keys() {
            let link = self.folder.path().join(name);
            if link.symlink_metadata().is_err() {
                symlink(format!("..data/{name}"), link).expect("a link");
            }
        }
    }
}
