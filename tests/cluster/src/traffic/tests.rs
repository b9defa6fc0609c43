use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::exchange::judge;
use super::*;

fn chunk(content: &str) -> String {
    format!("data: {}\n\n", serde_json::json!({"choices": [{"delta": {"content": content}}]}))
}

#[test]
fn only_complete_and_correct_response_is_answered() {
    let whole = chunk("You said:") + &chunk(" hi") + "data: [DONE]\n\n";
    assert_eq!(judge(&whole, "You said: hi"), Outcome::Answered);
    assert!(matches!(judge(&whole, "You said: ho"), Outcome::Failed(_)));
    let doubled = chunk("You said:") + &chunk(" hi") + &chunk(" hi") + "data: [DONE]\n\n";
    assert!(matches!(judge(&doubled, "You said: hi"), Outcome::Failed(_)));
    assert!(matches!(judge(&chunk("You said:"), "You said: hi"), Outcome::Cut(_)));
    let failed = chunk("You said:") + "data: {\"error\":{\"code\":\"worker_disconnected\"}}\n\n";
    assert!(matches!(judge(&failed, "You said: hi"), Outcome::Cut(_)));
    assert!(matches!(judge("event: x\n\n", "You said: hi"), Outcome::Failed(_)));
}

/// Responds to every request with these bytes and closes the connection.
async fn server(answer: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0_u8; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

async fn counts_of(answer: &'static str) -> Counts {
    let running = Traffic::to(server(answer).await).streams(1).words(1).start();
    let is_counted =
        |counts: &Counts| counts.answered + counts.retryable.len() + counts.cut.len() + counts.failed.len() > 0;
    running.wait_for("an outcome", is_counted).await;
    running.finish().await
}

#[tokio::test]
async fn refusals_are_judged_as_sdks_do() {
    let draining = counts_of("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(!draining.retryable.is_empty() && draining.failed.is_empty(), "{draining}");
    let last = counts_of("HTTP/1.1 503 No\r\nx-should-retry: false\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(last.retryable.is_empty() && !last.failed.is_empty(), "{last}");
    let unknown = counts_of("HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(!unknown.failed.is_empty(), "{unknown}");
    let gone = counts_of("").await;
    assert!(!gone.retryable.is_empty() && gone.failed.is_empty(), "{gone}");
}

#[tokio::test]
async fn clients_keep_connections_only_if_told() {
    for (keeps, expected) in [(false, 3), (true, 1)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let traffic = Traffic::to(listener.local_addr().expect("it is bound")).streams(1).words(1);
        let traffic = if keeps { traffic.kept() } else { traffic };
        let traffic = traffic.start();
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = accepted.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut request = [0_u8; 4096];
                    while stream.read(&mut request).await.is_ok_and(|read| read > 0) {
                        let prompt = String::from_utf8_lossy(&request).split("content\":\"").nth(1).map(str::to_owned);
                        let prompt = prompt.expect("a prompt").split('"').next().expect("its end").to_owned();
                        let text =
                            format!("This is ModelRelay's built-in demo backend, not a model. You said: {prompt}");
                        let body = chunk(&text) + "data: [DONE]\n\n";
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                        let _ = stream.write_all((head + &body).as_bytes()).await;
                    }
                });
            }
        });
        traffic.wait_for("three answers", |counts| counts.answered >= 3).await;
        let connections = accepted.load(Ordering::SeqCst);
        assert!(if keeps { connections == expected } else { connections >= expected }, "{connections}");
        traffic.finish().await.expect_all_answered();
    }
}

#[tokio::test]
async fn truncated_response_is_distinguished_from_refusal() {
    let cut = counts_of("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n").await;
    assert!(!cut.cut.is_empty() && cut.failed.is_empty() && cut.underway == 0, "{cut}");
}
