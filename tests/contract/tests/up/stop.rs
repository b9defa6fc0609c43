//! The end of a run: in order at the first signal, at once at the second, as a whole if a part ends.

use std::process::Command;

use modelrelay_harness::process::Process;
use modelrelay_harness::{TEST_TIMEOUT, poll_until};

use crate::rig::{NO_BACKEND, Up, spawn};

/// The demo's responses take half a minute.
const SLOW_DEMO: (&str, &str) = ("DEMO_DELAY", "2s");

#[tokio::test]
async fn running_response_is_finished_at_first_signal() {
    let up = Up::start(&[NO_BACKEND]).await;
    let curl = up.spawn_curl();
    up.process.wait_for_line("request dispatched").await;
    up.process.terminate().await;
    let answer = up.curl_output(curl).await;
    assert!(String::from_utf8_lossy(&answer.stdout).trim_end().ends_with("data: [DONE]"));
    let log = up.process.log().clone();
    up.ended().await;
    let lines = log.lines();
    let last = |part: &str| lines.iter().rposition(|line| line.starts_with(part)).expect("a line");
    assert!(last("relay  | ") < last("worker | ") && last("worker | ") < last("demo   | "), "{}", log.dump());
}

#[tokio::test]
async fn terminal_interrupt_stops_in_order() {
    // A terminal sends Ctrl-C to the whole group of its foreground program.
    let process = spawn(&[NO_BACKEND, ("LISTEN_ADDR", "127.0.0.1:0")]).under(["setsid"]).start();
    let up = Up::greeted(process).await;
    let curl = up.spawn_curl();
    up.process.wait_for_line("request dispatched").await;
    signal("INT", &format!("-{}", up.process.pid().expect("it runs")));
    let answer = up.curl_output(curl).await;
    assert!(String::from_utf8_lossy(&answer.stdout).trim_end().ends_with("data: [DONE]"));
    up.ended().await;
}

#[tokio::test]
async fn second_signal_ends_everything_immediately() {
    let mut up = Up::start(&[NO_BACKEND, SLOW_DEMO]).await;
    let curl = up.spawn_curl();
    up.process.wait_for_line("request dispatched").await;
    up.process.signal("INT").await;
    up.process.wait_for_line("graceful shutdown").await;
    up.process.signal("INT").await;
    ended_with_failure(&mut up.process).await;
    assert!(up.printed("modelrelay: stopping immediately"));
    assert!(!String::from_utf8_lossy(&up.curl_output(curl).await.stdout).contains("[DONE]"));
}

#[tokio::test]
async fn ended_part_is_named_and_ends_run() {
    for (words, name) in [("part relay", "relay"), ("part worker$", "worker"), ("part worker demo", "demo")] {
        let mut up = Up::start(&[NO_BACKEND]).await;
        signal("KILL", &up.part(words));
        ended_with_failure(&mut up.process).await;
        assert!(
            up.printed(&format!("the {name} exited unexpectedly (signal: 9 (SIGKILL))")),
            "{}",
            up.process.log().dump()
        );
    }
}

#[tokio::test]
async fn part_failing_to_start_ends_run() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let mut process = spawn(&[NO_BACKEND, ("LISTEN_ADDR", &address)]).start();
    ended_with_failure(&mut process).await;
    assert!(process.log().contains(&format!("LISTEN_ADDR: cannot listen on {address}")), "{}", process.log().dump());
    assert!(process.log().contains("the relay exited unexpectedly (exit status: 1)"), "{}", process.log().dump());
}

#[tokio::test]
async fn killed_run_leaves_no_part_behind() {
    let mut up = Up::start(&[NO_BACKEND]).await;
    let parts = ["part relay", "part worker$", "part worker demo"].map(|words| up.part(words));
    up.process.kill().await;
    let log = up.process.log();
    for part in parts {
        poll_until(TEST_TIMEOUT, "the part's end", log, async || !runs(&part)).await;
    }
}

/// True until the process has ended, also if nothing has collected its exit status yet.
fn runs(pid: &str) -> bool {
    let state = Command::new("ps").args(["-o", "stat=", "-p", pid]).output().expect("ps");
    !matches!(state.stdout.first(), None | Some(b'Z'))
}

/// Checks that its code is 1, and that none of its parts is left, which would hold its output open.
async fn ended_with_failure(process: &mut Process) {
    let status = process.wait_exit().await;
    assert_eq!(status.code(), Some(1), "{}", process.log().dump());
    process.log().wait_until_closed().await;
}

/// Sends a signal to a process, or to a group of them.
fn signal(name: &str, to: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), "--", to]).status();
    assert!(sent.is_ok_and(|sent| sent.success()), "{name} {to}");
}
