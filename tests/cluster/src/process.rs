//! Processes of Pods: the cluster's only node is this machine, so they run on it.

use std::{fs, process::Command};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// Sends SIGKILL to the one process of this Pod whose command line matches. Unlike the deletion of a Pod, even with
/// `--force`, this leaves the process no time to finish. Arguments in the command line are separated by NUL.
pub fn kill_process(pod: &Pod, matches: impl Fn(&str) -> bool) {
    let uid = pod.uid().expect("Pods have one");
    let of_pod = |pid: &str| {
        let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // The Pod's processes are in a control group named after it.
        of("cgroup").contains(&uid) && matches(&of("cmdline"))
    };
    let processes = fs::read_dir("/proc").expect("this is Linux").filter_map(Result::ok);
    let names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let pids: Vec<String> =
        names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(|pid| of_pod(pid)).collect();
    let [pid] = pids.as_slice() else { panic!("expected one such process in {}, found {pids:?}", pod.name_any()) };
    let killed = Command::new("kill").args(["-KILL", pid]).status().expect("kill can be run");
    assert!(killed.success(), "process {pid} of {} could not be killed", pod.name_any());
}
