//! Frames that no WebSocket library would send, on the socket for workers: the relay closes that one socket with the
//! code that RFC 6455 specifies. `make autobahn` covers the cases that need an echo.

use modelrelay_harness::{
    relay::Relay,
    worker::{FakeWorker, Frame},
};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::frame::{
        Frame as RawFrame, FrameHeader,
        coding::{Control, Data, OpCode},
    },
};

const PROTOCOL_ERROR: u16 = 1002;
const INVALID_DATA: u16 = 1007;

fn frame(opcode: OpCode, is_final: bool, payload: &[u8]) -> Message {
    let header = FrameHeader { is_final, opcode, ..FrameHeader::default() };
    Message::Frame(RawFrame::from_payload(header, payload.to_vec().into()))
}

fn reserved_bits(rsv1: bool, rsv2: bool, rsv3: bool) -> Message {
    let header = FrameHeader { rsv1, rsv2, rsv3, opcode: OpCode::Data(Data::Text), ..FrameHeader::default() };
    Message::Frame(RawFrame::from_payload(header, "{}".into()))
}

fn close(payload: &[u8]) -> Message {
    frame(OpCode::Control(Control::Close), true, payload)
}

fn close_code(code: u16) -> Message {
    close(&code.to_be_bytes())
}

const TEXT: OpCode = OpCode::Data(Data::Text);
const MORE: OpCode = OpCode::Data(Data::Continue);
const PING: OpCode = OpCode::Control(Control::Ping);
const PONG: OpCode = OpCode::Control(Control::Pong);

/// Returns the violations, each with its close code.
fn violations() -> Vec<(String, Vec<Message>, u16)> {
    let one = |name: &str, message, code| (name.to_owned(), vec![message], code);
    let mut all = vec![
        one("RSV1", reserved_bits(true, false, false), PROTOCOL_ERROR),
        one("RSV2", reserved_bits(false, true, false), PROTOCOL_ERROR),
        one("RSV3", reserved_bits(false, false, true), PROTOCOL_ERROR),
        one("a ping of 126 bytes", frame(PING, true, &[b'p'; 126]), PROTOCOL_ERROR),
        one("a pong of 126 bytes", frame(PONG, true, &[b'p'; 126]), PROTOCOL_ERROR),
        one("a ping in parts", frame(PING, false, b"p"), PROTOCOL_ERROR),
        one("a pong in parts", frame(PONG, false, b"p"), PROTOCOL_ERROR),
        one("a close in parts", frame(OpCode::Control(Control::Close), false, &[3, 232]), PROTOCOL_ERROR),
        one("a close of 126 bytes", close(&[3; 126]), PROTOCOL_ERROR),
        one("a close of one byte", close(&[3]), PROTOCOL_ERROR),
        one("a continuation without a start", frame(MORE, true, b"x"), PROTOCOL_ERROR),
        one("an unfinished continuation without a start", frame(MORE, false, b"x"), PROTOCOL_ERROR),
        one("text that is no UTF-8", frame(TEXT, true, b"{\"type\":\"\xff\"}"), INVALID_DATA),
        one("text that stops within a letter", frame(TEXT, true, b"\"\xe2\x82"), INVALID_DATA),
        one("text with half a surrogate pair", frame(TEXT, true, b"\"\xed\xa0\x80\""), INVALID_DATA),
        one("a reason that is no UTF-8", close(b"\x03\xe8\xff"), INVALID_DATA),
    ];
    let begun = frame(TEXT, false, b"{");
    all.push(("text within a text".into(), vec![begun.clone(), frame(TEXT, true, b"{}")], PROTOCOL_ERROR));
    all.push(("parts that are no UTF-8".into(), vec![begun, frame(MORE, true, b"\xff")], INVALID_DATA));
    for code in 3..8 {
        let (data, control) = (OpCode::Data(Data::Reserved(code)), OpCode::Control(Control::Reserved(code + 8)));
        all.push(one(&format!("opcode {code}"), frame(data, true, b"x"), PROTOCOL_ERROR));
        all.push(one(&format!("opcode {}", code + 8), frame(control, true, b"x"), PROTOCOL_ERROR));
    }
    for code in [0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999, 5000, u16::MAX] {
        all.push(one(&format!("close code {code}"), close_code(code), PROTOCOL_ERROR));
    }
    all
}

/// Returns the code with which the socket ends: that of the close frame, or 1006 without one.
async fn ends_with(mut worker: FakeWorker, messages: Vec<Message>) -> u16 {
    for message in messages {
        worker.send_message(message).await;
    }
    worker.expect_close().await.0
}

#[tokio::test]
async fn protocol_violation_closes_socket_with_matching_code() {
    let relay = Relay::start().await;
    let mut neighbour = relay.core1_worker(&["n"], 1).await;
    let mut faults = Vec::new();
    for (name, messages, expected) in violations() {
        let registered = ends_with(relay.core1_worker(&["m"], 1).await, messages.clone()).await;
        let stranger = ends_with(relay.dial().open().await, messages).await;
        eprintln!("{name}: {registered}, before it registered {stranger}");
        for (when, code) in [("registered", registered), ("not registered", stranger)] {
            if code != expected {
                faults.push(format!("{name}, {when}: {code} for {expected}"));
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    neighbour.expect_quiet().await;
    relay.wait_for_workers(1).await;
}

#[tokio::test]
async fn close_frame_is_echoed_with_its_code() {
    let relay = Relay::start().await;
    for code in [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999] {
        assert_eq!(ends_with(relay.core1_worker(&["m"], 1).await, vec![close_code(code)]).await, code);
    }
    assert_eq!(ends_with(relay.core1_worker(&["m"], 1).await, vec![close(b"")]).await, 0, "without a code");
    relay.wait_for_workers(0).await;
}

#[tokio::test]
async fn pings_of_any_size_between_fragments_get_pongs() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let update = br#"{"type":"models_update","models":["m","other"],"current_load":0}"#;
    worker.send_message(frame(TEXT, false, &update[..9])).await;
    for size in 0..=125_u8 {
        let payload = vec![size; size.into()];
        worker.send_message(frame(PING, true, &payload)).await;
        assert_eq!(worker.recv().await, Frame::Pong(payload.into()), "{size} bytes");
        worker.send_message(frame(MORE, false, b"")).await;
        worker.send_message(frame(PONG, true, b"unasked")).await;
    }
    worker.send_message(frame(MORE, true, &update[9..])).await;
    let listed = || async { relay.get("/v1/models").await.text().contains("\"other\"") };
    relay.eventually("the fragmented message is read", listed).await;
}
