//! `process_*`, with the names that every Prometheus client uses, read from `/proc/self`.
//!
//! It is implemented here instead of with the library's own collector, which depends on a parser of all of `/proc`.
//! Without `/proc` the gauges stay at zero.

use std::fs;
use std::path::Path;

use prometheus::{Counter, Gauge, IntGauge, Registry};

use super::register::registered;

/// `USER_HZ`: the unit of times in `/proc`, 100 on every architecture that Linux runs on today.
const TICKS_PER_SECOND: f64 = 100.0;

pub(super) struct ProcessGauges {
    cpu: Counter,
    open_fds: IntGauge,
    max_fds: IntGauge,
    virtual_memory: IntGauge,
    resident_memory: IntGauge,
    start_time: Gauge,
    threads: IntGauge,
}

impl ProcessGauges {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        Self {
            cpu: registered(
                registry,
                Counter::new("process_cpu_seconds_total", "Total user and system CPU time spent in seconds."),
            ),
            open_fds: gauge("process_open_fds", "Number of open file descriptors."),
            max_fds: gauge("process_max_fds", "Maximum number of open file descriptors."),
            virtual_memory: gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."),
            resident_memory: gauge("process_resident_memory_bytes", "Resident memory size in bytes."),
            start_time: registered(
                registry,
                Gauge::new("process_start_time_seconds", "Start time of the process since unix epoch in seconds."),
            ),
            threads: gauge("process_threads", "Number of OS threads in the process."),
        }
    }
}

/// Reads all values again; called by one scrape at a time.
pub(super) fn show(gauges: &ProcessGauges) {
    let proc = Path::new("/proc");
    let read = |path: &str| fs::read_to_string(proc.join(path)).unwrap_or_default();
    let status = read("self/status");
    let kibibytes = |field: &str| number_after(&status, field).map_or(0, |kib| kib * 1024);
    gauges.virtual_memory.set(kibibytes("VmSize:"));
    gauges.resident_memory.set(kibibytes("VmRSS:"));
    gauges.threads.set(number_after(&status, "Threads:").unwrap_or(0));
    gauges.max_fds.set(number_after(&read("self/limits"), "Max open files").unwrap_or(0));
    let open = fs::read_dir(proc.join("self/fd")).map_or(0, Iterator::count);
    // The folder that is being read is open too.
    gauges.open_fds.set(i64::try_from(open).unwrap_or(0).saturating_sub(1).max(0));
    if let Some((cpu, started)) = times(&read("self/stat")) {
        let booted = number_after(&read("stat"), "btime").unwrap_or(0) as f64;
        gauges.cpu.reset();
        gauges.cpu.inc_by(cpu);
        gauges.start_time.set(booted + started);
    }
}

/// CPU seconds, and seconds from boot to start. Fields are counted after the command's name, which may contain spaces.
fn times(stat: &str) -> Option<(f64, f64)> {
    let (_, after) = stat.rsplit_once(") ")?;
    let fields: Vec<f64> = after.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect();
    let ticks = |field: usize| fields.get(field - 3).copied();
    Some(((ticks(14)? + ticks(15)?) / TICKS_PER_SECOND, ticks(22)? / TICKS_PER_SECOND))
}

fn number_after(text: &str, field: &str) -> Option<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_times_are_parsed_after_unusual_process_name() {
        let stat = "42 (a) b) R 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 4 0 1000 1 1";
        assert_eq!(times(stat), Some((2.0, 10.0)));
        assert_eq!(times("garbage"), None);
    }

    #[test]
    fn number_is_first_word_after_its_name() {
        assert_eq!(number_after("VmRSS:\t  512 kB\n", "VmRSS:"), Some(512));
        assert_eq!(number_after("VmRSS:\t  512 kB\n", "VmSize:"), None);
    }
}
