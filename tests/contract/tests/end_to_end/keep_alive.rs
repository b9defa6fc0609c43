//! Peers that lose their network: the kernel probes idle connections.

use modelrelay_harness::client::Request;
use modelrelay_harness::worker_process::Stack;
use modelrelay_harness::{TEST_TIMEOUT, cannot_run, poll_until};
use serde_json::json;

/// Linux only: a row for each IPv4 connection.
const CONNECTIONS: &str = "/proc/net/tcp";
const ESTABLISHED: &str = "01";
/// The timer code of a connection that waits to send the next keep-alive probe.
const KEEP_ALIVE: &str = "02";

/// Returns the timers of established connections from or to a port of this machine.
fn timers(is_meant: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let table = std::fs::read_to_string(CONNECTIONS).expect("Linux");
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|row| row[3] == ESTABLISHED && is_meant(row[1], row[2]));
    rows.map(|row| row[5][..2].to_owned()).collect()
}

#[tokio::test]
async fn relay_and_worker_probe_their_idle_connections() {
    if !std::path::Path::new(CONNECTIONS).exists() {
        return cannot_run("the connections of this machine are read from /proc/net/tcp");
    }
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(Request::post("/v1/chat/completions", &json!({"model": "m"})));
    let call = stack.backend.call().await;
    let port_of = |address: &str, port: u16| address.ends_with(&format!(":{port:04X}"));
    let (relay, backend) = (stack.relay.addr().port(), stack.backend.addr().port());
    let all_probe = |timers: Vec<String>| !timers.is_empty() && timers.iter().all(|timer| timer == KEEP_ALIVE);
    let log = stack.relay.log();
    // The client's connection, and the worker's.
    poll_until(TEST_TIMEOUT, "probes of the relay", log, async || all_probe(timers(|local, _| port_of(local, relay))))
        .await;
    poll_until(TEST_TIMEOUT, "probes of the worker to its backend", log, async || {
        all_probe(timers(|_, remote| port_of(remote, backend)))
    })
    .await;
    call.answer_json(200, &json!({})).await;
    client.reply().await.with_status(200);
}
