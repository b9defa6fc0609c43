//! Commands of the administrator's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use modelrelay_backends::server::{free_port, line_of, runs, until};
use modelrelay_backends::worker_program;
use modelrelay_multiplexer::driver::Driver;
use modelrelay_multiplexer::driver::hooks::{HookedModel, Hooks};
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;

use crate::rig::{folder, on_port};

fn hooked(load: &str, evict: &str) -> Hooks {
    hooked_with(load, evict, None)
}

fn hooked_with(load: &str, evict: &str, alive: Option<Vec<String>>) -> Hooks {
    let shell = |script: &str| ["sh", "-c", script].map(str::to_owned).to_vec();
    let served = Served::new("m");
    Hooks::new(
        [HookedModel { served, url: on_port(free_port()), load: shell(load), evict: shell(evict), alive }],
        worker_program(),
    )
}

#[tokio::test]
async fn unrunnable_alive_command_is_reported_before_loading() {
    let folder = folder();
    let eviction_file = folder.path().join("evicted");
    let no_program = vec!["/no/such/alive".to_owned()];
    let script = folder.path().join("not-executable");
    std::fs::write(&script, "true").unwrap();
    let not_executable = vec!["sh".to_owned(), "-c".to_owned(), script.to_string_lossy().into_owned()];
    for (alive, words) in [(no_program, ["/no/such/alive", "127"]), (not_executable, ["not-executable", "126"])] {
        let driver = hooked_with("true", &format!("echo done > {}", eviction_file.display()), Some(alive));
        let model = "m".into();
        let refused = driver.check(&model).await.expect_err("a check that fails").to_string();
        let failed = driver.load(&model, LoadKind::Cold).await.expect_err("no load").to_string();
        let unknown = driver.probe(&model).await.expect_err("an unknown state").to_string();
        // It is unknown whether the model is loaded, so the command runs, and its success alone proves nothing.
        let stuck = driver.evict(&model).await.expect_err("no proof").to_string();
        for message in [refused, failed, unknown, stuck] {
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
        assert_eq!(line_of(&eviction_file).await, "done");
        std::fs::remove_file(&eviction_file).expect("the eviction has run");
    }
}

#[tokio::test]
async fn killed_alive_command_gives_no_result() {
    let alive = ["sh", "-c", "kill -KILL $$"].map(str::to_owned).to_vec();
    let driver = hooked_with("true", "true", Some(alive));
    let unknown = driver.probe(&"m".into()).await.expect_err("a model that is not known to be unloaded").to_string();
    assert!(unknown.contains("kill -KILL"), "{unknown}");
}

#[tokio::test]
async fn failed_command_reports_its_output() {
    let driver = hooked("echo cannot connect to the Docker daemon >&2; exit 125", "true");
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err();
    assert!(
        matches!(&failure, LoadFailure::Exited(words) if words.contains("exit code 125") && words.contains("Docker daemon")),
        "{failure:?}"
    );
}

#[tokio::test]
async fn abandoned_command_ends_with_its_children() {
    let folder = folder();
    let pid_file = folder.path().join("pid");
    let driver = hooked(&format!("sh -c 'echo $$ > {}; exec sleep 1000'; true", pid_file.display()), "true");
    let model = "m".into();
    let pid = tokio::select! {
        loaded = driver.load(&model, LoadKind::Cold) => panic!("{loaded:?}"),
        line = line_of(&pid_file) => line.parse().unwrap(),
    };
    until("the command is gone", async || !runs(pid)).await;
}

#[tokio::test]
async fn commands_receive_their_model() {
    let folder = folder();
    let model_file = folder.path().join("model");
    let driver = hooked("true", &format!("echo $MODELRELAY_MODEL > {}", model_file.display()));
    driver.force_evict(&"m".into()).await.unwrap();
    assert_eq!(line_of(&model_file).await, "m");
}

#[tokio::test]
async fn backend_dying_during_load_fails_it_early() {
    let folder = folder();
    let (lives, probed) = (folder.path().join("lives"), folder.path().join("probed"));
    let alive = format!("test -e {} && echo yes >> {}", lives.display(), probed.display());
    let alive = ["sh", "-c", &alive].map(str::to_owned).to_vec();
    let driver = hooked_with(&format!("touch {}", lives.display()), "true", Some(alive));
    let model = "m".into();
    let dies = async {
        assert!(line_of(&probed).await.starts_with("yes"));
        std::fs::remove_file(&lives).expect("the file exists");
    };
    let load = tokio::time::timeout(modelrelay_harness::TEST_TIMEOUT, driver.load(&model, LoadKind::Cold));
    let (loaded, ()) = tokio::join!(load, dies);
    let failure = loaded.expect("an end long before loadTimeout").unwrap_err();
    assert!(matches!(&failure, LoadFailure::Exited(words) if words.contains("test -e")), "{failure:?}");
}

#[tokio::test]
async fn model_without_alive_exists_while_port_listens() {
    let folder = folder();
    let eviction_file = folder.path().join("evicted");
    let driver = hooked("true", &format!("echo done > {}", eviction_file.display()));
    let model = "m".into();
    let address = driver.url(&model).and_then(|url| url.socket_addrs(|| None).ok()?.pop()).expect("its address");
    let listener = tokio::net::TcpListener::bind(address).await.expect("the port is free");
    let probes = Arc::new(AtomicUsize::new(0));
    let server = tokio::spawn({
        let probes = Arc::clone(&probes);
        async move {
            // No request gets a response.
            while listener.accept().await.is_ok() {
                probes.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let eviction = driver.evict(&model);
    tokio::pin!(eviction);
    tokio::select! {
        evicted = &mut eviction => panic!("{evicted:?}"),
        () = async {
            assert_eq!(line_of(&eviction_file).await, "done");
            let before = probes.load(Ordering::Relaxed);
            until("it is probed twice", async || probes.load(Ordering::Relaxed) >= before + 2).await;
        } => {}
    }
    server.abort();
    eviction.await.expect("the receiver was dropped");
}
