//! TCP_NODELAY on every TCP socket, before the first byte is sent on it: otherwise a token could wait 40 ms for the
//! next one.

use std::collections::{HashMap, HashSet};

use modelrelay_harness::{
    client::Request,
    fake_backend::FakeBackend,
    fake_relay::{Ack, FakeRelay},
    relay::Relay,
    trace::{Call, Trace},
    worker_process::WorkerProcess,
};
use serde_json::json;

use crate::{SOCKETS, recorded};

/// Returns the number of TCP connections that sent something.
///
/// # Panics
/// If one did so without TCP_NODELAY.
fn checked_connections(calls: &[Call]) -> usize {
    // Open TCP sockets by descriptor, which is reused after a close: the call that created it, and the option.
    let mut open: HashMap<i32, (usize, bool)> = HashMap::new();
    let mut used = HashSet::new();
    for (at, call) in calls.iter().enumerate() {
        let made_tcp = match call.name.as_str() {
            "socket" => call.args.starts_with("AF_INET") && call.args.contains("SOCK_STREAM"),
            "accept4" => call.args.contains("AF_INET"),
            _ => false,
        };
        let (returned, fd) = (call.value().and_then(|value| i32::try_from(value).ok()), call.fd().unwrap_or(-1));
        if let (true, Some(new)) = (made_tcp, returned) {
            open.insert(new, (at, false));
        } else if call.name == "close" {
            open.remove(&fd);
        } else if let Some((made, has_option)) = open.get_mut(&fd) {
            *has_option |= call.args.contains("TCP_NODELAY, [1]") && returned == Some(0);
            if call.is_send() {
                assert!(*has_option, "sent without TCP_NODELAY: {call:?}");
                used.insert(*made);
            }
        }
    }
    used.len()
}

#[tokio::test]
async fn relay_sets_nodelay_on_accepted_connections() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder()
        .traced(&trace, SOCKETS)
        .env("WORKER_LISTEN_ADDR", "127.0.0.1:0")
        .env("ADMIN_LISTEN_ADDR", "127.0.0.1:0")
        .start()
        .await;
    let (admin, workers) = (relay.admin_addr().await, relay.worker_addr().await);
    let mut worker = relay.dial().to(workers).open().await;
    worker.register_core1(&["m"], 1).await;
    worker.grant(1).await;
    let _ = Request::get("/livez").fetch(admin, relay.log()).await.with_status(200);
    let request = relay.begin(Request::post("/v1/chat/completions", &json!({"model": "m"})));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = request.reply().await.with_status(200);
    // The readiness probe of the start, the worker, the admin listener, the client.
    recorded(&trace, "four connections", |calls| (checked_connections(calls) >= 4).then_some(())).await;
}

#[tokio::test]
async fn worker_sets_nodelay_on_dialled_and_accepted_connections() {
    let Some(trace) = Trace::new() else { return };
    let mut relay = FakeRelay::start().await;
    let mut backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).concurrency(2);
    let worker = worker.traced(&trace, SOCKETS).start().await;
    let mut link = relay.accept_with(&Ack::core1()).await;
    link.ready(&["m"], 2).await;
    // Two at once: two connections to the backend, the second of which must be dialled for a request.
    let requests = [(); 2].map(|()| link.send_request(&modelrelay_harness::fake_relay::RequestSpec::chat("m")));
    let calls = [backend.call().await, backend.call().await];
    for call in calls {
        call.answer_json(200, &json!({})).await;
    }
    for request in &requests {
        assert_eq!(link.reply(request).await.status, 200);
    }
    assert_eq!(worker.probe("/livez").await.status, 200);
    // The relay, the backend twice, the probe.
    recorded(&trace, "four connections", |calls| (checked_connections(calls) >= 4).then_some(())).await;
}

fn call(name: &str, args: &str, result: &str) -> Call {
    Call { name: name.to_owned(), args: args.to_owned(), result: result.to_owned() }
}

#[test]
#[should_panic(expected = "sent without TCP_NODELAY")]
fn reused_descriptor_needs_option_again() {
    checked_connections(&[
        call("accept4", "9, {sa_family=AF_INET}, [16], SOCK_CLOEXEC", "12"),
        call("setsockopt", "12, SOL_TCP, TCP_NODELAY, [1], 4", "0"),
        call("sendto", "12, \"x\", 1, MSG_NOSIGNAL, NULL, 0", "1"),
        call("close", "12", "0"),
        call("accept4", "9, {sa_family=AF_INET}, [16], SOCK_CLOEXEC", "12"),
        call("sendto", "12, \"x\", 1, MSG_NOSIGNAL, NULL, 0", "1"),
    ]);
}
