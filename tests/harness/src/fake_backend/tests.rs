//! Tests of the backend itself, over raw sockets.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Answer, FakeBackend};

async fn exchange(stream: &mut TcpStream, request: &str, expected: &str) {
    stream.write_all(request.as_bytes()).await.expect("an open connection");
    let mut got = Vec::new();
    while !String::from_utf8_lossy(&got).contains(expected) {
        let mut buffer = [0; 1024];
        let read = stream.read(&mut buffer).await.expect("an open connection");
        assert!(read > 0, "closed before {expected:?}: {:?}", String::from_utf8_lossy(&got));
        got.extend_from_slice(&buffer[..read]);
    }
}

#[tokio::test]
async fn one_connection_serves_housekeeping_and_scripted_inference() {
    let mut backend = FakeBackend::with_models(&["a"]).await;
    let mut stream = TcpStream::connect(backend.addr()).await.expect("a listening backend");
    exchange(&mut stream, "GET /v1/models HTTP/1.1\r\n\r\n", "{\"id\":\"a\"").await;
    let playing = tokio::spawn(async move {
        for body in ["hello", "hello wide world"] {
            let mut call = backend.call().await;
            assert_eq!(call.read_body().await, body.as_bytes());
            call.answer_json(200, &json!({"length": body.len()})).await;
        }
        backend
    });
    exchange(&mut stream, "POST /x?q HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello", "{\"length\":5}").await;
    let chunked = "POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nb\r\n wide world\r\n0\r\n\r\n";
    exchange(&mut stream, chunked, "{\"length\":16}").await;
    let backend = playing.await.expect("the played calls");
    assert_eq!((backend.request_count("/x"), backend.request_count("/v1/models")), (2, 1));
    backend.answer_with(|_, body| Answer::new(418, &[], body));
    exchange(&mut stream, "POST /x HTTP/1.1\r\ncontent-length: 3\r\n\r\ntea", "content-length: 3\r\n\r\ntea").await;
}

#[tokio::test]
async fn refusing_backend_keeps_its_port() {
    let mut backend = FakeBackend::start().await;
    let mut idle = TcpStream::connect(backend.addr()).await.expect("a listening backend");
    exchange(&mut idle, "GET /health HTTP/1.1\r\n\r\n", "200").await;
    for _ in 0..3 {
        backend.refuse().await;
        assert!(TcpStream::connect(backend.addr()).await.is_err());
        backend.reopen();
        let mut stream = TcpStream::connect(backend.addr()).await.expect("a reopened backend");
        exchange(&mut stream, "GET /health HTTP/1.1\r\n\r\n", "200").await;
    }
    assert_eq!(idle.read(&mut [0; 8]).await.unwrap_or(0), 0, "an idle connection outlived the refusal");
}

#[tokio::test]
async fn reset_and_peer_close_are_both_detected() {
    let mut backend = FakeBackend::start().await;
    let mut stream = TcpStream::connect(backend.addr()).await.expect("a listening backend");
    stream.write_all(b"POST /x HTTP/1.1\r\n\r\n").await.expect("an open connection");
    backend.call().await.reset();
    let error = stream.read(&mut [0; 8]).await.expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let mut stream = TcpStream::connect(backend.addr()).await.expect("a listening backend");
    stream.write_all(b"POST /x HTTP/1.1\r\n\r\n").await.expect("an open connection");
    let mut call = backend.call().await;
    assert!(!call.closes_within(Duration::from_millis(20)).await);
    drop(stream);
    call.closed().await;
}
