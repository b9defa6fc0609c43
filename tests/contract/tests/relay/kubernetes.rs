//! A relay with the settings, mounts and listeners that it has in a Pod.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use modelrelay_harness::{
    client::{Reply, Request},
    fake_kubernetes::{Data, FakeKubernetes, Mount},
    relay::Relay,
};
use serde_json::{Value, json};

use crate::support::chat;

const ADMIN: &str = "admin-token-in-a-secret";

struct Pod {
    _kubernetes: FakeKubernetes,
    config: Mount,
    admin: Mount,
    _keys: Mount,
    relay: Relay,
    admin_addr: SocketAddr,
    worker_addr: SocketAddr,
}

fn data(files: &[(&str, &str)]) -> Data {
    files.iter().map(|(name, content)| ((*name).to_owned(), content.as_bytes().to_vec())).collect()
}

fn yaml(secrets: &str) -> String {
    format!("requireApiKeys: false\nrelayCount: 2\nproviders:\n- name: local\n  workerSecrets: {secrets}\n")
}

impl Pod {
    async fn start() -> Self {
        let kubernetes = FakeKubernetes::start().await;
        let (config, admin, keys) = (Mount::new(), Mount::new(), Mount::new());
        config.show(&data(&[("relay.yaml", &yaml("[{file: worker-secret}]")), ("worker-secret", "first")]));
        admin.show(&data(&[("token", ADMIN)]));
        let path = |mount: &Mount, name: &str| mount.file(name).to_string_lossy().into_owned();
        let mut relay = Relay::builder().without_env("WORKER_SECRET").without_env("MODELRELAY_ADMIN_TOKEN");
        for (name, value) in kubernetes.variables(&keys).into_iter().chain([
            ("WORKER_LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("WORKERS_ON_CLIENT_PORT", "false".to_owned()),
            ("ADMIN_LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("MODELRELAY_CONFIG", path(&config, "relay.yaml")),
            ("MODELRELAY_ADMIN_TOKEN_FILE", path(&admin, "token")),
            ("POD_NAMESPACE", "llm".to_owned()),
            ("LOG_FORMAT", "json".to_owned()),
        ]) {
            relay = relay.env(name, &value);
        }
        let relay = relay.start().await;
        let (admin_addr, worker_addr) = (relay.admin_addr().await, relay.worker_addr().await);
        Self { _kubernetes: kubernetes, config, admin, _keys: keys, relay, admin_addr, worker_addr }
    }

    async fn admin_get(&self, to: SocketAddr, target: &str) -> Reply {
        Request::get(target).bearer(ADMIN).fetch(to, self.relay.log()).await
    }

    async fn state(&self) -> Value {
        self.admin_get(self.admin_addr, "/admin/state").await.with_status(200).json()
    }
}

/// Computes the hash that `/admin/state` must show with another program.
fn expected_hash(parts: &[&str]) -> String {
    let mut sum =
        Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the sha256sum command");
    let mut input = sum.stdin.take().expect("stdin is piped");
    for part in parts {
        input.write_all(&(part.len() as u64).to_be_bytes()).expect("sha256sum reads");
        input.write_all(part.as_bytes()).expect("sha256sum reads");
    }
    drop(input);
    let output = sum.wait_with_output().expect("sha256sum ends").stdout;
    String::from_utf8_lossy(&output).split_whitespace().next().expect("a hash").to_owned()
}

#[tokio::test]
async fn each_listener_serves_its_routes_and_probes() {
    let pod = Pod::start().await;
    let client = pod.relay.addr();
    for (target, served_at) in [("/admin/state", pod.admin_addr), ("/metrics", pod.admin_addr), ("/v1/models", client)]
    {
        for at in [client, pod.admin_addr, pod.worker_addr] {
            let expected = if at == served_at { 200 } else { 404 };
            assert_eq!(pod.admin_get(at, target).await.status, expected, "{target} at {at}");
        }
    }
    for at in [client, pod.admin_addr] {
        assert_eq!(pod.admin_get(at, "/livez").await.status, 200);
        // No worker is connected yet.
        assert_eq!(pod.admin_get(at, "/readyz").await.status, 503);
    }
    for at in [client, pod.admin_addr] {
        assert_eq!(pod.relay.dial().to(at).secret("first").refused().await.status, 404);
    }
    let mut worker = pod.relay.dial().to(pod.worker_addr).secret("first").open().await;
    assert_eq!(worker.register_core1(&["m"], 1).await["relay_count"], 2);
    worker.grant(1).await;
    assert_eq!(pod.admin_get(pod.admin_addr, "/readyz").await.status, 200);
    let pending = pod.relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn swapped_configuration_is_reported_by_expected_hash() {
    let pod = Pod::start().await;
    let one = yaml("[{file: worker-secret}]");
    assert_eq!(pod.state().await["config_hash"], expected_hash(&[&one, "worker-secret", "first"]));
    let both = yaml("[{file: worker-secret}, {file: worker-secret-previous}]");
    pod.config.show(&data(&[
        ("relay.yaml", &both),
        ("worker-secret", "second\n"),
        ("worker-secret-previous", "first"),
    ]));
    let expected = expected_hash(&[&both, "worker-secret", "second", "worker-secret-previous", "first"]);
    pod.relay.eventually("the new hash", || async { pod.state().await["config_hash"] == expected }).await;
    for secret in ["first", "second"] {
        let _worker = pod.relay.dial().to(pod.worker_addr).secret(secret).open().await;
    }
}

#[tokio::test]
async fn swapped_admin_token_is_applied() {
    let pod = Pod::start().await;
    pod.admin.show(&data(&[("token", "another-admin-token")]));
    pod.relay
        .eventually("the old token is refused", || async {
            pod.admin_get(pod.admin_addr, "/admin/state").await.status == 403
        })
        .await;
    let reply = Request::get("/admin/state").bearer("another-admin-token").fetch(pod.admin_addr, pod.relay.log()).await;
    assert_eq!(reply.status, 200);
}
