//! More connections than a shell's usual limit of open files.

use modelrelay_harness::{
    client::{RawConnection, Request},
    relay::Relay,
};
use serde_json::json;

#[tokio::test]
async fn relay_accepts_connections_beyond_soft_file_limit() {
    let relay = Relay::builder().under(["sh", "-c", "ulimit -Sn 64 && exec \"$@\"", "sh"]).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(RawConnection::open(relay.addr(), relay.log()).await);
    }
    let request = relay.begin(Request::post("/v1/chat/completions", &json!({"model": "m"})));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = request.reply().await.with_status(200);
}
