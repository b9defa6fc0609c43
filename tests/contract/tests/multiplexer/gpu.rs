//! A GPU whose driver does not respond.

use std::path::Path;
use std::process::Command;

use modelrelay_harness::fake_relay::FakeRelay;

use crate::rig::{Slot, slots1, worker_with};

#[tokio::test]
async fn worker_starts_despite_hanging_gpu_driver() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nvidia-smi");
    // Written by another process: a concurrent test that forks meanwhile would keep the file open for writing.
    let write = r#"printf '#!/bin/sh\nexec sleep 60\n' > "$1" && chmod 755 "$1""#;
    assert!(Command::new("sh").args(["-c", write, "sh"]).arg(&program).status().unwrap().success());
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut relay = FakeRelay::start().await;
    let (_config, worker) = worker_with(&Slot::default().yaml());
    let worker = worker.relay(relay.url()).env("PATH", path).start().await;
    let _link = relay.accept_with(&slots1()).await;
    let gave_up = "nvidia-smi did not exit";
    assert!(!worker.log().contains(gave_up), "the relay waited for nvidia-smi: {}", worker.log());
    // If NVIDIA's own library is present, it is used instead.
    if !Path::new("/proc/driver/nvidia").exists() {
        worker.process.wait_for_line(gave_up).await;
    }
}
