//! Tests of the relay itself, against a WebSocket client.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::{Ack, FakeRelay, RESPONSE_PIECE, RelayLink, RequestSpec, piece};

type Client = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn registered(ack: &Ack) -> (Client, RelayLink, FakeRelay) {
    let mut relay = FakeRelay::start().await;
    let url = format!("ws://{}/v1/worker/connect?provider=local", relay.addr());
    let (client, link) = tokio::join!(tokio_tungstenite::connect_async(url), async {
        let dial = relay.dial().await;
        assert_eq!((dial.path.as_str(), dial.query.as_str()), ("/v1/worker/connect", "provider=local"));
        dial.upgrade().await
    });
    let (mut client, mut link) = (client.expect("an upgrade").0, link);
    send_frame(&mut client, json!({"type": "register", "models": ["m"], "protocol_version": "1"})).await;
    link.register(ack).await;
    assert_eq!(hear(&mut client).await["protocol_version"], "1");
    (client, link, relay)
}

async fn send_frame(client: &mut Client, message: Value) {
    client.send(Frame::text(message.to_string())).await.expect("an open link");
}

async fn hear(client: &mut Client) -> Value {
    match client.next().await {
        Some(Ok(Frame::Text(text))) => serde_json::from_str(&text).expect("JSON"),
        other => panic!("not a text message: {other:?}"),
    }
}

async fn hear_piece(client: &mut Client) -> Vec<u8> {
    match client.next().await {
        Some(Ok(Frame::Binary(bytes))) => bytes.to_vec(),
        other => panic!("not a binary message: {other:?}"),
    }
}

#[tokio::test]
async fn core1_exchange_is_assembled() {
    let (mut client, mut link, _relay) = registered(&Ack::core1()).await;
    let sent = link.send_request(&RequestSpec::chat("m").body(b"body").path("/v1/x?q=1"));
    let request = hear(&mut client).await;
    assert_eq!((&request["content_length"], &request["stream"]), (&json!(4), &json!(1)));
    assert_eq!((&request["endpoint_path"], request.get("body")), (&json!("/v1/x?q=1"), None));
    assert_eq!(hear_piece(&mut client).await, b"\x01\x00\x00\x00\x00\x01body");
    let id = sent.id.clone();
    send_frame(&mut client, json!({"type": "grant", "slots": 4})).await;
    send_frame(
        &mut client,
        json!({"type": "response_start", "request_id": id, "status_code": 201, "headers": [["a", "1"], ["a", "2"]]}),
    )
    .await;
    client.send(Frame::Binary(piece(RESPONSE_PIECE, 1, b"par"))).await.expect("an open link");
    client.send(Frame::Binary(piece(RESPONSE_PIECE, 1, b"ts"))).await.expect("an open link");
    send_frame(&mut client, json!({"type": "response_complete", "request_id": id})).await;
    let reply = link.reply(&sent).await;
    assert_eq!((reply.status, reply.body.as_slice(), reply.parts.len()), (201, &b"parts"[..], 2));
    assert_eq!(reply.header_values("A"), ["1", "2"]);
    assert_eq!(hear(&mut client).await, json!({"type": "credit", "stream": 1, "bytes": 3}));
    assert!(link.grant(4).await.seq < reply.end_seq, "kept messages keep their order");
}

#[tokio::test]
async fn request_body_waits_for_credit() {
    let (mut client, mut link, _relay) = registered(&Ack::core1()).await;
    link.send_request(&RequestSpec::chat("m").body(&[7; 262_144 + 10]));
    hear(&mut client).await;
    for _ in 0..4 {
        assert_eq!(hear_piece(&mut client).await.len(), 65_536 + 6);
    }
    assert!(tokio::time::timeout(Duration::from_millis(50), client.next()).await.is_err());
    send_frame(&mut client, json!({"type": "credit", "stream": 1, "bytes": 4})).await;
    assert_eq!(hear_piece(&mut client).await.len(), 4 + 6);
    send_frame(&mut client, json!({"type": "credit", "stream": 1, "bytes": 100})).await;
    assert_eq!(hear_piece(&mut client).await.len(), 6 + 6);
}

#[tokio::test]
async fn exchange_without_core1_is_assembled() {
    let (mut client, mut link, _relay) = registered(&Ack::old()).await;
    let sent = link.send_request(&RequestSpec::chat("m").body(b"body"));
    assert_eq!(hear(&mut client).await["body"], "body");
    send_frame(&mut client, json!({"type": "response_chunk", "request_id": sent.id, "chunk": "a"})).await;
    send_frame(
        &mut client,
        json!({"type": "response_complete", "request_id": sent.id, "status_code": 200, "headers": {"k": "v"}}),
    )
    .await;
    let reply = link.reply(&sent).await;
    assert_eq!((reply.status, reply.body.as_slice(), reply.header("k")), (200, &b"a"[..], Some("v")));
}

#[tokio::test]
async fn frozen_link_stays_silent_and_close_carries_code() {
    let (mut client, link, _relay) = registered(&Ack::core1()).await;
    link.freeze();
    client.send(Frame::Ping(bytes::Bytes::new())).await.expect("an open link");
    assert!(tokio::time::timeout(Duration::from_millis(50), client.next()).await.is_err());
    drop(link);
    let (mut client, link, _relay) = registered(&Ack::core1()).await;
    link.close(1002, "worker registration protocol error");
    assert!(matches!(client.next().await, Some(Ok(Frame::Close(Some(frame)))) if u16::from(frame.code) == 1002));
    let (mut client, mut other, _relay) = registered(&Ack::core1()).await;
    client.close(None).await.expect("an open link");
    assert_eq!(other.closed().await, (None, String::new()));
}

#[tokio::test]
async fn dial_is_refused_with_given_status() {
    let mut relay = FakeRelay::start().await;
    let url = format!("ws://{}/v1/worker/connect", relay.addr());
    let (client, ()) =
        tokio::join!(tokio_tungstenite::connect_async(url), async { relay.dial().await.refuse(401).await });
    assert!(client.expect_err("a refusal").to_string().contains("401"));
}
