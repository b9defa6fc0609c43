//! Responses that arrive in pieces, however the backend splits them.

use modelrelay_harness::fake_backend::{Answer, sse};
use modelrelay_harness::fake_relay::RequestSpec;
use modelrelay_harness::worker_process::Rig;
use serde_json::json;

fn events() -> Vec<u8> {
    let mut body = sse(r#"{"choices":[{"delta":{"content":"zażółć 🦙"}}]}"#);
    body.extend(b": comment\n\n".iter());
    body.extend(sse("[DONE]"));
    body
}

#[tokio::test]
async fn stream_is_exact_for_any_chunk_boundary() {
    let mut rig = Rig::core1().await;
    let body = events();
    for cut in 1..body.len() {
        let request = rig.link.send_request(&RequestSpec::stream("m"));
        let mut call = rig.backend.call().await;
        call.read_body().await;
        call.start_stream().await;
        call.chunk(&body[..cut]).await;
        assert_eq!(rig.link.started(&request).await["status_code"], 200);
        let mut got = rig.link.part(&request).await;
        call.chunk(&body[cut..]).await;
        call.end_stream().await;
        while got.len() < body.len() {
            got.extend(rig.link.part(&request).await);
        }
        assert!(got == body, "cut at {cut}: {:?}", String::from_utf8_lossy(&got));
        rig.link.expect_where("response_complete", |end| end["request_id"] == json!(request.id)).await;
    }
}

#[tokio::test]
async fn each_event_is_forwarded_before_next_exists() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    for number in 0..50 {
        let event = sse(&number.to_string());
        call.chunk(&event).await;
        assert_eq!(rig.link.part(&request).await, event);
    }
    call.end_stream().await;
}

#[tokio::test]
async fn head_is_forwarded_before_first_body_byte() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    let start = rig.link.started(&request).await;
    assert_eq!(start["status_code"], 200);
    assert!(start["headers"].as_array().is_some_and(|all| all.contains(&json!(["content-type", "text/event-stream"]))));
    call.chunk(b"x").await;
    call.end_stream().await;
    assert_eq!(rig.link.part(&request).await, b"x");
}

#[tokio::test]
async fn chunks_split_across_socket_writes_are_reassembled() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    for byte in
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nx-end: 1\r\n\r\n"
    {
        call.write_raw(&[*byte]).await;
    }
    call.keep_alive();
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.body.as_slice(), reply.is_complete()), (&b"hello!"[..], true));
}

#[tokio::test]
async fn body_ending_with_its_connection_is_complete() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.head(200, &[("connection", "close")]).await;
    call.write_raw(b"until the end").await;
    drop(call);
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.body.as_slice(), reply.is_complete()), (&b"until the end"[..], true));
}

#[tokio::test]
async fn binary_responses_pass_exactly() {
    let mut rig = Rig::core1().await;
    let audio: Vec<u8> = (0..1_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let answer = Answer::new(200, &[("content-type", "audio/mpeg")], &audio);
    let reply = rig.answered(&RequestSpec::chat("m").path("/v1/audio/speech"), &answer).await;
    assert!(reply.body == audio, "the body was changed");
    assert_eq!(reply.header("content-type"), Some("audio/mpeg"));
}

#[tokio::test]
async fn twenty_megabytes_pass_exactly() {
    let mut rig = Rig::core1().await;
    let body: Vec<u8> = (0..20_u32 << 20).map(|at| (at % 251) as u8).collect();
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    let sent = body.clone();
    tokio::spawn(async move { call.answer(&Answer::new(200, &[], &sent)).await });
    let reply = rig.link.reply(&request).await;
    assert!(reply.body == body, "the body was changed: {} bytes", reply.body.len());
}

#[tokio::test]
async fn event_of_one_megabyte_passes_exactly() {
    let mut rig = Rig::core1().await;
    let event = sse(&"ż".repeat(1 << 19));
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    let sent = event.clone();
    tokio::spawn(async move {
        call.start_stream().await;
        call.chunk(&sent).await;
        call.end_stream().await;
    });
    assert!(rig.link.reply(&request).await.body == event, "the event was changed");
}

#[tokio::test]
async fn parallel_streams_are_never_mixed() {
    let mut rig = Rig::core1().await;
    let mut requests = Vec::new();
    for _ in 0..4 {
        requests.push(rig.link.send_request(&RequestSpec::stream("m")));
    }
    let mut calls = Vec::new();
    for _ in 0..4 {
        let mut call = rig.backend.call().await;
        call.start_stream().await;
        calls.push(call);
    }
    for round in 0..20 {
        for (number, call) in calls.iter_mut().enumerate() {
            call.chunk(format!("{number}:{round};").as_bytes()).await;
        }
    }
    for call in calls {
        call.end_stream().await;
    }
    let mut bodies = Vec::new();
    for request in &requests {
        bodies.push(String::from_utf8(rig.link.reply(request).await.body).expect("text"));
    }
    bodies.sort();
    for (number, body) in bodies.iter().enumerate() {
        let whole: String = (0..20).map(|round| format!("{number}:{round};")).collect();
        assert_eq!(*body, whole);
    }
}

#[tokio::test]
async fn request_and_response_bodies_may_overlap() {
    let mut rig = Rig::core1().await;
    let body = vec![7_u8; 200_000];
    let request = rig.link.send_request(&RequestSpec::chat("m").body(&body));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"early").await;
    assert_eq!(rig.link.part(&request).await, b"early");
    assert_eq!(call.read_body().await.len(), body.len());
    call.chunk(b"late").await;
    call.end_stream().await;
    assert_eq!(rig.link.part(&request).await, b"late");
}

#[tokio::test]
async fn response_before_end_of_request_is_passed() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m").body(&vec![b'x'; 8 << 20]));
    let mut call = rig.backend.call().await;
    call.head(413, &[("content-length", "9"), ("connection", "close")]).await;
    call.write_raw(b"too large").await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.status, reply.body.as_slice()), (413, &b"too large"[..]));
    drop(call);
    rig.still_serves().await;
}
