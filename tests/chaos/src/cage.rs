//! A memory limit of the kernel's, for one process: a cgroup of version 2, or of version 1 where that has the memory.

use std::{fs, path::PathBuf};

/// A cgroup. Dropping it removes it, once its process is gone.
#[derive(Debug)]
pub struct Cage {
    dir: PathBuf,
    version: u8,
}

impl Cage {
    /// With so many bytes at most; the reason where this machine has none.
    ///
    /// # Errors
    /// No cgroup with memory can be made here.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let name = format!("modelrelay-chaos-{}", std::process::id());
        let places = [("/sys/fs/cgroup", 2), ("/sys/fs/cgroup/memory", 1)];
        for (root, version) in places {
            let limit = if version == 2 { "memory.max" } else { "memory.limit_in_bytes" };
            let cage = Self { dir: PathBuf::from(root).join(&name), version };
            // A folder made anywhere else would be just a folder, and a limit in it just a file.
            let is_cgroup = fs::create_dir(&cage.dir).is_ok() && cage.dir.join(limit).exists();
            if is_cgroup && fs::write(cage.dir.join(limit), bytes.to_string()).is_ok() {
                // Where there is swap, it must not be what saves the process.
                let _ = fs::write(cage.dir.join("memory.swap.max"), "0");
                return Ok(cage);
            }
        }
        Err("no cgroup with a memory limit can be made here, which needs root".to_owned())
    }

    /// A shell script that goes into it and on as the command that follows.
    #[must_use]
    pub fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.dir.display())
    }

    /// How often the kernel killed for it.
    #[must_use]
    pub fn kills(&self) -> u64 {
        let events = if self.version == 2 { "memory.events" } else { "memory.oom_control" };
        let events = fs::read_to_string(self.dir.join(events)).unwrap_or_default();
        events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// The most that was used.
    #[must_use]
    pub fn peak(&self) -> u64 {
        let peak = if self.version == 2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.dir.join(peak)).ok().and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        // The kernel needs a moment after the last process.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            #[expect(clippy::disallowed_methods, reason = "a poll with a deadline, where nothing can be awaited")]
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
