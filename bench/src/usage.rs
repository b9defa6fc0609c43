//! The usage of programs as the kernel's scheduler measures it: to the nanosecond, and not in ticks.

use std::io;
use std::ops::{Add, Sub};
use std::time::Duration;

/// Processor time and memory of one program, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of all threads that run now; the kernel forgets the time of ended threads.
    pub cpu: Duration,
    /// Resident memory.
    pub resident: u64,
    /// The same, with shared memory divided among its users.
    pub proportional: u64,
}

impl Usage {
    /// Reads the usage of a running program.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self {
            cpu: cpu(pid)?,
            resident: kib(&std::fs::read_to_string(format!("/proc/{pid}/status"))?, "VmRSS:"),
            proportional: kib(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?, "Pss:"),
        })
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            resident: self.resident + other.resident,
            proportional: self.proportional + other.proportional,
        }
    }
}

impl Sub for Usage {
    type Output = Self;

    /// The increase since `before`; a decrease is zero.
    fn sub(self, before: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            resident: self.resident.saturating_sub(before.resident),
            proportional: self.proportional.saturating_sub(before.proportional),
        }
    }
}

fn cpu(pid: u32) -> io::Result<Duration> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end between the listing and here.
        if let Ok(times) = std::fs::read_to_string(thread?.path().join("schedstat")) {
            sum += ran(&times);
        }
    }
    Ok(Duration::from_nanos(sum))
}

/// The processor time of the calling thread, up to the scheduler's last tick.
pub fn cpu_of_this_thread() -> io::Result<Duration> {
    Ok(Duration::from_nanos(ran(&std::fs::read_to_string("/proc/thread-self/schedstat")?)))
}

/// The first of schedstat's numbers.
fn ran(times: &str) -> u64 {
    times.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or_default()
}

/// The line `NAME 123 kB` in bytes.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or_default() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_their_places() {
        assert_eq!(ran("123456789 42 7\n"), 123_456_789);
        assert_eq!(kib("Rss:  9 kB\nPss:\t   1234 kB\nPss_Anon: 7 kB\n", "Pss:"), 1234 * 1024);
    }

    /// Checks the sum, not the difference of two sums: threads of other tests end in between, and their time is lost.
    #[test]
    fn cpu_time_includes_all_threads() {
        const WORK: Duration = Duration::from_millis(50);
        let (stop, wait) = std::sync::mpsc::sync_channel::<()>(1);
        let (done, finished) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            while cpu_of_this_thread().unwrap() < WORK {}
            done.send(()).unwrap();
            let _ = wait.recv();
        });
        finished.recv().unwrap();
        let used = Usage::of(std::process::id()).unwrap();
        drop(stop);
        thread.join().unwrap();
        assert!(used.cpu >= WORK, "{used:?}");
    }

    #[test]
    fn sums_and_differences_are_of_each_part() {
        let usage = |n: u64| Usage { cpu: Duration::from_nanos(n), resident: 10 * n, proportional: 100 * n };
        assert_eq!(usage(1) + usage(2), usage(3));
        assert_eq!(usage(3) - usage(1), usage(2));
        assert_eq!(usage(1) - usage(3), usage(0));
    }
}
