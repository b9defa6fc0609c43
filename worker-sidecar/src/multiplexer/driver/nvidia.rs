//! The free memory of NVIDIA GPUs, and of the control group.
//!
//! Two ways to the same numbers: the driver's library, found at run time, and `nvidia-smi`, which comes wherever the library
//! does. A statically linked worker (the one in our images) must not load the library: it would bring a C library of its
//! own. Where neither is there nothing is measured, which is no error.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::memory::Meter;

/// `nvidia-smi` of a driver that hangs does not end.
const SMI_TIMEOUT: Duration = Duration::from_secs(5);
const SMI_POLL: Duration = Duration::from_millis(10);

/// The slot's devices.
#[derive(Debug)]
pub struct Nvidia {
    source: Source,
    /// Indices or UUIDs; none: every device that the container sees.
    devices: Vec<String>,
}

#[derive(Debug)]
enum Source {
    Library(Box<Nvml>),
    Program(PathBuf),
}

impl Nvidia {
    /// Looks for the library. `devices`: indices or UUIDs of the slot's devices; none means all.
    pub fn new(devices: Vec<String>) -> Self {
        let program = || Source::Program("nvidia-smi".into());
        let source = if is_static() {
            program()
        } else {
            match Nvml::init() {
                Ok(nvml) => Source::Library(Box::new(nvml)),
                Err(error) => {
                    tracing::debug!(%error, "NVIDIA's library cannot be used");
                    program()
                }
            }
        };
        let found = Self { source, devices };
        if found.free().is_none() {
            tracing::info!("GPU memory is not measured: neither NVIDIA's library nor nvidia-smi tells it");
        }
        found
    }
}

impl Meter for Nvidia {
    fn free(&self) -> Option<u64> {
        match &self.source {
            Source::Library(nvml) => {
                let read = free_by_library(nvml, &self.devices);
                read.inspect_err(|error| tracing::debug!(%error, "GPU memory cannot be read")).ok()
            }
            Source::Program(program) => free_by_program(program, &self.devices),
        }
    }

    fn host_free(&self) -> Option<u64> {
        free_in_group(Path::new("/sys/fs/cgroup"))
    }
}

/// What a control group may still take. Version 2; in version 1 and outside of a limit the answer is that nobody knows.
fn free_in_group(group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // Pages of files are counted as taken, and give way to a copy that needs the room, unless they are still to be written:
    // a group that has read its models from disk looks full.
    let stat = read("memory.stat").unwrap_or_default();
    let of = |name: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
        value.unwrap_or(0)
    };
    let files = of("active_file").saturating_add(of("inactive_file"));
    let gives_way = files.saturating_sub(of("file_dirty")).saturating_sub(of("file_writeback"));
    let taken = number("memory.current")?.saturating_sub(gives_way);
    Some(number("memory.max")?.saturating_sub(taken))
}

fn free_by_library(nvml: &Nvml, devices: &[String]) -> Result<u64, NvmlError> {
    let free = |device: nvml_wrapper::Device<'_>| device.memory_info().map(|memory| memory.free);
    if devices.is_empty() {
        return (0..nvml.device_count()?).map(|index| free(nvml.device_by_index(index)?)).sum();
    }
    let by_name = |name: &String| match name.parse() {
        Ok(index) => nvml.device_by_index(index),
        Err(_) => nvml.device_by_uuid(name.as_str()),
    };
    devices.iter().map(|name| free(by_name(name)?)).sum()
}

fn free_by_program(program: &PathBuf, devices: &[String]) -> Option<u64> {
    let mut command = Command::new(program);
    command.args(["--query-gpu=memory.free", "--format=csv,noheader,nounits"]);
    if !devices.is_empty() {
        command.arg(format!("--id={}", devices.join(",")));
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let began = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(None) if began.elapsed() < SMI_TIMEOUT => std::thread::sleep(SMI_POLL),
            Ok(status) => break status,
            Err(_) => break None,
        }
    };
    if ended.is_none() {
        // Not waited for: what hangs in the driver does not end of a signal either.
        let _ = child.kill();
        return None;
    }
    let mut lines = String::new();
    child.stdout.take()?.read_to_string(&mut lines).ok()?;
    ended?.success().then(|| sum_of_mebibytes(&lines))?
}

/// One device per line. `[N/A]` is what devices say that share the host's memory.
fn sum_of_mebibytes(lines: &str) -> Option<u64> {
    let mut devices = lines.lines().map(|line| line.trim().parse::<u64>().ok()).peekable();
    devices.peek()?;
    devices.sum::<Option<u64>>().map(|mebibytes| mebibytes << 20)
}

/// Whether this program was linked statically: then no dynamic loader is mapped into it. Where that cannot be seen, it was
/// not: ours are static on Linux only.
fn is_static() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| !maps.contains("/ld-"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_machine_without_a_gpu_measures_nothing() {
        // Where there is one, a device that does not exist measures nothing either.
        assert_eq!(Nvidia::new(vec!["GPU-no-such-device".to_owned()]).free(), None);
    }

    #[test]
    fn devices_are_summed_and_one_that_does_not_know_makes_all_unknown() {
        assert_eq!(sum_of_mebibytes("1024\n 2048\n"), Some(3 << 30));
        assert_eq!(sum_of_mebibytes("1024\n[N/A]\n"), None);
        assert_eq!(sum_of_mebibytes(""), None);
    }

    #[test]
    fn the_program_is_asked_for_the_slots_devices() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("nvidia-smi");
        let script = "#!/bin/sh\n[ \"$*\" = '--query-gpu=memory.free --format=csv,noheader,nounits --id=0,GPU-1' ] && echo 512\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(free_by_program(&program, &["0".to_owned(), "GPU-1".to_owned()]), Some(512 << 20));
        assert_eq!(free_by_program(&program, &[]), None);
        assert_eq!(free_by_program(&folder.path().join("missing"), &[]), None);
    }

    #[test]
    fn page_cache_that_would_give_way_is_free_memory() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        assert_eq!(free_in_group(group.path()), None, "nobody knows");
        write("memory.max", "100\n");
        write("memory.current", "90\n");
        assert_eq!(free_in_group(group.path()), Some(10));
        let stat = "anon 20\nactive_file 30\ninactive_file 40\nfile_dirty 4\nfile_writeback 1\nfile_mapped 7\n";
        write("memory.stat", stat);
        assert_eq!(free_in_group(group.path()), Some(75), "but what is not on disk yet stays a while");
        write("memory.max", "max\n");
        assert_eq!(free_in_group(group.path()), None, "there is no limit");
    }

    #[test]
    fn this_test_is_linked_dynamically() {
        assert!(!is_static());
    }
}
