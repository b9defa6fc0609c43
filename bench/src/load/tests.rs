//! The client against the backend, and against one that sends wrong responses.

use tokio::net::TcpListener;

use super::*;
use crate::backend;
use crate::http::{Body, Connection, Framing};

async fn backend() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(backend::serve(listener));
    addr
}

/// Sends the same bytes in response to everything.
async fn answers(bytes: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut connection = Connection::accepted(listener.accept().await.unwrap().0).unwrap();
            let _ = connection.head(|head| Ok(head.framing)).await;
            let _ = connection.whole_body(Body::new(Framing::Length(PROMPT_BYTES as u64)), &mut Vec::new()).await;
            let _ = connection.send(&bytes, b"").await;
        }
    });
    addr
}

fn load(to: SocketAddr) -> Load {
    Load { connections: 3, ..Load::new(to, Until::Requests(4)) }
}

#[tokio::test]
async fn plain_responses_to_prompts_of_any_size_validate() {
    let to = backend().await;
    for prompt_bytes in [PROMPT_BYTES, 220_000, 3_000_000] {
        let outcome = Load { prompt_bytes, ..load(to) }.run().await;
        assert_eq!((outcome.right, outcome.wrong, outcome.bytes), (12, 0, 12 * 345), "{outcome:?}");
        assert_eq!((outcome.latency.count, outcome.first_event.count), (12, 0));
    }
}

#[tokio::test]
async fn streams_are_right_and_timed() {
    let to = backend().await;
    let outcome = Load { chunks: 5, gap: Duration::from_millis(2), ..load(to) }.run().await;
    assert_eq!((outcome.right, outcome.wrong, outcome.events), (12, 0, 60), "{outcome:?}");
    assert_eq!(outcome.first_event.count, 12);
    assert_eq!(outcome.bytes, 12 * (5 * 232 + 14));
    let saturated = Load { chunks: 5000, ..load(to) }.run().await;
    assert_eq!((saturated.right, saturated.wrong, saturated.events), (12, 0, 60_000), "{saturated:?}");
}

#[tokio::test]
async fn events_read_before_early_disconnect_are_counted() {
    let to = backend().await;
    let outcome = Load { chunks: 1000, gap: Duration::from_millis(2), leave_after: Some(2), ..load(to) }.run().await;
    assert_eq!((outcome.right, outcome.wrong), (12, 0), "{outcome:?}");
    assert!(outcome.events >= 24 && outcome.events < 200, "{outcome:?}");
}

#[tokio::test]
async fn wrong_body_wrong_status_and_truncation_are_faults() {
    let plain =
        |body: &str, length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes();
    let right = String::from_utf8(unknown_content()).unwrap();
    for (bytes, fault) in [
        (plain(&right, 345), "after 0 correct bytes"),
        (plain("{}", 2), "after 0 correct bytes"),
        (plain("{}", 3), "differs"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy".to_vec(), "status 503: busy"),
        (b"nonsense\r\n\r\n".to_vec(), "not an HTTP/1.1 head"),
        (b"HTTP/1.1 200 OK\r\n".to_vec(), "closed inside"),
    ] {
        let outcome = Load { connections: 1, ..load(answers(bytes).await) }.run().await;
        assert_eq!((outcome.right, outcome.wrong), (0, 4));
        assert!(outcome.first_fault.as_ref().unwrap().contains(fault), "{outcome:?} instead of {fault}");
    }
}

fn unknown_content() -> Vec<u8> {
    crate::content::answer(0xdead)
}
