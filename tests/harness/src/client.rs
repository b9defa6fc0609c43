//! A small HTTP/1.1 client that shows the wire exactly, which most clients blur: every header as sent, every piece of a
//! body as it arrived, and whether a body ended or was cut off.
//!
//! It uses one connection per request, so that dropping a [`Response`] or a [`Pending`] acts like a client that
//! disconnects. A [`Connection`] sends several requests over one.

mod kept;
mod raw;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpSocket, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::TlsConnector;

pub use kept::KeptClient;
pub use raw::RawConnection;

use crate::{TEST_TIMEOUT, process::Log, secrecy, within, within_for};

/// A request that is being built.
#[derive(Debug, Clone)]
pub struct Request {
    method: String,
    target: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Bytes,
    receive_buffer: Option<u32>,
    tls: Option<Arc<ClientConfig>>,
}

impl Request {
    /// Creates a request of any method for a path with its query string.
    #[must_use]
    pub fn new(method: &str, target: &str) -> Self {
        Self {
            method: method.into(),
            target: target.into(),
            headers: Vec::new(),
            body: Bytes::new(),
            receive_buffer: None,
            tls: None,
        }
    }

    /// Creates a GET.
    #[must_use]
    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// Creates a POST of JSON, as every SDK sends it.
    #[must_use]
    pub fn post(target: &str, body: &Value) -> Self {
        Self::new("POST", target).header("content-type", "application/json").body(body.to_string())
    }

    /// Adds a header; the same name may be added again.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.into(), value.as_ref().to_vec()));
        self
    }

    /// Adds `authorization: Bearer TOKEN`.
    #[must_use]
    pub fn bearer(self, token: &str) -> Self {
        self.header("authorization", format!("Bearer {token}"))
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Limits the kernel's receive buffer, so that a reader that stops has an effect at once.
    #[must_use]
    pub fn small_receive_buffer(mut self) -> Self {
        // Not smaller than a loopback segment: below that the kernel waits for its timers between segments.
        self.receive_buffer = Some(128 * 1024);
        self
    }

    /// Sends it over TLS if a client is given.
    #[must_use]
    pub fn over_tls(mut self, client: Option<Arc<ClientConfig>>) -> Self {
        self.tls = client;
        self
    }

    /// True if it gets any response; false if the connection, its handshake or its request fails.
    pub async fn is_answered_at(self, to: SocketAddr, log: &Log) -> bool {
        let answered = async {
            match Connection::try_open(to, log, &self).await {
                Ok(connection) => connection.try_send(self).await.is_ok(),
                Err(_) => false,
            }
        };
        within("an answer, or a failure", log, answered).await
    }

    /// Sends it over a connection of its own and waits for the head of the response.
    pub async fn send(self, to: SocketAddr, log: &Log) -> Response {
        let what = format!("the answer to {} {}", self.method, self.target);
        let connection = Connection::open_for(to, log, &self).await;
        within(&what, log, connection.try_send(self))
            .await
            .unwrap_or_else(|error| panic!("{what}: {error}\n{}", log.dump()))
    }

    /// Sends it and reads the whole response.
    pub async fn fetch(self, to: SocketAddr, log: &Log) -> Reply {
        self.send(to, log).await.read_to_end().await
    }

    /// Sends it in the background, for a test that plays the worker meanwhile.
    #[must_use]
    pub fn start(self, to: SocketAddr, log: &Log) -> Pending {
        let log = log.clone();
        let task_log = log.clone();
        let what = format!("the answer to {} {}", self.method, self.target);
        let task = tokio::spawn(async move {
            let connection = Connection::open_for(to, &task_log, &self).await;
            connection.try_send(self).await
        });
        Pending { task: AbortOnDrop(task), what, log }
    }

    /// Adds the request's credentials to the secrets that neither the log nor responses about the program may contain.
    /// Returns true if its response is one of these.
    fn hide_from(&self, log: &Log) -> bool {
        self.headers.iter().for_each(|(name, value)| log.secrets().plant_header(name, &String::from_utf8_lossy(value)));
        secrecy::is_about_the_program(&self.method, &self.target)
    }

    fn into_hyper(self, host: SocketAddr) -> http::Request<Full<Bytes>> {
        let mut request = http::Request::builder().method(self.method.as_str()).uri(&self.target);
        if !self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            request = request.header("host", host.to_string());
        }
        for (name, value) in &self.headers {
            request = request.header(name, value.as_slice());
        }
        request.body(Full::new(self.body)).expect("tests send well-formed requests; odd ones go over RawConnection")
    }
}

/// A persistent connection.
#[derive(Debug)]
pub struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: Arc<AbortOnDrop<()>>,
    host: SocketAddr,
    log: Log,
}

impl Connection {
    /// Connects.
    pub async fn open(to: SocketAddr, log: &Log) -> Self {
        Self::open_for(to, log, &Request::get("/")).await
    }

    /// Sends one request and waits for the head of its response.
    pub async fn send(&mut self, request: Request) -> Response {
        let what = format!("the answer to {} {}", request.method, request.target);
        let log = self.log.clone();
        let is_about_the_program = request.hide_from(&log);
        let answer = async {
            // The previous response may have ended before its connection is ready.
            self.sender.ready().await?;
            self.sender.send_request(request.into_hyper(self.host)).await
        };
        let answer = within(&what, &log, answer).await;
        let answer = answer.unwrap_or_else(|error| panic!("{what}: {error}\n{}", log.dump()));
        Response::new(answer, self.driver.clone(), log, is_about_the_program)
    }

    async fn open_for(to: SocketAddr, log: &Log, request: &Request) -> Self {
        let opened = within(&format!("a connection to {to}"), log, Self::try_open(to, log, request)).await;
        opened.unwrap_or_else(|error| panic!("cannot connect to {to}: {error}\n{}", log.dump()))
    }

    async fn try_open(to: SocketAddr, log: &Log, request: &Request) -> io::Result<Self> {
        let stream = connect(to, request.receive_buffer).await?;
        let stream: Box<dyn Stream> = match &request.tls {
            None => Box::new(stream),
            Some(client) => {
                let connector = TlsConnector::from(Arc::clone(client));
                // Boxed: it is large, and part of every future that sends a request.
                Box::new(Box::pin(connector.connect(to.ip().into(), stream)).await?)
            }
        };
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.expect("the HTTP/1 handshake cannot fail");
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { sender, driver: Arc::new(AbortOnDrop(driver)), host: to, log: log.clone() })
    }

    async fn try_send(mut self, request: Request) -> hyper::Result<Response> {
        let is_about_the_program = request.hide_from(&self.log);
        let answer = self.sender.send_request(request.into_hyper(self.host)).await?;
        Ok(Response::new(answer, self.driver, self.log, is_about_the_program))
    }
}

/// A connection, plain or over TLS.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A request on its way. Dropping it closes its connection.
#[derive(Debug)]
pub struct Pending {
    task: AbortOnDrop<hyper::Result<Response>>,
    what: String,
    log: Log,
}

impl Pending {
    /// Waits for the head of the response.
    pub async fn response(self) -> Response {
        self.response_within(TEST_TIMEOUT).await
    }

    /// The same as [`Self::response`], for a response that may take longer.
    pub async fn response_within(mut self, patience: Duration) -> Response {
        within_for(patience, &self.what, &self.log, &mut self.task.0)
            .await
            .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.what, self.log.dump()))
            .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.what, self.log.dump()))
    }

    /// Waits for the whole response.
    pub async fn reply(self) -> Reply {
        self.response().await.read_to_end().await
    }

    /// True if a response or an error has arrived already.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.task.0.is_finished()
    }

    /// Disconnects without reading further.
    pub fn abandon(self) {
        drop(self);
    }
}

/// The header fields of a response, as sent and in order.
#[derive(Debug, Clone, Default)]
pub struct Headers(pub Vec<(String, Vec<u8>)>);

impl Headers {
    /// The first value of this name.
    #[must_use]
    pub fn first(&self, name: &str) -> Option<String> {
        self.all(name).into_iter().next()
    }

    /// Every value of this name.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<String> {
        let of_name = self.0.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        of_name.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }
}

/// A response whose body may be incomplete. Dropping it closes the connection.
#[derive(Debug)]
pub struct Response {
    /// Its status.
    pub status: u16,
    /// Its header fields.
    pub headers: Headers,
    body: Incoming,
    text: Vec<u8>,
    _driver: Arc<AbortOnDrop<()>>,
    log: Log,
    /// All received bytes of a response about the program.
    received: Vec<u8>,
    is_about_the_program: bool,
}

/// The next part of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Bytes, as received in one read.
    Data(Bytes),
    /// The regular end.
    End,
    /// The connection broke before the end, with the client's reason.
    Aborted(String),
}

impl Response {
    fn new(
        answer: http::Response<Incoming>,
        driver: Arc<AbortOnDrop<()>>,
        log: Log,
        is_about_the_program: bool,
    ) -> Self {
        let (head, body) = answer.into_parts();
        let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
        let status = head.status.as_u16();
        let (headers, text, received) = (Headers(headers), Vec::new(), Vec::new());
        Self { status, headers, body, text, received, _driver: driver, log, is_about_the_program }
    }

    /// The next piece of the body.
    pub async fn next_piece(&mut self) -> Piece {
        loop {
            let frame = within("the next piece of a response body", &self.log, self.body.frame()).await;
            return match frame {
                None => Piece::End,
                Some(Err(error)) => Piece::Aborted(error.to_string()),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => {
                        self.search(&data);
                        Piece::Data(data)
                    }
                    Err(_trailers) => continue,
                },
            };
        }
    }

    /// Searches the received bytes for secrets, if the response is about the program and may contain none.
    fn search(&mut self, data: &[u8]) {
        if self.is_about_the_program {
            self.received.extend_from_slice(data);
            self.log.secrets().check("an answer about the program", &String::from_utf8_lossy(&self.received));
        }
    }

    /// Reads until the body so far (including earlier reads of this function) contains `part`, and returns it all.
    ///
    /// # Panics
    /// If the body ends first.
    pub async fn read_until(&mut self, part: &str) -> String {
        loop {
            let text = String::from_utf8_lossy(&self.text).into_owned();
            if text.contains(part) {
                return text;
            }
            match self.next_piece().await {
                Piece::Data(data) => self.text.extend_from_slice(&data),
                end @ (Piece::End | Piece::Aborted(_)) => {
                    panic!("{end:?} before {part:?} in {text:?}\n{}", self.log.dump())
                }
            }
        }
    }

    /// Reads at least `count` further bytes and returns them.
    ///
    /// # Panics
    /// If the body ends first.
    pub async fn read_at_least(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            match self.next_piece().await {
                Piece::Data(data) => bytes.extend_from_slice(&data),
                end @ (Piece::End | Piece::Aborted(_)) => {
                    panic!("{end:?} after {} of {count} bytes\n{}", bytes.len(), self.log.dump())
                }
            }
        }
        bytes
    }

    /// Reads the rest, regardless of how it ends. Text that [`Self::read_until`] returned is included first.
    pub async fn read_to_end(mut self) -> Reply {
        let mut body = std::mem::take(&mut self.text);
        let aborted = loop {
            match self.next_piece().await {
                Piece::Data(data) => body.extend_from_slice(&data),
                Piece::End => break false,
                Piece::Aborted(_) => break true,
            }
        };
        Reply { status: self.status, headers: self.headers, body, aborted, log: self.log }
    }
}

/// A whole response.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its header fields.
    pub headers: Headers,
    /// The received part of its body.
    pub body: Vec<u8>,
    /// True if the body was cut off instead of ended.
    pub aborted: bool,
    log: Log,
}

impl Reply {
    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("status {}, no JSON body ({error}): {:?}\n{}", self.status, self.text(), self.log.dump())
        })
    }

    /// The first header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        self.headers.first(name)
    }

    /// Panics unless the status is `status`, with the body and the log. Returns itself.
    pub fn with_status(self, status: u16) -> Self {
        assert_eq!(self.status, status, "body {:?}\n{}", self.text(), self.log.dump());
        self
    }
}

async fn connect(to: SocketAddr, receive_buffer: Option<u32>) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.expect("a socket can be made");
    if let Some(bytes) = receive_buffer {
        // Before connecting: the window is negotiated then.
        socket.set_recv_buffer_size(bytes).expect("the receive buffer can be set");
    }
    let stream = socket.connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[derive(Debug)]
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests;
