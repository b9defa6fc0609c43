//! The programs with the addresses that they get in a cluster: `[::]`, over IPv6 and IPv4.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use modelrelay_harness::cannot_run;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::process::{Log, Spawn};
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay};
use modelrelay_harness::worker_process::Stack;
use serde_json::json;
use tokio::net::TcpStream;

const LOOPBACKS: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::LOCALHOST)];

fn has_ipv6() -> bool {
    let has = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has {
        cannot_run("this machine has no IPv6");
    }
    has
}

async fn get(target: &str, (ip, port): (IpAddr, u16), log: &Log) -> String {
    let request = Request::get(target).bearer(ADMIN_TOKEN);
    request.fetch(SocketAddr::new(ip, port), log).await.with_status(200).text()
}

#[tokio::test]
async fn every_listener_accepts_both_ip_versions() {
    if !has_ipv6() {
        return;
    }
    let relay = Relay::builder().env("LISTEN_ADDR", "[::]:0").env("WORKER_LISTEN_ADDR", "[::]:0");
    let relay = relay.env("WORKERS_ON_CLIENT_PORT", "false").env("ADMIN_LISTEN_ADDR", "[::]:0").start().await;
    let mut backend = FakeBackend::start().await;
    let workers = relay.worker_addr().await.port();
    let worker = Stack::worker_of(&relay, &backend).relay(format!("http://[::1]:{workers}"));
    let worker = worker.env("PROBE_ADDR", "[::]:0").start().await;
    assert!(worker.probe_addr().is_ipv6(), "{}", worker.probe_addr());
    let admin = relay.admin_addr().await.port();
    for ip in LOOPBACKS {
        relay
            .eventually("a worker", async || get("/admin/workers", (ip, admin), relay.log()).await.contains("\"m\""))
            .await;
        assert!(get("/admin/state", (ip, admin), relay.log()).await.contains("config_hash"));
        assert_eq!(get("/livez", (ip, worker.probe_addr().port()), relay.log()).await, "ok\n");
        let request = Request::post("/v1/chat/completions", &json!({"model": "m"}));
        let reply = request.start(SocketAddr::new(ip, relay.addr().port()), relay.log());
        backend.call().await.answer_json(200, &json!({"from": "backend"})).await;
        assert_eq!(reply.reply().await.with_status(200).json()["from"], "backend");
    }
}

#[tokio::test]
async fn failed_logins_over_ipv4_are_counted_by_address() {
    if !has_ipv6() {
        return;
    }
    let relay = Relay::builder().env("LISTEN_ADDR", "[::]:0").start().await;
    let port = relay.addr().port();
    let login = async |ip: IpAddr| {
        let request =
            Request::post("/dashboard/login", &json!({"token": "wrong"})).header("x-modelrelay-dashboard", "1");
        request.fetch(SocketAddr::new(ip, port), relay.log()).await.status
    };
    let [ipv6, ipv4] = LOOPBACKS;
    // IPv4 arrives as ::ffff:127.0.0.1. All such addresses have one /64, which includes ::1.
    relay.eventually("a lock", async || login(ipv4).await == 429).await;
    assert_eq!(login(ipv6).await, 403);
}

#[tokio::test]
async fn operator_listens_on_both_ip_versions() {
    if !has_ipv6() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path.to_string_lossy().into_owned()
    };
    // No API server responds there, and none is needed for listening.
    let kubeconfig = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                      clusters: [{name: c, cluster: {server: 'http://[::1]:9'}}], users: [{name: u, user: {}}]}";
    let operator = Spawn::program("modelrelay-operator")
        .env("KUBECONFIG", file("kubeconfig", kubeconfig))
        .env("OPERATOR_DEFAULTS", file("defaults.yaml", "relay: {image: r:1}\nworker: {image: w:1}\n"))
        .env("LISTEN_ADDR", "[::]:0")
        .env("WEBHOOK_LISTEN_ADDR", "[::]:0")
        .env("WEBHOOK_CONFIGURATION", "modelrelay")
        .start();
    let port = async |setting: &str| -> u16 {
        let line = operator.wait_for_line(&format!("\"setting\":\"{setting}\"")).await;
        let address = line.split("\"address\":\"").nth(1).and_then(|rest| rest.split('"').next());
        let address: SocketAddr = address.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{line}"));
        assert!(address.is_ipv6(), "{address}");
        address.port()
    };
    let (probes, webhook) = (port("--listen-addr").await, port("--webhook-listen-addr").await);
    for ip in LOOPBACKS {
        assert_eq!(get("/livez", (ip, probes), operator.log()).await, "ok\n");
        TcpStream::connect((ip, webhook)).await.expect("a listener");
    }
}
