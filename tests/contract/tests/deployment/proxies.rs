//! A TLS proxy in front of the relay: Debian's nginx and Caddy, with the shipped files, of which only names and ports
//! are changed.

use std::net::{SocketAddr, TcpListener};

use modelrelay_harness::client::{Reply, Request, Response};
use modelrelay_harness::fake_backend::{Call, FakeBackend, sse};
use modelrelay_harness::process::{Process, Spawn, on_path};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::tls::Certificates;
use modelrelay_harness::worker_process::{Stack, WorkerProcess, wait_for_model};
use modelrelay_harness::{TEST_TIMEOUT, cannot_run, poll_until};
use serde_json::json;
use tempfile::TempDir;

use crate::{deployed, replaced};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Nginx,
    Caddy,
}

/// A proxy in front of a relay, and a worker that connects through it.
struct Deployment {
    kind: Kind,
    folder: TempDir,
    certificates: Certificates,
    address: SocketAddr,
    proxy: Process,
    relay: Relay,
    worker: WorkerProcess,
    backend: FakeBackend,
}

impl Deployment {
    /// Starts the deployment. Returns `None` if the proxy is not installed.
    async fn start(kind: Kind) -> Option<Self> {
        let name = if kind == Kind::Nginx { "nginx" } else { "caddy" };
        if on_path(name).is_none() {
            cannot_run(&format!("{name} is not installed"));
            return None;
        }
        let relay = Relay::builder().env("TRUSTED_PROXIES", "127.0.0.1").env("LOG_LEVEL", "debug").start().await;
        let certificates = Certificates::make();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let address = free_address();
        kind.write(&folder, &certificates, address, relay.addr());
        let proxy = kind.spawn(&folder);
        let backend = FakeBackend::start().await;
        wait_until_open(address, &proxy).await;
        let worker = Stack::worker_of(&relay, &backend).relay(format!("https://{address}"));
        let worker = worker.file("RELAY_CA_FILE", &certificates.ca_file()).start().await;
        wait_for_model(&relay, "m").await;
        Some(Self { kind, folder, certificates, address, proxy, relay, worker, backend })
    }

    async fn fetch(&self, request: Request) -> Reply {
        request.over_tls(Some(self.certificates.client())).fetch(self.address, self.relay.log()).await
    }

    /// Starts a stream, and reads its first piece before there is a second one.
    async fn begin_stream(&mut self) -> (Response, Call) {
        let request = Request::post("/v1/chat/completions", &json!({"model": "m", "stream": true, "messages": []}));
        let client = request.over_tls(Some(self.certificates.client())).start(self.address, self.relay.log());
        let mut call = self.backend.call().await;
        call.start_stream().await;
        call.chunk(&sse("first")).await;
        let mut response = client.response().await;
        assert_eq!(response.read_until("first").await, "data: first\n\n");
        (response, call)
    }
}

impl Kind {
    /// Writes the shipped file, adapted to this machine.
    fn write(self, folder: &TempDir, certificates: &Certificates, address: SocketAddr, relay: SocketAddr) {
        let file = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(file("tls.crt"), certificates.certificate()).expect("the folder is writable");
        std::fs::write(file("tls.key"), certificates.key()).expect("the folder is writable");
        let config = match self {
            Self::Nginx => {
                let contents = replaced(
                    deployed("nginx/modelrelay.conf"),
                    &[
                        ("server 127.0.0.1:8080;", format!("server {relay};")),
                        ("listen 80;", format!("listen unix:{};", file("plain"))),
                        ("listen [::]:80;", String::new()),
                        ("listen 443 ssl http2;", format!("listen {address} ssl http2;")),
                        ("listen [::]:443 ssl http2;", String::new()),
                        ("server_name relay.example;", "server_name localhost 127.0.0.1;".to_owned()),
                        ("/etc/letsencrypt/live/relay.example/fullchain.pem", file("tls.crt")),
                        ("/etc/letsencrypt/live/relay.example/privkey.pem", file("tls.key")),
                    ],
                );
                std::fs::write(file("site.conf"), contents).expect("the folder is writable");
                // Debian's own configuration, but without root.
                "daemon off; pid nginx.pid; error_log stderr notice;
events { worker_connections 768; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  include site.conf;
}
"
                .to_owned()
            }
            Self::Caddy => {
                let site = format!("https://{address} {{\n\ttls {} {}", file("tls.crt"), file("tls.key"));
                let all = [("relay.example {", site), ("127.0.0.1:8080", relay.to_string())];
                let contents = replaced(deployed("caddy/Caddyfile"), &all);
                format!("{{\n\tadmin unix/{}\n\tauto_https off\n}}\n{contents}", file("admin"))
            }
        };
        std::fs::write(file("config"), config).expect("the folder is writable");
    }

    fn spawn(self, folder: &TempDir) -> Process {
        let (name, args): (_, &[&str]) = match self {
            Self::Nginx => ("nginx", &["-p", ".", "-c", "config"]),
            Self::Caddy => ("caddy", &["run", "--config", "config", "--adapter", "caddyfile"]),
        };
        let program = on_path(name).expect("it is installed");
        let spawn = Spawn::program(&program.to_string_lossy());
        let spawn = args.iter().fold(spawn, |spawn, arg| spawn.arg(*arg));
        spawn.env("HOME", folder.path().display().to_string()).working_dir(folder.path()).start()
    }
}

impl Deployment {
    /// Reloads as `systemctl reload` does.
    async fn reload(&self) {
        match self.kind {
            Kind::Nginx => {
                self.proxy.signal("HUP").await;
                // New processes accept connections from here on.
                self.proxy.wait_for_line("gracefully shutting down").await;
            }
            Kind::Caddy => {
                let caddy = on_path("caddy").expect("it is installed");
                let address = format!("unix/{}", self.folder.path().join("admin").display());
                let args = ["reload", "--force", "--config", "config", "--adapter", "caddyfile", "--address", &address];
                let reload = args.iter().fold(Spawn::program(&caddy.to_string_lossy()), |spawn, arg| spawn.arg(*arg));
                let home = self.folder.path().display().to_string();
                let mut reload = reload.env("HOME", home).working_dir(self.folder.path()).start();
                assert!(reload.wait_exit().await.success(), "{}", reload.log().dump());
            }
        }
    }

    /// Restarts as `systemctl restart` does: at once, with open connections.
    async fn restart(&mut self) {
        self.proxy.signal(if self.kind == Kind::Nginx { "TERM" } else { "KILL" }).await;
        self.proxy.wait_exit().await;
        self.proxy = self.kind.spawn(&self.folder);
        wait_until_open(self.address, &self.proxy).await;
    }
}

/// Returns a free address. nginx needs a fixed port; another process is unlikely to take it meanwhile, and that would
/// be noticed.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

async fn wait_until_open(address: SocketAddr, proxy: &Process) {
    let is_open = async || tokio::net::TcpStream::connect(address).await.is_ok();
    poll_until(TEST_TIMEOUT, "a proxy that listens", proxy.log(), is_open).await;
}

async fn whole_requests_streams_and_addresses_pass(kind: Kind) {
    let Some(mut deployment) = Deployment::start(kind).await else { return };
    let address = deployment.relay.workers().await[0]["address"].clone();
    assert_eq!(address, "127.0.0.1", "the address must be the worker's own, not the proxy's");
    let reply = deployment.fetch(Request::get("/v1/models")).await.with_status(200);
    assert_eq!(reply.json()["data"][0]["id"], "m");

    // More than a proxy accepts by default, both ways.
    let large = "x".repeat(3_000_000);
    let request = Request::post("/v1/chat/completions", &json!({"model": "m", "messages": [], "user": large}));
    let client =
        request.over_tls(Some(deployment.certificates.client())).start(deployment.address, deployment.relay.log());
    let mut call = deployment.backend.call().await;
    assert!(call.read_body().await.len() > large.len());
    call.answer_json(200, &json!({ "content": large })).await;
    assert_eq!(client.reply().await.with_status(200).json()["content"], large);

    // Each piece is forwarded at once, and the end unchanged.
    let (mut response, mut call) = deployment.begin_stream().await;
    call.chunk(&sse("second")).await;
    response.read_until("second").await;
    call.end_stream().await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: first\n\ndata: second\n\n", false));

    // A client's disconnect reaches the backend.
    let (response, mut call) = deployment.begin_stream().await;
    drop(response);
    call.closed().await;
}

async fn a_reload_cuts_no_stream_and_loses_no_worker_for_long(kind: Kind) {
    let Some(mut deployment) = Deployment::start(kind).await else { return };
    let (mut response, mut call) = deployment.begin_stream().await;
    deployment.reload().await;
    if kind == Kind::Nginx {
        // Its old process finishes its connections.
        call.chunk(&sse("second")).await;
        response.read_until("second").await;
    }
    drop((response, call));
    // The next request is served, regardless of whether the proxy keeps the worker's connection.
    wait_for_model(&deployment.relay, "m").await;
    let (mut response, mut call) = deployment.begin_stream().await;
    call.chunk(&sse("second")).await;
    response.read_until("second").await;
}

async fn a_worker_is_back_after_a_restart_of_the_proxy(kind: Kind) {
    let Some(mut deployment) = Deployment::start(kind).await else { return };
    let before = deployment.relay.workers().await[0]["worker_id"].clone();
    deployment.restart().await;
    let relay = &deployment.relay;
    let is_another = || async { relay.workers().await.iter().any(|worker| worker["worker_id"] != before) };
    relay.eventually("the worker is back", is_another).await;
    wait_for_model(relay, "m").await;
    let (mut response, mut call) = deployment.begin_stream().await;
    call.chunk(&sse("second")).await;
    response.read_until("second").await;
    assert!(deployment.worker.log().contains("connected to"), "{}", deployment.worker.log());
}

#[tokio::test]
async fn nginx_passes_whole_requests_streams_and_addresses() {
    whole_requests_streams_and_addresses_pass(Kind::Nginx).await;
}

#[tokio::test]
async fn caddy_passes_whole_requests_streams_and_addresses() {
    whole_requests_streams_and_addresses_pass(Kind::Caddy).await;
}

#[tokio::test]
async fn nginx_reload_cuts_no_stream_and_workers_return() {
    a_reload_cuts_no_stream_and_loses_no_worker_for_long(Kind::Nginx).await;
}

#[tokio::test]
async fn workers_return_soon_after_caddy_reload() {
    a_reload_cuts_no_stream_and_loses_no_worker_for_long(Kind::Caddy).await;
}

#[tokio::test]
async fn worker_reconnects_after_nginx_restart() {
    a_worker_is_back_after_a_restart_of_the_proxy(Kind::Nginx).await;
}

#[tokio::test]
async fn worker_reconnects_after_caddy_restart() {
    a_worker_is_back_after_a_restart_of_the_proxy(Kind::Caddy).await;
}
