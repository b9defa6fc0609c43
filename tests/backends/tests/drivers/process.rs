//! Processes that the worker starts: they end in every case.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use modelrelay_backends::server::{line_of, runs, until};
use modelrelay_backends::worker_program;
use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::driver::launch::{Launch, TERM_GRACE};
use modelrelay_multiplexer::driver::process::{Process, ProcessModel};
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::{Driver, Probed};
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::rig::{FAKE, folder, on_port};

fn shell(script: &str) -> (Process, Model) {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let env = BTreeMap::from([("ADDRESS".to_owned(), "127.0.0.1:${PORT}".to_owned())]);
    let launch = Launch { command, env, ..Launch::default() };
    let model = ProcessModel { served: Served::new("m"), launch, url: None };
    (Process::new(vec![model], worker_program()), "m".into())
}

fn pid(text: &str) -> u32 {
    text.parse().unwrap_or_else(|_| panic!("{text} is no process id"))
}

#[tokio::test]
async fn process_ending_during_load_reports_code_and_output() {
    let (driver, model) = shell("echo starting; echo 'no such file: model.gguf' >&2; exit 7");
    let began = Instant::now();
    let failure = driver.load(&model, LoadKind::Cold).await.unwrap_err();
    let LoadFailure::Exited(last_words) = failure else { panic!("{failure:?}") };
    assert!(last_words.starts_with("exit code 7: ") && last_words.contains("no such file: model.gguf"), "{last_words}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn missing_command_is_named() {
    let launch = Launch { command: vec!["/no/such/program".to_owned()], ..Launch::default() };
    let model = ProcessModel { served: Served::new("m"), launch, url: None };
    let driver = Process::new(vec![model], worker_program());
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err().to_string();
    assert!(failure.contains("/no/such/program") && failure.contains("127"), "{failure}");
}

#[tokio::test]
async fn port_of_foreign_process_is_not_adopted() {
    let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = stranger.local_addr().unwrap().port();
    let launch = Launch { command: vec!["true".to_owned()], ..Launch::default() };
    let model = ProcessModel { served: Served::new("m"), launch, url: Some(on_port(port)) };
    let failure = Process::new(vec![model], worker_program()).load(&"m".into(), LoadKind::Cold).await.unwrap_err();
    assert!(failure.to_string().contains(&port.to_string()), "{failure}");
}

#[tokio::test]
async fn port_and_environment_reach_command() {
    let folder = folder();
    let output_file = folder.path().join("seen");
    let script = format!("echo ${{PORT}} $ADDRESS > {}; sleep 1000", output_file.display());
    let (driver, model) = shell(&script);
    let line = given_up(&driver, &model, &output_file).await;
    let port = line.split(' ').next().unwrap().to_owned();
    assert_ne!(port, "0");
    assert_eq!(line, format!("{port} 127.0.0.1:{port}"));
}

/// Abandons a load that never ends, once its script has written this line.
async fn given_up(driver: &Process, model: &Model, file: &Path) -> String {
    tokio::select! {
        loaded = driver.load(model, LoadKind::Cold) => panic!("{loaded:?}"),
        line = line_of(file) => line,
    }
}

/// Loads a server whose script records process ids, and returns the driver.
async fn loaded(script: &str, folder: &Path) -> (Process, Model) {
    let script =
        script.replace("PIDS", &folder.to_string_lossy()).replace("SERVER", &format!("{FAKE} vllm m ${{PORT}}"));
    let (driver, model) = shell(&script);
    driver.load(&model, LoadKind::Cold).await.unwrap_or_else(|failure| panic!("{failure}"));
    (driver, model)
}

#[tokio::test]
async fn eviction_kills_processes_outside_process_group() {
    let folder = folder();
    // A daemon: in its own session, and its parent is gone.
    let script = "(setsid sh -c 'echo $$ > PIDS/daemon; exec sleep 1000' &); echo $$ > PIDS/main; exec SERVER";
    let (driver, model) = loaded(script, folder.path()).await;
    let (main, daemon) =
        (pid(&line_of(&folder.path().join("main")).await), pid(&line_of(&folder.path().join("daemon")).await));
    assert!(runs(main) && runs(daemon));
    driver.evict(&model).await.unwrap();
    assert!(!runs(main) && !runs(daemon), "no process is left after the eviction");
}

#[tokio::test]
async fn process_ignoring_sigterm_is_killed_after_grace() {
    let folder = folder();
    let script = "trap '' TERM; echo $$ > PIDS/main; SERVER & wait; sleep 1000";
    let (driver, model) = loaded(script, folder.path()).await;
    let main = pid(&line_of(&folder.path().join("main")).await);
    let began = Instant::now();
    driver.evict(&model).await.unwrap();
    assert!(began.elapsed() >= TERM_GRACE, "{:?}", began.elapsed());
    assert!(!runs(main));
}

#[tokio::test]
async fn forced_eviction_skips_grace() {
    let folder = folder();
    let (driver, model) = loaded("trap '' TERM; SERVER & wait", folder.path()).await;
    let began = Instant::now();
    driver.force_evict(&model).await.unwrap();
    assert!(began.elapsed() < TERM_GRACE / 2, "{:?}", began.elapsed());
    assert!(matches!(driver.probe(&model).await, Ok(probed) if !probed.ready));
}

#[tokio::test]
async fn dropped_driver_leaves_no_process() {
    let folder = folder();
    let (driver, _) = loaded("echo $$ > PIDS/main; exec SERVER", folder.path()).await;
    let main = pid(&line_of(&folder.path().join("main")).await);
    drop(driver);
    until("the process is gone", async || !runs(main)).await;
}

/// Simulates a killed worker: a shell holds the supervisor's standard input, as a worker would.
#[tokio::test]
async fn killed_parent_leaves_no_orphan() {
    let folder = folder();
    let (fifo, pid_file) = (folder.path().join("input"), folder.path().join("grandchild"));
    let script = format!(
        "mkfifo {fifo}; {supervisor} supervise -- sh -c 'echo $$ > {pid_file}; trap \"\" HUP TERM; sleep 1000 & wait' < {fifo} & \
         exec 3> {fifo}; wait",
        fifo = fifo.display(),
        pid_file = pid_file.display(),
        supervisor = worker_program().display(),
    );
    let mut parent = Command::new("sh").arg("-c").arg(script).stdin(Stdio::null()).spawn().unwrap();
    let grandchild = pid(&line_of(&pid_file).await);
    assert!(runs(grandchild));
    parent.start_kill().unwrap();
    let status = parent.wait().await.unwrap();
    assert_eq!(status.signal(), Some(9));
    until("the grandchild is gone", async || !runs(grandchild)).await;
}

#[tokio::test]
async fn killed_supervisor_ends_its_command() {
    let folder = folder();
    let pid_file = folder.path().join("command");
    let mut supervisor = Command::new(worker_program());
    let script = format!("echo $$ > {}; exec sleep 1000", pid_file.display());
    supervisor.args(["supervise", "--", "sh", "-c", &script]).stdin(Stdio::piped());
    let mut supervisor = supervisor.spawn().unwrap();
    let command = pid(&line_of(&pid_file).await);
    assert!(runs(command));
    supervisor.kill().await.unwrap();
    until("the command is gone", async || !runs(command)).await;
}

#[tokio::test]
async fn ending_process_is_not_reused_for_load() {
    let folder = folder();
    let main = folder.path().join("main");
    let (driver, model) = loaded("trap '' TERM; echo $$ > PIDS/main; SERVER & wait; sleep 1000", folder.path()).await;
    let doomed = pid(&line_of(&main).await);
    let eviction = tokio::time::timeout(Duration::from_millis(100), driver.evict(&model)).await;
    assert!(eviction.is_err(), "the server must not listen");
    driver.load(&model, LoadKind::Cold).await.unwrap();
    assert_ne!(pid(&line_of(&main).await), doomed);
    assert!(!runs(doomed));
}

#[tokio::test]
async fn supervisor_exits_with_status_of_command() {
    let ended = async |script: &str| {
        let mut supervisor = Command::new(worker_program());
        supervisor.args(["supervise", "--", "sh", "-c", script]).stdin(Stdio::piped());
        let mut child = supervisor.spawn().unwrap();
        let _input = child.stdin.take();
        child.wait().await.unwrap().code()
    };
    assert_eq!(ended("exit 5").await, Some(5));
    assert_eq!(ended("kill -KILL $$").await, Some(137));
}

/// A service manager may signal every process of a service; only the worker decides when its backends end.
#[tokio::test]
async fn signalled_supervisor_does_not_signal_its_command() {
    let folder = folder();
    let pid_file = folder.path().join("command");
    let script = format!("trap 'exit 3' TERM; echo $$ > {}; sleep 1000 & wait", pid_file.display());
    let mut supervisor = Command::new(worker_program());
    supervisor.args(["supervise", "--", "sh", "-c", &script]).stdin(Stdio::piped());
    let mut supervisor = supervisor.spawn().unwrap();
    line_of(&pid_file).await;
    let mut orders = supervisor.stdin.take().unwrap();
    for signal in ["-HUP", "-INT", "-TERM"] {
        let id = supervisor.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().await.unwrap().success());
    }
    orders.write_all(b"T").await.unwrap();
    assert_eq!(supervisor.wait().await.unwrap().code(), Some(3), "the process must exit with the requested code");
}

/// A second signal makes some servers abort what they were finishing.
#[tokio::test]
async fn stop_after_abandoned_eviction_sends_no_second_signal() {
    let folder = folder();
    let script =
        "trap 'echo term >> PIDS/term; sleep 2; echo clean > PIDS/clean; exit 0' TERM; SERVER & while :; do wait; done";
    let (driver, model) = loaded(script, folder.path()).await;
    let terminated = folder.path().join("term");
    tokio::select! {
        evicted = driver.evict(&model) => panic!("{evicted:?}"),
        line = line_of(&terminated) => assert_eq!(line, "term"),
    }
    driver.stop(&model).await.unwrap();
    let clean = std::fs::read_to_string(folder.path().join("clean")).expect("it could finish");
    let terminated = std::fs::read_to_string(terminated).unwrap();
    assert_eq!((clean.as_str(), terminated.as_str()), ("clean\n", "term\n"));
}

#[tokio::test]
async fn unready_server_can_be_evicted_during_load() {
    let folder = folder();
    let pid_file = folder.path().join("pid");
    let (driver, model) = shell(&format!("echo $$ > {}; exec sleep 1000; : ${{PORT}}", pid_file.display()));
    let pid = given_up(&driver, &model, &pid_file).await.parse().unwrap();
    driver.force_evict(&model).await.unwrap();
    assert!(!runs(pid));
    assert_eq!(driver.probe(&model).await, Ok(Probed::gone()));
}
