//! A process's usage of the machine, as measured by Linux.

use std::time::Duration;

/// The unit of process times in `/proc`: hundredths of a second, regardless of the clock rate.
const TICK: Duration = Duration::from_millis(10);

/// Memory, processor time and open files of one process.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// The present resident memory.
    pub resident_bytes: u64,
    /// The peak of resident memory.
    pub peak_bytes: u64,
    /// Processor time since its start, its own and the kernel's for it, to a hundredth of a second.
    pub cpu: Duration,
    /// Open files, connections and the like.
    pub open_files: usize,
}

impl Usage {
    /// Reads the usage of a running process.
    ///
    /// # Panics
    /// If it is not running, or this is not Linux.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let read = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"))
        };
        let (status, stat) = (read("status"), read("stat"));
        let open_files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let (resident_bytes, peak_bytes) = (kib(&status, "VmRSS:"), kib(&status, "VmHWM:"));
        Self { resident_bytes, peak_bytes, cpu: TICK * ticks(&stat), open_files }
    }
}

/// True if this process and its children may have `files` files and connections open; otherwise reports why not.
#[must_use]
pub fn may_open(files: u64) -> bool {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    let soft = soft.map_or(0, |soft| soft.parse().unwrap_or(u64::MAX));
    if soft < files {
        crate::cannot_run(&format!("{files} open files are needed and {soft} allowed: ulimit -n {files}"));
    }
    soft >= files
}

/// The line `NAME 123 kB` in bytes.
fn kib(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
    let number: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of kB");
    number * 1024
}

/// utime and stime: the 14th and 15th field, counted after the program's name, which may contain any character.
fn ticks(stat: &str) -> u32 {
    let behind_name = stat.rsplit_once(')').expect("a name in brackets").1;
    let fields: Vec<&str> = behind_name.split_whitespace().collect();
    let field = |at: usize| -> u32 { fields[at].parse().expect("a number of ticks") };
    field(11) + field(12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_time_are_read_from_their_places() {
        assert_eq!(kib("VmHWM:\t    9 kB\nVmRSS:\t 1234 kB\n", "VmRSS:"), 1234 * 1024);
        assert_eq!(ticks("7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 150 25 3 4 20 0 1 0 0 0 0"), 175);
    }

    #[test]
    fn process_reads_its_own_usage() {
        let usage = Usage::of(std::process::id());
        assert!(usage.resident_bytes > 100_000 && usage.peak_bytes >= usage.resident_bytes, "{usage:?}");
    }
}
