//! `make run`, as a new user meets it, but for the build: a `cargo` that does nothing stands in for the real one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::process::{Process, Spawn};
use modelrelay_harness::relay::Relay;
use tempfile::TempDir;
use tokio::process::Command;

#[tokio::test]
async fn without_a_backend_the_demo_answers_the_printed_curl_line() {
    let run = Run::start(&[("BACKEND_PORTS", "1")]).await;
    assert!(run.said("none found"));
    let answer = run.paste_curl_line().await;
    for word in ["demo", "backend,", "not", "a", "model."] {
        assert!(answer.contains(&format!("\" {word}\"")), "{answer}");
    }
    assert!(answer.trim_end().ends_with("data: [DONE]"), "{answer}");
    run.stop().await;
}

#[tokio::test]
async fn a_backend_on_a_usual_port_is_found_and_a_relay_is_not_taken_for_one() {
    let (relay, backend) = (Relay::start().await, FakeBackend::with_models(&["org/model:1b"]).await);
    let ports = format!("{} {}", relay.addr().port(), backend.addr().port());
    let run = Run::start(&[("BACKEND_PORTS", &ports)]).await;
    assert!(run.said(&format!("port {}: a ModelRelay relay", relay.addr().port())));
    assert!(run.said(&format!("found one at {}", backend.url())));
    assert!(run.curl_line().contains("\"model\":\"org/model:1b\""));
    run.stop().await;
}

#[tokio::test]
async fn a_taken_port_gives_way_to_the_next_free_one() {
    let (first, second) = (Run::start(&[("BACKEND_PORTS", "1")]).await, Run::start(&[("BACKEND_PORTS", "1")]).await);
    assert_ne!(first.url(), second.url());
    assert!(second.said("is taken, so it listens on"));
    first.stop().await;
    assert!(second.paste_curl_line().await.contains("[DONE]"), "the second run lives on its own");
    second.stop().await;
}

#[tokio::test]
async fn an_answer_that_is_being_written_is_finished_before_the_end() {
    let run = Run::start(&[("BACKEND_PORTS", "1")]).await;
    let curl = run.spawn_curl();
    run.process.wait_for_line("request dispatched").await;
    run.process.terminate().await;
    let answer = modelrelay_harness::within("curl's end", run.process.log(), curl.wait_with_output()).await.unwrap();
    assert!(String::from_utf8_lossy(&answer.stdout).trim_end().ends_with("data: [DONE]"));
    run.ended().await;
}

#[tokio::test]
async fn the_printed_token_logs_in_at_the_printed_page() {
    let run = Run::start(&[("BACKEND_PORTS", "1")]).await;
    let line = run.process.log().lines().into_iter().find(|line| line.contains("/dashboard")).expect("a page");
    let (url, token) = line.split_once("   (log in with ").expect("a token");
    let url = url.rsplit(' ').next().unwrap();
    let login = format!("{{\"token\":\"{}\"}}", token.trim_end_matches(')'));
    let status = |args: &[&str]| {
        let ours = ["-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "x-modelrelay-dashboard: 1"];
        let args = [&ours, args].concat();
        let output = std::process::Command::new("curl").args(args).output().expect("curl is installed");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(status(&[url]), "200");
    assert_eq!(status(&["-d", &login, &url.replace("/dashboard", "/dashboard/login")]), "204");
    assert_eq!(status(&["-d", r#"{"token":"another"}"#, &url.replace("/dashboard", "/dashboard/login")]), "403");
    run.stop().await;
}

/// A running `make run`.
struct Run {
    process: Process,
    _fake_cargo: TempDir,
}

impl Run {
    /// Starts it and waits until it says what to do next.
    async fn start(env: &[(&str, &str)]) -> Self {
        let fake_cargo = tempfile::tempdir().unwrap();
        let cargo = fake_cargo.path().join("cargo");
        std::fs::write(&cargo, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&cargo, PermissionsExt::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", fake_cargo.path().display(), std::env::var("PATH").unwrap());

        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/run");
        let spawn = Spawn::program(script.to_str().unwrap()).env("PATH", path);
        let process = env.iter().fold(spawn, |spawn, (name, value)| spawn.env(*name, *value)).start();
        process.wait_for_line("Stop with Ctrl-C").await;
        Self { process, _fake_cargo: fake_cargo }
    }

    fn said(&self, what: &str) -> bool {
        self.process.log().contains(what)
    }

    /// What it tells people to paste.
    fn curl_line(&self) -> String {
        let lines = self.process.log().lines();
        let start = lines.iter().position(|line| line.contains("curl -N")).expect("a curl line");
        lines[start..=start + 1].join("\n")
    }

    fn url(&self) -> String {
        self.curl_line().split_whitespace().nth(2).expect("curl -N URL").to_owned()
    }

    fn spawn_curl(&self) -> tokio::process::Child {
        let shell =
            Command::new("sh").arg("-c").arg(self.curl_line()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        shell.expect("a shell")
    }

    async fn paste_curl_line(&self) -> String {
        let output = self.spawn_curl().wait_with_output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Ends it as `kill` and Ctrl-C do.
    async fn stop(self) {
        self.process.terminate().await;
        self.ended().await;
    }

    async fn ended(mut self) {
        let status = self.process.wait_exit().await;
        assert!(status.success(), "{status}\n{}", self.process.log().dump());
        // All its programs hold its output open: once that is closed, none is left.
        self.process.log().wait_until_closed().await;
        assert!(self.said("make run: stopped"));
    }
}

impl Drop for Run {
    /// Where a test failed, the script is killed and cannot end what it started.
    fn drop(&mut self) {
        if let Some(pid) = self.process.pid() {
            let _ = std::process::Command::new("pkill").args(["-KILL", "-P", &pid.to_string()]).status();
        }
    }
}
