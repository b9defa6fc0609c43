//! An operator's own commands.

use std::time::Duration;

use modelrelay_backends::server::{free_port, line_of, runs, until};
use modelrelay_backends::worker_program;
use modelrelay_worker::multiplexer::driver::Driver;
use modelrelay_worker::multiplexer::driver::hooks::{HookedModel, Hooks};
use modelrelay_worker::multiplexer::driver::served::Served;
use modelrelay_worker::multiplexer::error::LoadFailure;
use modelrelay_worker::multiplexer::estimate::LoadKind;

use crate::rig::{folder, on_port};

fn hooked(load: &str, evict: &str) -> Hooks {
    let shell = |script: &str| ["sh", "-c", script].map(str::to_owned).to_vec();
    let served = Served::new("m");
    Hooks::new(
        [HookedModel { served, url: on_port(free_port()), load: shell(load), evict: shell(evict), alive: None }],
        worker_program(),
    )
}

#[tokio::test]
async fn a_command_that_fails_says_why() {
    let driver = hooked("echo cannot connect to the Docker daemon >&2; exit 125", "true");
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err();
    assert!(
        matches!(&failure, LoadFailure::Exited(words) if words.contains("exit code 125") && words.contains("Docker daemon")),
        "{failure:?}"
    );
}

#[tokio::test]
async fn an_abandoned_command_ends_with_what_it_started() {
    let folder = folder();
    let seen = folder.path().join("pid");
    let driver = hooked(&format!("sh -c 'echo $$ > {}; exec sleep 1000'; true", seen.display()), "true");
    let model = "m".into();
    let load = tokio::time::timeout(Duration::from_millis(500), driver.load(&model, LoadKind::Cold)).await;
    assert!(load.is_err());
    let pid = line_of(&seen).await.parse().unwrap();
    until("the command is gone", async || !runs(pid)).await;
}

#[tokio::test]
async fn commands_know_their_model() {
    let folder = folder();
    let seen = folder.path().join("model");
    let driver = hooked("true", &format!("echo $MODELRELAY_MODEL > {}", seen.display()));
    driver.force_evict(&"m".into()).await.unwrap();
    assert_eq!(line_of(&seen).await, "m");
}
