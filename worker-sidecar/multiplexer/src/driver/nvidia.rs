//! The free memory of NVIDIA GPUs, and of the control group.
//!
//! The same numbers are available in two ways: from the driver's library, found at run time, and from `nvidia-smi`,
//! which is installed wherever the library is. A statically linked worker (the one in ModelRelay's images) must not
//! load the library, which would load a second C library. If neither is available nothing is measured, which is not an
//! error.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::memory::Meter;

/// `nvidia-smi` does not end while the GPU driver hangs.
const SMI_TIMEOUT: Duration = Duration::from_secs(5);
const SMI_POLL: Duration = Duration::from_millis(10);

/// The slot's devices.
#[derive(Debug)]
pub struct Nvidia {
    /// Initialized on first use: if the GPU driver hangs, initialization hangs too, and then only that measurement
    /// waits, with a timeout.
    source: OnceLock<Source>,
    /// Indices or UUIDs; empty: every device that the container sees.
    devices: Vec<String>,
}

#[derive(Debug)]
enum Source {
    Library(Box<Nvml>),
    Program(Program),
    /// The slot's GPUs are unknown.
    Nothing,
}

/// `nvidia-smi`.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    /// A process that was killed and has not ended yet.
    hung: Mutex<Option<Child>>,
}

impl Nvidia {
    /// `devices`: indices or UUIDs of the slot's devices; empty means all.
    pub fn new(devices: Vec<String>) -> Self {
        Self { source: OnceLock::new(), devices }
    }

    #[cfg(test)]
    pub(super) fn measures(&self) -> bool {
        !matches!(self.source.get(), Some(Source::Nothing))
    }

    /// Measures no GPU, only the control group.
    pub fn without_devices() -> Self {
        Self { source: Source::Nothing.into(), devices: Vec::new() }
    }
}

impl Source {
    fn find() -> Self {
        let program = || Self::Program(Program::new("nvidia-smi".into()));
        if is_static() {
            return program();
        }
        match Nvml::init() {
            Ok(nvml) => Self::Library(Box::new(nvml)),
            Err(error) => {
                tracing::debug!(%error, "cannot use NVIDIA's library");
                program()
            }
        }
    }

    fn free(&self, devices: &[String]) -> Option<u64> {
        match self {
            Self::Library(nvml) => {
                let read = free_by_library(nvml, devices);
                read.inspect_err(|error| tracing::debug!(%error, "cannot read GPU memory")).ok()
            }
            Self::Program(program) => program.free(devices),
            Self::Nothing => None,
        }
    }
}

impl Meter for Nvidia {
    fn free(&self) -> Option<u64> {
        let is_first = self.source.get().is_none();
        let free = self.source.get_or_init(Source::find).free(&self.devices);
        if is_first && free.is_none() {
            tracing::info!("GPU memory is not measured: neither NVIDIA's library nor nvidia-smi reports it");
        }
        free
    }

    fn host_free(&self) -> Option<u64> {
        free_in_group(Path::new("/sys/fs/cgroup"))
    }
}

/// Returns the memory left to a control group, version 2; `None` in version 1 or without a limit.
fn free_in_group(group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // Page cache is included in the used memory, but is reclaimed for a copy that needs the memory, unless it is still
    // to be written: a group that has read its models from disk looks full.
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

impl Program {
    fn new(path: PathBuf) -> Self {
        Self { path, hung: Mutex::default() }
    }

    fn free(&self, devices: &[String]) -> Option<u64> {
        let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        // A process that hangs in the GPU driver does not react to a signal, and another one would hang too.
        if let Some(child) = &mut *hung
            && matches!(child.try_wait(), Ok(None))
        {
            return None;
        }
        *hung = None;
        let mut child = self.query(devices).ok()?;
        let Some(ended) = wait(&mut child, SMI_TIMEOUT) else {
            tracing::warn!(seconds = SMI_TIMEOUT.as_secs(), "GPU memory is unknown: nvidia-smi did not exit in time");
            let _ = child.kill();
            *hung = Some(child);
            return None;
        };
        let mut lines = String::new();
        child.stdout.take()?.read_to_string(&mut lines).ok()?;
        ended.success().then(|| sum_of_mebibytes(&lines))?
    }

    fn query(&self, devices: &[String]) -> io::Result<Child> {
        let mut command = Command::new(&self.path);
        command.args(["--query-gpu=memory.free", "--format=csv,noheader,nounits"]);
        if !devices.is_empty() {
            command.arg(format!("--id={}", devices.join(",")));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    }
}

#[expect(clippy::disallowed_methods, reason = "runs on a thread for blocking work")]
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if began.elapsed() < limit => std::thread::sleep(SMI_POLL),
            Ok(ended) => return ended,
            Err(_) => return None,
        }
    }
}

/// Parses one device per line. Devices that share the host's memory print `[N/A]`.
fn sum_of_mebibytes(lines: &str) -> Option<u64> {
    let mut devices = lines.lines().map(|line| line.trim().parse::<u64>().ok()).peekable();
    devices.peek()?;
    devices.sum::<Option<u64>>().map(|mebibytes| mebibytes << 20)
}

/// True if this program was linked statically: then no dynamic loader is mapped into it. If that cannot be read it was
/// not, because only the Linux programs are static.
fn is_static() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| !maps.contains("/ld-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_without_gpu_measures_nothing() {
        // On a machine with a GPU, a device that does not exist measures nothing either.
        let meter = Nvidia::new(vec!["GPU-no-such-device".to_owned()]);
        assert_eq!(meter.free(), None);
        // The process that runs this test has some left, if there is a limit.
        assert!(meter.host_free().is_none_or(|bytes| bytes > 1 << 16));
    }

    #[test]
    fn devices_are_summed_unless_any_is_unknown() {
        assert_eq!(sum_of_mebibytes("1024\n 2048\n"), Some(3 << 30));
        assert_eq!(sum_of_mebibytes("1024\n[N/A]\n"), None);
        assert_eq!(sum_of_mebibytes(""), None);
    }

    fn program(folder: &Path, script: &str) -> Program {
        let path = folder.join("nvidia-smi");
        // Written by another process: a parallel test that forks in the meantime would keep the file open for writing.
        let write = r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#;
        let written = Command::new("sh").args(["-c", write, "sh", script]).arg(&path).status().unwrap();
        assert!(written.success());
        Program::new(path)
    }

    #[test]
    fn program_is_queried_for_slot_devices() {
        let folder = tempfile::tempdir().unwrap();
        let arguments = "--query-gpu=memory.free --format=csv,noheader,nounits --id=0,GPU-1";
        let smi = program(folder.path(), &format!("[ \"$*\" = '{arguments}' ] && echo 512"));
        assert_eq!(smi.free(&["0".to_owned(), "GPU-1".to_owned()]), Some(512 << 20));
        assert_eq!(smi.free(&[]), None, "it failed");
        let devices = vec!["0".to_owned(), "GPU-1".to_owned()];
        assert_eq!(Nvidia { source: Source::Program(smi).into(), devices }.free(), Some(512 << 20));
        assert_eq!(Program::new(folder.path().join("missing")).free(&[]), None);
    }

    #[test]
    fn hung_program_blocks_further_runs_until_reaped() {
        let folder = tempfile::tempdir().unwrap();
        let smi = program(folder.path(), "echo 512");
        let hung = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        *smi.hung.lock().unwrap() = Some(hung);
        assert_eq!(smi.free(&[]), None);
        let mut hung = smi.hung.lock().unwrap().take().unwrap();
        drop(hung.stdin.take());
        wait(&mut hung, SMI_TIMEOUT).unwrap();
        *smi.hung.lock().unwrap() = Some(hung);
        assert_eq!(smi.free(&[]), Some(512 << 20));
        assert!(smi.hung.lock().unwrap().is_none());
    }

    #[test]
    fn wait_for_program_ends_at_timeout() {
        let mut endless = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        assert_eq!(wait(&mut endless, Duration::from_millis(20)), None);
        drop(endless.stdin.take());
        assert!(wait(&mut endless, SMI_TIMEOUT).unwrap().success());
    }

    #[test]
    fn reclaimable_page_cache_is_free_memory() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        assert_eq!(free_in_group(group.path()), None, "the value is unknown");
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
