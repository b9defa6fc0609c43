//! The client side of the demo backend's tests.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};

use super::super::{Demo, MODEL, serve_demo};

/// A separate demo backend and one connection to it.
pub(super) struct Client(SendRequest<Full<Bytes>>, pub(super) SocketAddr);

impl Client {
    pub(super) async fn new(delay: Duration) -> Self {
        Self::of_model(MODEL, delay).await
    }

    pub(super) async fn of_model(model: &str, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve_demo(listener, Demo::new(model, delay), std::future::pending()));
        Self::connect(address).await
    }

    pub(super) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self(sender, address)
    }

    pub(super) async fn send(&mut self, method: &str, path: &str, body: impl Into<Bytes>) -> http::Response<Incoming> {
        let request = http::Request::builder().method(method).uri(path).header("host", "demo");
        self.0.ready().await.unwrap();
        self.0.send_request(request.body(Full::new(body.into())).unwrap()).await.unwrap()
    }

    pub(super) async fn text(&mut self, method: &str, path: &str, body: impl Into<Bytes>) -> (u16, String) {
        let response = self.send(method, path, body).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    pub(super) async fn get(&mut self, path: &str) -> (u16, Value) {
        let (status, text) = self.text("GET", path, "").await;
        (status, serde_json::from_str(&text).unwrap())
    }

    pub(super) async fn post(&mut self, path: &str, body: Value) -> (u16, Value) {
        let (status, text) = self.text("POST", path, body.to_string()).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    /// Returns the frames of a stream: the event's name (if any) and its data.
    pub(super) async fn stream(&mut self, path: &str, body: Value) -> Vec<(Option<String>, String)> {
        let response = self.send("POST", path, body.to_string()).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&body).unwrap();
        let frame = |frame: &str| match frame.split_once('\n') {
            Some((event, data)) => (
                Some(event.strip_prefix("event: ").unwrap().to_owned()),
                data.strip_prefix("data: ").unwrap().to_owned(),
            ),
            None => (None, frame.strip_prefix("data: ").unwrap().to_owned()),
        };
        text.split_terminator("\n\n").map(frame).collect()
    }
}
