use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// Responds to one request with exactly these bytes and closes.
async fn reply_of(answer: &'static str) -> Reply {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let to = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut request = [0_u8; 4096];
        assert!(stream.read(&mut request).await.expect("a request") > 0);
        stream.write_all(answer.as_bytes()).await.expect("the client reads");
    });
    Request::get("/").fetch(to, &Log::new("none")).await
}

#[tokio::test]
async fn complete_body_is_distinguished_from_truncated_body() {
    let ended = reply_of("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n").await;
    assert_eq!((ended.text().as_str(), ended.aborted), ("ab", false));
    let cut = reply_of("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n").await;
    assert_eq!((cut.text().as_str(), cut.aborted), ("ab", true));
    let short = reply_of("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab").await;
    assert_eq!((short.text().as_str(), short.aborted), ("ab", true));
}

#[tokio::test]
async fn repeated_headers_are_shown_as_they_came() {
    let reply = reply_of("HTTP/1.1 204 No Content\r\nset-cookie: a\r\nx: 1\r\nset-cookie: b\r\n\r\n").await;
    assert_eq!(reply.headers.all("Set-Cookie"), ["a", "b"]);
}
