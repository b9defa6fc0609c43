//! A Kubernetes API server that has one Secret and verifies tokens, and the kubelet that mounts the Secret.
//!
//! It serves HTTPS with an authority of its own, as in a cluster: a bearer token that rotates, optimistic locking by
//! `resourceVersion`, merge patches and updates, and any failure that a test requests. The test itself updates a
//! [`Mount`], because on a node this may take a minute.

mod answer;
mod mount;
mod tokens;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

pub use mount::Mount;
pub use tokens::{AN_HOUR, HeldReviews, made_up};

use crate::fake_relay::Certificates;

/// The namespace of the Secret.
pub const NAMESPACE: &str = "llm";
/// The Secret's name.
pub const SECRET: &str = "local-api-keys";
/// The name of the keys in the Secret's data, and of the file in a mount.
pub const DATA_KEY: &str = "keys.json";

/// The Secret's data, decoded.
pub type Data = BTreeMap<String, Vec<u8>>;

/// The failure of the next matching request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Responds with this status and a message.
    Status(u16, &'static str),
    /// 429 with `Retry-After: 1`.
    TooManyRequests,
    /// Closes the connection without any effect.
    Drop,
    /// Executes the request, and closes the connection instead of responding.
    DropAfterwards,
    /// Keeps the connection open and sends nothing.
    Silence,
}

/// The event in place of a response.
enum Unanswered {
    Dropped,
    Silent,
}

/// The API server. Dropping it ends it.
pub struct FakeKubernetes {
    addr: SocketAddr,
    account: TempDir,
    shared: Arc<Mutex<State>>,
    /// True while reviews are held.
    held: Arc<watch::Sender<bool>>,
    serving: JoinHandle<()>,
}

type Meanwhile = Box<dyn FnOnce(&mut Data) + Send>;

struct State {
    /// `None` if the Secret does not exist.
    secret: Option<Data>,
    version: u64,
    token: String,
    read_faults: VecDeque<Fault>,
    write_faults: VecDeque<Fault>,
    after_next_read: Option<Meanwhile>,
    reads: usize,
    writes: usize,
    refusals: usize,
    tokens: tokens::Tokens,
}

impl FakeKubernetes {
    /// Starts a server with an empty Secret.
    ///
    /// # Panics
    /// If this machine has no `openssl`, no free port, or no room for files.
    pub async fn start() -> Self {
        let certificates = Certificates::make();
        let account = tempfile::tempdir().expect("a temporary directory");
        std::fs::copy(certificates.ca_file(), account.path().join("ca.crt")).expect("a copy");
        std::fs::write(account.path().join("namespace"), NAMESPACE).expect("a file");
        let shared = Arc::new(Mutex::new(State {
            secret: Some(Data::new()),
            version: 100,
            token: String::new(),
            read_faults: VecDeque::new(),
            write_faults: VecDeque::new(),
            after_next_read: None,
            reads: 0,
            writes: 0,
            refusals: 0,
            tokens: tokens::Tokens::default(),
        }));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let held = Arc::new(watch::Sender::new(false));
        let serving = tokio::spawn(serve(listener, certificates.acceptor(), Arc::clone(&shared), Arc::clone(&held)));
        let kubernetes = Self { addr, account, shared, held, serving };
        kubernetes.rotate_token("service-account-token-1");
        kubernetes
    }

    /// The variables of a relay in a Pod of this cluster, with the Secret mounted at `mount`.
    #[must_use]
    pub fn variables(&self, mount: &Mount) -> Vec<(&'static str, String)> {
        let mut variables = self.account_variables();
        variables.push(("API_KEYS_SECRET", SECRET.to_owned()));
        variables.push(("API_KEYS_FILE", mount.file(DATA_KEY).to_string_lossy().into_owned()));
        variables
    }

    /// The variables of a relay in a Pod of this cluster.
    #[must_use]
    pub fn account_variables(&self) -> Vec<(&'static str, String)> {
        vec![
            ("KUBERNETES_SERVICE_HOST", self.addr.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT", self.addr.port().to_string()),
            ("SERVICE_ACCOUNT_DIR", self.account.path().to_string_lossy().into_owned()),
        ]
    }

    /// Replaces the account's token, as the kubelet does; the server accepts no other from now on.
    pub fn rotate_token(&self, token: &str) {
        let file = self.account.path().join("token");
        let fresh = self.account.path().join("token.new");
        std::fs::write(&fresh, token).expect("a file");
        std::fs::rename(fresh, file).expect("a renamed file");
        self.state().token = token.to_owned();
    }

    /// Makes the server accept only this token, which the kubelet has not mounted yet.
    pub fn expect_token(&self, token: &str) {
        self.state().token = token.to_owned();
    }

    /// Makes the next reads fail like this, one after the other.
    pub fn fail_reads(&self, faults: &[Fault]) {
        self.state().read_faults = faults.iter().cloned().collect();
    }

    /// Makes the next writes fail like this, one after the other.
    pub fn fail_writes(&self, faults: &[Fault]) {
        self.state().write_faults = faults.iter().cloned().collect();
    }

    /// Changes the Secret right after the next read, before the reader can write.
    pub fn after_next_read(&self, change: impl FnOnce(&mut Data) + Send + 'static) {
        self.state().after_next_read = Some(Box::new(change));
    }

    /// Changes the Secret now.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn change(&self, change: impl FnOnce(&mut Data)) {
        let mut state = self.state();
        change(state.secret.as_mut().expect("a Secret"));
        state.version += 1;
    }

    /// Deletes the Secret.
    pub fn delete(&self) {
        self.state().secret = None;
    }

    /// Creates the Secret again, empty.
    pub fn recreate(&self) {
        let mut state = self.state();
        state.secret = Some(Data::new());
        state.version += 1;
    }

    /// The Secret's data; `None` if it does not exist.
    #[must_use]
    pub fn data(&self) -> Option<Data> {
        self.state().secret.clone()
    }

    /// The records of the keys in the Secret.
    ///
    /// # Panics
    /// If there are none, or they are not JSON.
    #[must_use]
    pub fn keys(&self) -> Vec<Value> {
        let data = self.data().expect("a Secret");
        let stored: Value = serde_json::from_slice(data.get(DATA_KEY).expect("keys in the Secret")).expect("JSON");
        stored["keys"].as_array().expect("a list of keys").clone()
    }

    /// The number of successful reads.
    #[must_use]
    pub fn reads(&self) -> usize {
        self.state().reads
    }

    /// The number of successful writes.
    #[must_use]
    pub fn writes(&self) -> usize {
        self.state().writes
    }

    /// The number of requests that were rejected or dropped.
    #[must_use]
    pub fn refusals(&self) -> usize {
        self.state().refusals
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }
}

impl Drop for FakeKubernetes {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, shared: Arc<Mutex<State>>, held: Arc<watch::Sender<bool>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, shared, held) = (tls.clone(), Arc::clone(&shared), Arc::clone(&held));
        tokio::spawn(async move {
            let Ok(stream) = tls.accept(stream).await else { return };
            let service = service_fn(|request| answer(request, Arc::clone(&shared), Arc::clone(&held)));
            // An error is a connection that was dropped on purpose.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    request: http::Request<Incoming>,
    shared: Arc<Mutex<State>>,
    held: Arc<watch::Sender<bool>>,
) -> Result<http::Response<Full<Bytes>>, std::io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    if parts.uri.path() == tokens::PATH {
        tokens::wait_while_held(&held).await;
    }
    let answer = lock(&shared).answer(&parts, &body);
    match answer {
        Ok(answer) => Ok(answer),
        Err(Unanswered::Dropped) => Err(std::io::Error::other("dropped, as a test wants it")),
        Err(Unanswered::Silent) => std::future::pending().await,
    }
}

fn lock(shared: &Mutex<State>) -> MutexGuard<'_, State> {
    shared.lock().expect("no holder of the state panics")
}
