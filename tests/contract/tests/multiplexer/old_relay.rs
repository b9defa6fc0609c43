//! A relay with only the seeds' protocol: the worker holds its requests until their model is loaded.

use modelrelay_harness::fake_relay::Ack;

use crate::rig::{LONG, Rig, Slot, chat, stream, text};

#[tokio::test]
async fn requests_for_both_models_are_held_and_alternate() {
    let mut rig = Rig::start(&Ack::old(), &Slot::default()).await;
    let requests: Vec<_> = ["a", "b", "a", "b"].into_iter().map(|model| rig.link.send_request(&chat(model))).collect();
    for request in &requests {
        let reply = rig.link.reply_within(LONG, request).await.expect("a response");
        assert_eq!(reply.status, 200, "{}", reply.end);
    }
    assert!(rig.link.expect_within(std::time::Duration::ZERO, "grant").await.is_none());
    assert!(rig.link.expect_within(std::time::Duration::ZERO, "slots").await.is_none());
}

#[tokio::test]
async fn severed_stream_ends_with_error_frame() {
    let slot = Slot { knobs: "minResidency: 1ms\n  drainTimeout: 200ms", delay: "2s", ..Slot::default() };
    let mut rig = Rig::start(&Ack::old(), &slot).await;
    let streamed = rig.link.send_request(&stream("a"));
    rig.link.part(&streamed).await;
    let request = rig.link.send_request(&chat("b"));
    let severed = rig.link.reply_within(LONG, &streamed).await.expect("the stream is ended");
    assert!(severed.is_complete(), "{}", severed.end);
    let output = text(&severed);
    assert!(output.contains("severed_by_swap") && !output.contains("[DONE]"), "{output}");
    rig.link.cancel(&request.id, "client_disconnect");
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("its end").status, 499);
}

#[tokio::test]
async fn unloadable_model_leads_to_503() {
    let yaml = Slot::default().yaml().replacen("\"expectModel\":\"demo\"", "\"expectModel\":\"another\"", 1);
    let mut rig = Rig::with(&Ack::old(), &yaml).await;
    let request = rig.link.send_request(&chat("a"));
    let reply = rig.link.reply_within(LONG, &request).await.expect("a response");
    assert_eq!((reply.status, reply.header("retry-after").is_some()), (503, true), "{}", reply.end);
    assert_eq!(reply.json()["error"]["code"], "backend_unavailable");
    let request = rig.link.send_request(&chat("b"));
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("a response").status, 200);
}
