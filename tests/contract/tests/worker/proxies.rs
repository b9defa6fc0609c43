//! Relays behind an HTTP proxy, which the usual variables configure.

use modelrelay_harness::connect_proxy::ConnectProxy;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Certificates, FakeRelay};
use modelrelay_harness::worker_process::{Rig, WorkerBuilder, WorkerProcess};

/// Uses a name that only the proxy can resolve.
fn worker(scheme: &str) -> WorkerBuilder {
    WorkerProcess::builder().relay(format!("{scheme}://relay.example")).concurrency(4)
}

#[tokio::test]
async fn http_proxy_carries_plain_link() {
    let mut relay = FakeRelay::start().await;
    let mut proxy = ConnectProxy::start(relay.addr()).await;
    let backend = FakeBackend::start().await;
    // The backend is not dialled through it.
    let worker = worker("ws").backend(backend.url()).env("HTTP_PROXY", format!("http://{}", proxy.addr()));
    let worker = worker.env("RELAY_HEADERS", "x-access: one").start().await;
    let dial = relay.dial().await;
    assert_eq!((dial.header("host"), dial.header("x-access")), (Some("relay.example:80"), Some("one")));
    let head = proxy.next_request().await;
    assert_eq!(head, "CONNECT relay.example:80 HTTP/1.1\r\nHost: relay.example:80\r\n\r\n");
    dial.refuse(503).await;
    let link = relay.accept_registered(&["core1"]).await;
    let mut rig = Rig { relay, link, backend, worker };
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
    proxy.next_request().await;
    assert!(proxy.is_unused(), "the worker made another connection through the proxy");
}

#[tokio::test]
async fn https_proxy_carries_encrypted_link() {
    let certificates = Certificates::make();
    let mut relay = FakeRelay::start_tls(&certificates).await;
    let mut proxy = ConnectProxy::start(relay.addr()).await;
    let url = format!("http://me:planted%40word@{}", proxy.addr());
    let worker = worker("wss").file("RELAY_CA_FILE", &certificates.ca_file()).env("https_proxy", url).start().await;
    assert_eq!(relay.dial().await.path, "/v1/worker/connect");
    let head = proxy.next_request().await;
    assert!(head.starts_with("CONNECT relay.example:443 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("\r\nProxy-Authorization: Basic bWU6cGxhbnRlZEB3b3Jk\r\n"), "{head}");
    let log = worker.log();
    assert!(!log.contains("planted") && !log.contains("bWU6cGxh"), "{log}");
}

#[tokio::test]
async fn proxy_over_tls_carries_both_kinds() {
    let certificates = Certificates::make();
    for (mut relay, scheme) in
        [(FakeRelay::start().await, "http"), (FakeRelay::start_tls(&certificates).await, "https")]
    {
        let mut proxy = ConnectProxy::start_tls(relay.addr(), &certificates).await;
        let worker = worker(scheme).file("RELAY_CA_FILE", &certificates.ca_file());
        let _worker = worker.env("ALL_PROXY", format!("https://{}", proxy.addr())).start().await;
        relay.accept_registered(&["core1"]).await;
        assert!(proxy.next_request().await.starts_with("CONNECT relay.example:"), "{scheme}");
    }
}

#[tokio::test]
async fn loopback_and_no_proxy_are_dialled_directly() {
    let mut relay = FakeRelay::start().await;
    let proxy = ConnectProxy::refusing("403 Forbidden").await;
    let url = format!("http://{}", proxy.addr());
    let local = WorkerProcess::builder().relay(relay.url()).env("ALL_PROXY", &url).start().await;
    relay.dial().await;
    let worker = worker("http").env("ALL_PROXY", &url).env("NO_PROXY", "10.0.0.0/8, .example").start().await;
    worker.process.wait_for_line("cannot link to the relay").await;
    assert!(proxy.is_unused(), "{}{}", local.log(), worker.log());
}

#[tokio::test]
async fn refusal_names_proxy_and_its_status() {
    let proxy = ConnectProxy::refusing("407 Proxy Authentication Required").await;
    let worker = worker("https").env("HTTPS_PROXY", format!("me:planted-4711@{}", proxy.addr())).start().await;
    let status = "returned 407 Proxy Authentication Required for CONNECT relay.example:443";
    let line = worker.process.wait_for_line(status).await;
    assert!(line.contains(&format!("the proxy http://{}", proxy.addr())) && !line.contains("planted-4711"), "{line}");
}

#[tokio::test]
async fn proxy_of_other_protocol_is_rejected() {
    let process = worker("https").env("ALL_PROXY", "socks5://me:planted-4711@proxy.example").spawn();
    let line = process.wait_for_line("ALL_PROXY: its value (not shown) must be http://HOST:PORT").await;
    assert!(!line.contains("planted-4711"), "{line}");
}
