//! The three programs that get the same bytes, and the requests behind each of them.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use modelrelay_harness::{
    TEST_TIMEOUT, cannot_run, poll_until,
    process::{Process, Spawn, on_path},
    worker::{FakeWorker, Frame},
};
use serde_json::Map;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream, UnixStream},
};

/// After this time without a byte, a program is considered to wait for more.
const SILENCE: Duration = Duration::from_secs(2);

/// A request that was forwarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ForwardedRequest {
    /// Method and target, the target without scheme, host, fragment and repeated slashes.
    pub(super) line: String,
    pub(super) body: String,
}

impl ForwardedRequest {
    fn new(method: &str, target: &str, body: &[u8]) -> Self {
        let path = target.split_once("://").map_or(target, |(_, rest)| rest.find('/').map_or("/", |at| &rest[at..]));
        // No backend expects a fragment; nginx forwards it all the same.
        let path = path.split('#').next().unwrap_or_default();
        // The relay normalizes these for its own routes; others forward them.
        let path = path.replace("//", "/");
        Self { line: format!("{method} {path}"), body: String::from_utf8_lossy(body).into_owned() }
    }
}

/// Forwarded requests, by the number of the case, which each request carries as `case-NUMBER`.
#[derive(Debug, Clone, Default)]
pub(super) struct Recorded(Arc<Mutex<BTreeMap<usize, Vec<ForwardedRequest>>>>);

impl Recorded {
    fn push(&self, head: &str, forwarded: ForwardedRequest) {
        let number = head
            .split_once("case-")
            .and_then(|(_, rest)| rest.split(|char: char| !char.is_ascii_digit()).next()?.parse().ok());
        let number = number.unwrap_or_else(|| panic!("received a request that belongs to no case: {head:?}"));
        self.0.lock().expect("no panic while the lock is held").entry(number).or_default().push(forwarded);
    }

    pub(super) fn take(&self) -> BTreeMap<usize, Vec<ForwardedRequest>> {
        std::mem::take(&mut self.0.lock().expect("no panic while the lock is held"))
    }
}

/// The address at which a program accepts connections.
#[derive(Debug, Clone)]
pub(super) enum Door {
    Tcp(SocketAddr),
    /// A file, so that no port has to be guessed.
    Unix(PathBuf),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

async fn open(door: &Door) -> std::io::Result<Box<dyn Stream>> {
    Ok(match door {
        Door::Tcp(to) => Box::new(TcpStream::connect(to).await?),
        Door::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

/// The result of a conversation.
#[derive(Debug)]
pub(super) struct Talk {
    /// The status of the first response; 0 if none.
    pub(super) status: u16,
    /// True if the program closed rather than waited.
    pub(super) closed: bool,
}

/// Writes the bytes and reads until the program closes or stays silent.
pub(super) async fn talk(door: Door, bytes: Vec<u8>) -> Talk {
    let mut stream = open(&door).await.expect("the program accepts connections");
    // It may close before it has read all of it.
    let _ = stream.write_all(&bytes).await;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    let closed = loop {
        match tokio::time::timeout(SILENCE, stream.read(&mut part)).await {
            Err(_) => break false,
            Ok(Ok(0) | Err(_)) => break true,
            Ok(Ok(count)) => text.extend_from_slice(&part[..count]),
        }
    };
    let text = String::from_utf8_lossy(&text).into_owned();
    let statuses = text.split("HTTP/1.").skip(1).filter_map(|rest| rest.get(2..5)?.parse().ok());
    Talk { status: statuses.into_iter().find(|status| *status != 100).unwrap_or(0), closed }
}

/// Records the requests that reach a worker of the relay, and responds to them.
pub(super) fn record_worker(mut worker: FakeWorker) -> Recorded {
    let recorded = Recorded::default();
    let to = recorded.clone();
    tokio::spawn(async move {
        loop {
            let message = match worker.recv().await {
                Frame::Json(message) if message["type"] == "request" => message,
                Frame::Close(..) => return,
                Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) => continue,
            };
            let text = |name: &str| message[name].as_str().unwrap_or_default();
            let head = format!("{} {}", text("endpoint_path"), message["headers"]);
            // A worker receives a method only for the few paths with a different one.
            let method = message["method"].as_str().unwrap_or("POST");
            to.push(&head, ForwardedRequest::new(method, text("endpoint_path"), text("body").as_bytes()));
            worker.complete(text("request_id"), 200, Map::new(), "{}").await;
        }
    });
    recorded
}

/// Another HTTP implementation, in front of a backend that records its requests.
pub(super) struct Oracle {
    door: Door,
    pub(super) recorded: Recorded,
    _process: Process,
    _folder: TempDir,
}

impl Oracle {
    /// Starts `nginx` or `haproxy`, if installed.
    pub(super) async fn start(name: &str) -> Option<Self> {
        let Some(binary) = on_path(name) else {
            cannot_run(&format!("{name} is not installed"));
            return None;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let recorded = Recorded::default();
        let backend = record(recorded.clone()).await;
        let socket = folder.path().join("socket");
        let (config, args) = match name {
            "nginx" => (nginx_config(&socket, backend), ["-p", ".", "-c", "config"].as_slice()),
            _ => (haproxy_config(&socket, backend), ["-db", "-q", "-f", "config"].as_slice()),
        };
        std::fs::write(folder.path().join("config"), config).expect("the folder is writable");
        let spawn = args.iter().fold(Spawn::program(&binary.to_string_lossy()), |spawn, arg| spawn.arg(*arg));
        let process = spawn.working_dir(folder.path()).start();
        let door = Door::Unix(socket);
        let is_open = async || open(&door).await.is_ok();
        poll_until(TEST_TIMEOUT, &format!("{name} to listen"), process.log(), is_open).await;
        Some(Self { door, recorded, _process: process, _folder: folder })
    }

    pub(super) fn door(&self) -> &Door {
        &self.door
    }
}

/// Lines as long as the relay accepts; otherwise Debian's defaults.
fn nginx_config(socket: &Path, backend: SocketAddr) -> String {
    format!(
        "daemon off; master_process off; pid nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off; large_client_header_buffers 4 64k; client_max_body_size 64m;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server {{ listen unix:{}; location / {{ proxy_pass http://{backend}; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }}
}}
",
        socket.display()
    )
}

fn haproxy_config(socket: &Path, backend: SocketAddr) -> String {
    format!(
        "global
  tune.bufsize 81920
defaults
  mode http
  timeout connect 5s
  timeout client 30s
  timeout server 30s
frontend clients
  bind unix@{}
  default_backend backend
backend backend
  http-reuse always
  server backend {backend}
",
        socket.display()
    )
}

/// Starts a backend that parses as strictly as possible and responds to everything with 200.
async fn record(recorded: Recorded) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let recorded = recorded.clone();
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                while let Some((head, forwarded)) = read_request(&mut stream).await {
                    recorded.push(&head, forwarded);
                    if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    addr
}

/// Returns one whole request, or `None` at the end of the connection and for an incomplete one.
async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, ForwardedRequest)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let field = |name: &str| {
        let mut lines = head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
    };
    let body = match (field("transfer-encoding"), field("content-length")) {
        (Some(coding), _) => {
            assert_eq!(coding.to_lowercase(), "chunked", "an oracle passed on a coding that it cannot know");
            read_chunks(stream).await?
        }
        (None, Some(length)) => read_bytes(stream, length.parse().ok()?).await?,
        (None, None) => Vec::new(),
    };
    let mut words = head.split(' ');
    let forwarded = ForwardedRequest::new(words.next()?, words.next()?, &body);
    Some((head, forwarded))
}

async fn read_chunks(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        let size = u64::from_str_radix(line.trim_end(), 16).ok()?;
        if size == 0 {
            // Trailers, and the empty line.
            loop {
                line.clear();
                stream.read_line(&mut line).await.ok()?;
                if line.trim_end().is_empty() {
                    return Some(body);
                }
            }
        }
        body.extend(read_bytes(stream, size).await?);
        stream.read_line(&mut line).await.ok()?;
    }
}

/// Reads bytes without allocating for lengths that are only announced.
async fn read_bytes(stream: &mut BufReader<TcpStream>, count: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(count).read_to_end(&mut bytes).await.ok()?;
    (bytes.len() as u64 == count).then_some(bytes)
}
