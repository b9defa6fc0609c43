use std::time::Duration;

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::context::OperatorLocation;
use crate::settings::defaults::Defaults;

async fn connected() -> TcpStream {
    let (service, _handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let context =
        Context::new(client, Defaults::default(), OperatorLocation::in_namespace("system"), "operator-0".into());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, context, Arc::new(|| Ok(()))));
    TcpStream::connect(address).await.unwrap()
}

/// Returns everything received until the connection ends; a reset ends it too.
async fn answer(mut stream: TcpStream, request: &str) -> String {
    let mut answer = Vec::new();
    let talk = async {
        let _ = stream.write_all(request.as_bytes()).await;
        let _ = stream.read_to_end(&mut answer).await;
    };
    tokio::time::timeout(Duration::from_secs(60), talk).await.expect("the connection ends");
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn probes_are_answered() {
    let answer = answer(connected().await, "GET /readyz HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ready\n"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn unfinished_request_times_out() {
    let answer = answer(connected().await, "GET /livez HTTP/1.1\r\nx: y").await;
    assert!(!answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test]
async fn long_headers_are_not_buffered() {
    let long = format!("GET /livez HTTP/1.1\r\nconnection: close\r\nx: {}\r\n\r\n", "y".repeat(64 << 10));
    let answer = answer(connected().await, &long).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
}
