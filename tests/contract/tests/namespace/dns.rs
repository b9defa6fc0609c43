//! `dns+http`: a link to every address behind a name, and the handling of changes of the list.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::Request,
    fake_backend::{Answer, FakeBackend},
    fake_relay::{Ack, FakeRelay, RelayLink, RequestSpec},
    relay::{Relay, WORKER_SECRET},
    worker_process::{WorkerProcess, wait_for_model},
};
use serde_json::json;

use crate::{Namespace, RESOLVER, inside};

const A: &str = "127.0.0.2";
const B: &str = "127.0.0.3";
const PORT: u16 = 7001;

/// The interval between lookups of a name.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

/// Longer than the pause before a lost link is dialled again (1 s at most), to show that it is not.
const QUIET: Duration = Duration::from_secs(3);

/// A real worker, two fake relays under one name, and its link to each.
struct Pair {
    worker: WorkerProcess,
    backend: FakeBackend,
    a: FakeRelay,
    b: FakeRelay,
}

async fn fake_relay(address: &str) -> FakeRelay {
    FakeRelay::start_at(format!("{address}:{PORT}").parse().expect("an address")).await
}

fn ack(name: &str) -> Ack {
    Ack { relay_id: format!("relay-{name}"), relay_count: 2, ..Ack::core1() }
}

async fn link(relay: &mut FakeRelay, name: &str) -> RelayLink {
    let mut link = relay.accept_with(&ack(name)).await;
    link.models(&["m"]).await;
    link
}

/// Starts the worker with these addresses.
async fn pair(namespace: &Namespace, addresses: &[&str]) -> Pair {
    namespace.set_addresses(addresses);
    let (a, b, backend) = (fake_relay(A).await, fake_relay(B).await, FakeBackend::start().await);
    let worker = WorkerProcess::builder().relay(format!("dns+http://relays.test:{PORT}")).backend(backend.url());
    let worker = worker.concurrency(4).start().await;
    Pair { worker, backend, a, b }
}

async fn serves(link: &mut RelayLink, backend: &mut FakeBackend) {
    let request = link.send_request(&RequestSpec::chat("m"));
    backend.call().await.answer_json(200, &json!({"ok": true})).await;
    assert_eq!(link.reply(&request).await.status, 200);
}

impl Pair {
    /// Waits until a lookup has returned this number of addresses, after a different one.
    async fn expect_lookup(&self, addresses: usize) {
        let what = format!("relay addresses changed to {addresses}");
        let wanted = format!("addresses={addresses}");
        let found = |line: &str| (line.contains("relay addresses changed") && line.contains(&wanted)).then_some(());
        self.worker.process.log().wait_for(&what, found).await;
    }
}

#[tokio::test]
async fn worker_links_to_every_relay_behind_name() {
    inside("dns::worker_links_to_every_relay_behind_name", |namespace| async move {
        namespace.set_addresses(&[A, B]);
        let relay = |address: &str| Relay::builder().env("LISTEN_ADDR", &format!("{address}:{PORT}")).start();
        let (a, b) = (relay(A).await, relay(B).await);
        let backend = FakeBackend::start().await;
        backend.answer_with(|_, body| Answer::new(200, &[], body));
        let worker = WorkerProcess::builder().relay(format!("dns+http://relays.test:{PORT}")).backend(backend.url());
        let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(4).start().await;
        for relay in [&a, &b] {
            wait_for_model(relay, "m").await;
            let _ = relay.fetch(Request::post("/v1/chat/completions", &json!({"model": "m"}))).await.with_status(200);
            assert_eq!(relay.workers().await.len(), 1);
        }
    })
    .await;
}

#[tokio::test]
async fn removed_address_keeps_its_link_without_new_dial() {
    inside("dns::removed_address_keeps_its_link_without_new_dial", |namespace| async move {
        let mut pair = pair(&namespace, &[A, B]).await;
        let (mut to_a, mut to_b) = (link(&mut pair.a, "a").await, link(&mut pair.b, "b").await);
        namespace.set_addresses(&[A]);
        pair.expect_lookup(1).await;
        to_b.grant(4).await;
        serves(&mut to_b, &mut pair.backend).await;
        drop(to_b);
        assert!(pair.b.dial_within(QUIET).await.is_none(), "an address that left the list was dialled");
        serves(&mut to_a, &mut pair.backend).await;
        drop(to_a);
        link(&mut pair.a, "a").await;
    })
    .await;
}

#[tokio::test]
async fn returning_address_is_dialled_again() {
    inside("dns::returning_address_is_dialled_again", |namespace| async move {
        let mut pair = pair(&namespace, &[A, B]).await;
        let (_to_a, to_b) = (link(&mut pair.a, "a").await, link(&mut pair.b, "b").await);
        namespace.set_addresses(&[A]);
        pair.expect_lookup(1).await;
        drop(to_b);
        namespace.set_addresses(&[A, B]);
        link(&mut pair.b, "b").await;
    })
    .await;
}

#[tokio::test]
async fn returning_address_with_live_link_gets_no_second() {
    inside("dns::returning_address_with_live_link_gets_no_second", |namespace| async move {
        let mut pair = pair(&namespace, &[A, B]).await;
        let (_to_a, mut to_b) = (link(&mut pair.a, "a").await, link(&mut pair.b, "b").await);
        namespace.set_addresses(&[A]);
        pair.expect_lookup(1).await;
        namespace.set_addresses(&[A, B]);
        assert!(
            pair.b.dial_within(LOOKUP_INTERVAL + QUIET).await.is_none(),
            "a second link in addition to the live one"
        );
        serves(&mut to_b, &mut pair.backend).await;
        drop(to_b);
        link(&mut pair.b, "b").await;
    })
    .await;
}

#[tokio::test]
async fn new_address_is_dialled_within_lookup_interval() {
    inside("dns::new_address_is_dialled_within_lookup_interval", |namespace| async move {
        let mut pair = pair(&namespace, &[A]).await;
        let mut to_a = link(&mut pair.a, "a").await;
        let added = Instant::now();
        namespace.set_addresses(&[A, B]);
        let mut to_b = link(&mut pair.b, "b").await;
        // Plus two seconds for a busy machine.
        assert!(added.elapsed() < LOOKUP_INTERVAL + Duration::from_secs(2), "dialled after {:?}", added.elapsed());
        to_b.grant(4).await;
        serves(&mut to_b, &mut pair.backend).await;
        serves(&mut to_a, &mut pair.backend).await;
    })
    .await;
}

#[tokio::test]
async fn failed_lookup_keeps_address_list() {
    inside("dns::failed_lookup_keeps_address_list", |namespace| async move {
        let mut pair = pair(&namespace, &[A, B]).await;
        let (mut to_a, to_b) = (link(&mut pair.a, "a").await, link(&mut pair.b, "b").await);
        namespace.set_addresses(&[]);
        pair.worker.process.wait_for_line("cannot resolve the relay's name").await;
        drop(to_b);
        link(&mut pair.b, "b").await;
        serves(&mut to_a, &mut pair.backend).await;
    })
    .await;
}

#[tokio::test]
async fn name_without_addresses_is_looked_up_again() {
    inside("dns::name_without_addresses_is_looked_up_again", |namespace| async move {
        let mut pair = pair(&namespace, &[]).await;
        pair.worker.process.wait_for_line("cannot resolve the relay's name").await;
        namespace.set_addresses(&[B]);
        link(&mut pair.b, "b").await;
    })
    .await;
}

#[tokio::test]
async fn two_addresses_of_one_relay_share_one_link() {
    inside("dns::two_addresses_of_one_relay_share_one_link", |namespace| async move {
        namespace.set_addresses(&[A, B]);
        let mut relay = fake_relay("0.0.0.0").await;
        let backend = FakeBackend::start().await;
        let url = format!("dns+http://relays.test:{PORT}");
        let _worker = WorkerProcess::builder().relay(url).backend(backend.url()).start().await;
        let first = link(&mut relay, "a").await;
        let second = relay.accept_with(&Ack { duplicate: true, ..ack("a") }).await;
        second.close(1000, "duplicate");
        assert!(relay.dial_within(QUIET).await.is_none(), "the worker dialled a connected relay again");
        drop(first);
        link(&mut relay, "a").await;
    })
    .await;
}

#[tokio::test]
async fn hanging_lookup_does_not_delay_exit() {
    inside("dns::hanging_lookup_does_not_delay_exit", |namespace| async move {
        // It receives every query and replies to none.
        let _resolver = std::net::UdpSocket::bind(format!("{RESOLVER}:53")).expect("a port of a network of our own");
        let mut pair = pair(&namespace, &[]).await;
        pair.worker.terminate().await;
        assert_eq!(pair.worker.process.wait_exit_within(Duration::from_secs(3)).await.code(), Some(0));
    })
    .await;
}
