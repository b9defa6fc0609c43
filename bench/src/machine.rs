//! The machine and the day, without which no figure means anything.

use serde::{Deserialize, Serialize};

/// The place and time of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name for itself.
    pub cpu: String,
    /// The number of cores.
    pub cores: usize,
    /// Linux's version.
    pub kernel: String,
    /// The number of runnable programs, on average over the minute before the run.
    pub load_before: f64,
    /// The day, in UTC.
    pub date: String,
}

impl Machine {
    /// This machine, now.
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_before: load(&read("/proc/loadavg")),
            date: time::OffsetDateTime::from(std::time::SystemTime::now()).date().to_string(),
        }
    }
}

/// The number of files that this program, and each that it starts, may have open: every connection is one.
pub fn open_files() -> u64 {
    files(&std::fs::read_to_string("/proc/self/limits").unwrap_or_default())
}

/// The first number of the line; without one there is no limit.
fn files(limits: &str) -> u64 {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or_default();
    line.split_whitespace().next().and_then(|soft| soft.parse().ok()).unwrap_or(u64::MAX)
}

/// x86 names the processor in `model name`; others may have no readable name.
fn cpu_model(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    line.map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':'])).to_owned()
}

fn load(loadavg: &str) -> f64 {
    loadavg.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_model_file_limit_and_load_are_parsed() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"), "Some CPU @ 2 GHz");
        assert_eq!(cpu_model("processor\t: 0\n"), "unknown processor");
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024      524288   files\n";
        assert_eq!((files(limits), files("Max open files   unlimited   unlimited  files\n")), (1024, u64::MAX));
        assert!((load("3.42 8.11 7.14 1/2 3\n") - 3.42).abs() < 1e-9);
    }
}
