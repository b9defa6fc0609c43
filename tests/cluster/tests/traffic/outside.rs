//! A worker that is not a Pod, as on a user's GPU machine, dials the relays' Service. The ClusterIP serves as the load
//! balancer.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use k8s_openapi::api::core::v1;
use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{Cluster, TEST_TIMEOUT, wait_until};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use super::stack::{PROVIDER, Stack, provider};

#[tokio::test]
async fn external_worker_reaches_every_relay_through_one_address() {
    let outside = Outside::start().await;
    let traffic = Traffic::to(outside.stack.service).streams(20).start();
    traffic.wait_for_underway(20).await;
    traffic.wait_for_answers(40).await;
    traffic.finish().await.expect_all_answered();
    outside.stack.change(&json!({"relay": {"replicas": 3}})).await;
    outside.stack.wait_for_workers(3, 1).await;
}

#[tokio::test]
async fn relay_joining_under_load_starves_no_other() {
    let outside = Outside::start().await;
    let traffic = Traffic::to(outside.stack.service).streams(20).start();
    traffic.wait_for_underway(20).await;
    outside.stack.change(&json!({"relay": {"replicas": 3}})).await;
    outside.stack.wait_for_workers(3, 1).await;
    traffic.wait_for_answers(40).await;
    traffic.finish().await.expect_all_answered();
}

/// Two relays, and a worker on this machine that is connected to both.
struct Outside {
    stack: Stack,
    _machine: Machine,
}

impl Outside {
    async fn start() -> Self {
        let namespace = Cluster::connect().await.namespace("traffic-outside").await;
        let stack = Stack::apply(namespace, &[provider(&json!({"service": {"workers": true}}))], 0).await;
        let machine = Machine::start(&stack, &[("WORKER_NAME", "gpu-box"), ("MAX_CONCURRENCY", "40")]).await;
        stack.wait_for_workers(2, 1).await;
        Self { stack, _machine: machine }
    }
}

/// A demo backend and its worker on this machine.
pub(crate) struct Machine {
    _backend: Child,
    _worker: Child,
}

impl Machine {
    /// Starts both; the worker dials the Service of the stack's Provider. `settings` are more of the worker's
    /// variables.
    pub(crate) async fn start(stack: &Stack, settings: &[(&str, &str)]) -> Self {
        let (backend, probe) = (free_address(), free_address());
        let backend_process = start(&["demo", "--listen", &backend.to_string()], &[]);
        wait_until("the backend", TEST_TIMEOUT, async || TcpStream::connect(backend).await.is_ok()).await;
        let mut all = worker_settings(stack).await;
        all.insert("BACKEND_URL", format!("http://{backend}"));
        all.insert("PROBE_ADDR", probe.to_string());
        all.insert("LOG_LEVEL", "warn".to_owned());
        let all = all.iter().map(|(name, value)| (*name, value.as_str()));
        let worker = start(&[], &all.chain(settings.iter().copied()).collect::<Vec<_>>());
        Self { _backend: backend_process, _worker: worker }
    }
}

/// Returns the variables by which a worker outside of the cluster reaches the relays of this Provider.
pub(crate) async fn worker_settings(stack: &Stack) -> BTreeMap<&'static str, String> {
    let secret = stack.namespace.api::<v1::Secret>().get("local-worker").await.expect("the operator created it");
    let secret = secret.data.unwrap_or_default().remove("worker-secret").expect("the Secret has a worker secret").0;
    BTreeMap::from([
        ("PROXY_URL", format!("http://{}:8081", stack.service.ip())),
        ("PROVIDER_NAME", PROVIDER.to_owned()),
        ("WORKER_SECRET", String::from_utf8(secret).expect("a secret is text")),
    ])
}

/// Starts the worker that `scripts/images` built, killed on drop.
fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Child {
    let program = worker_program();
    let mut command = Command::new(&program);
    // Settings for workers in this shell's environment must not affect it.
    command.env_clear().envs(environment.iter().copied()).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command.spawn().unwrap_or_else(|error| panic!("cannot start {}: {error}; run scripts/images", program.display()))
}

fn worker_program() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/images/bin/modelrelay-worker");
    std::env::var_os("MODELRELAY_WORKER").map_or(built, PathBuf::from)
}

/// Returns an address on which nothing listened a moment ago.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address is free");
    listener.local_addr().expect("the listener has an address")
}
