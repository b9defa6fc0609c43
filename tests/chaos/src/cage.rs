//! A kernel memory limit for one process: a cgroup of version 2, or of version 1 if that controls the memory.

use std::{fs, path::PathBuf};

/// A cgroup. Dropping it removes it, once its process is gone.
#[derive(Debug)]
pub struct Cage {
    dir: PathBuf,
    version: u8,
}

impl Cage {
    /// Creates a cgroup with this limit in bytes, or returns the reason that this machine has none.
    ///
    /// # Errors
    /// If no cgroup with memory can be created here.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let name = format!("modelrelay-chaos-{}", std::process::id());
        let places = [("/sys/fs/cgroup", 2), ("/sys/fs/cgroup/memory", 1)];
        for (root, version) in places {
            let limit = if version == 2 { "memory.max" } else { "memory.limit_in_bytes" };
            let cage = Self { dir: PathBuf::from(root).join(&name), version };
            // A folder created anywhere else would be just a folder, and a limit in it just a file.
            let is_cgroup = fs::create_dir(&cage.dir).is_ok() && cage.dir.join(limit).exists();
            if is_cgroup && fs::write(cage.dir.join(limit), bytes.to_string()).is_ok() {
                // If there is swap, it must not be what saves the process.
                let _ = fs::write(cage.dir.join("memory.swap.max"), "0");
                return Ok(cage);
            }
        }
        Err("no cgroup with a memory limit can be made here, which needs root".to_owned())
    }

    /// Returns a shell script that enters the cgroup and executes the command that follows.
    #[must_use]
    pub fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.dir.display())
    }

    /// Returns how often the kernel killed a process in it.
    #[must_use]
    pub fn kills(&self) -> u64 {
        let events = if self.version == 2 { "memory.events" } else { "memory.oom_control" };
        let events = fs::read_to_string(self.dir.join(events)).unwrap_or_default();
        events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// Returns the peak usage in bytes.
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
            #[expect(clippy::disallowed_methods, reason = "a poll with a deadline in synchronous code")]
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
