//! Messages that a worker begins and does not end: charged to the budget from their first byte, and no larger than
//! their kind needs.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker::FakeWorker;
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{Frame, FrameHeader};

const MIB: usize = 1 << 20;
const TOO_LARGE: u16 = 1009;

/// Returns the beginning of an unfinished text message.
pub(crate) fn begun(bytes: usize) -> Message {
    let header = FrameHeader { is_final: false, opcode: OpCode::Data(Data::Text), ..FrameHeader::default() };
    Message::Frame(Frame::from_payload(header, vec![b'x'; bytes].into()))
}

async fn begin(worker: &mut FakeWorker, bytes: usize) {
    worker.send_message(begun(bytes)).await;
}

#[tokio::test]
async fn unfinished_messages_stay_within_budget() {
    let relay = Relay::builder().env("MAX_BUFFERED_BYTES", "16Mi").start().await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let before = relay.usage().resident_bytes;
    let mut attackers = Vec::new();
    for _ in 0..12 {
        attackers.push(relay.worker(&["m"], 1).await);
    }
    for attacker in &mut attackers {
        begin(attacker, 4 * MIB).await;
    }
    relay.log().wait_for_line("no memory for the message (MAX_BUFFERED_BYTES)").await;
    assert!(relay.metric("modelrelay_buffered_bytes ").await <= (14 * MIB) as f64);
    let peak = relay.usage().peak_bytes - before;
    assert!(peak < 32 * MIB as u64, "{peak} bytes");

    let pending = relay.begin(Request::post("/v1/chat/completions", &json!({"model": "honest", "messages": []})));
    let job = honest.expect_request().await;
    honest.answer(&job, &json!({"fine": true})).await;
    assert_eq!(pending.reply().await.with_status(200).json()["fine"], true);

    drop(attackers);
    relay
        .eventually("the budget is free again", async || relay.metric("modelrelay_buffered_bytes ").await == 0.0)
        .await;
}

#[tokio::test]
async fn large_messages_are_accepted_from_older_workers_only() {
    let relay = Relay::start().await;
    let mut registered = relay.core1_worker(&["m"], 1).await;
    begin(&mut registered, 2 * MIB).await;
    let mut stranger = relay.dial().open().await;
    begin(&mut stranger, 2 * MIB).await;
    assert_eq!([registered.expect_close().await.0, stranger.expect_close().await.0], [TOO_LARGE; 2]);
    let mut older = relay.worker(&["m"], 1).await;
    begin(&mut older, 20 * MIB).await;
    older.expect_quiet().await;
}
