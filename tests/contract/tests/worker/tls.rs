//! Links over TLS, with a private certificate authority.

use std::time::Duration;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Certificates, FakeRelay};
use modelrelay_harness::worker_process::{Rig, WorkerProcess};

#[tokio::test]
async fn relay_is_trusted_through_relay_ca_file() {
    let certificates = Certificates::make();
    let mut relay = FakeRelay::start_tls(&certificates).await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).concurrency(4);
    let worker = worker.file("RELAY_CA_FILE", &certificates.ca_file()).start().await;
    let link = relay.accept_registered(&["core1"]).await;
    let mut rig = Rig { relay, link, backend, worker };
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn wss_address_is_accepted() {
    let certificates = Certificates::make();
    let mut relay = FakeRelay::start_tls(&certificates).await;
    let url = relay.url().replace("https://", "wss://");
    let worker = WorkerProcess::builder().relay(url).file("RELAY_CA_FILE", &certificates.ca_file());
    let _worker = worker.start().await;
    assert_eq!(relay.dial().await.path, "/v1/worker/connect");
}

#[tokio::test]
async fn unknown_authority_is_rejected_and_logged() {
    let certificates = Certificates::make();
    let mut relay = FakeRelay::start_tls(&certificates).await;
    let worker = WorkerProcess::builder().relay(relay.url()).start().await;
    let dial = relay.dial_within(Duration::from_secs(2)).await;
    assert!(dial.is_none(), "the secret was sent to a stranger");
    let log = worker.log().to_lowercase();
    assert!(log.contains("certificate"), "{log}");
}

#[tokio::test]
async fn other_authority_is_rejected() {
    let (trusted, other) = (Certificates::make(), Certificates::make());
    let mut relay = FakeRelay::start_tls(&other).await;
    let worker = WorkerProcess::builder().relay(relay.url()).file("RELAY_CA_FILE", &trusted.ca_file());
    let _worker = worker.start().await;
    assert!(relay.dial_within(Duration::from_secs(2)).await.is_none(), "the secret was sent to a stranger");
}
