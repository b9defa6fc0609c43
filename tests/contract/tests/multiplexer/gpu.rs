//! A GPU whose driver does not answer.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use modelrelay_harness::fake_relay::FakeRelay;

use crate::rig::{Slot, slots1, worker_with};

#[tokio::test]
async fn a_worker_starts_though_its_gpus_driver_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nvidia-smi");
    std::fs::write(&program, "#!/bin/sh\nexec sleep 60\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut relay = FakeRelay::start().await;
    let (_config, worker) = worker_with(&Slot::default().yaml());
    let worker = worker.relay(relay.url()).env("PATH", path).start().await;
    let _link = relay.accept_with(&slots1()).await;
    let gave_up = "nvidia-smi has not ended";
    assert!(!worker.log().contains(gave_up), "the relay waited for it: {}", worker.log());
    // Where NVIDIA's own library is, it is asked instead.
    if !Path::new("/proc/driver/nvidia").exists() {
        worker.process.wait_for_line(gave_up).await;
    }
}
