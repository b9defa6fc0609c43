//! The additions of the capabilities to relay messages.

use super::*;

#[test]
fn register_ack() {
    golden::<RelayToWorker>(
        r#"{"type": "register_ack", "worker_id": "w-a1b2c3", "models": ["llama3-8b"], "protocol_version": "1",
                "warnings": ["model name trimmed"], "relay_id": "5d1f", "relay_count": 2,
                "capabilities": ["core1", "slots1"], "duplicate": true,
                "limits": {"max_request_bytes": 33554432, "stream_window_bytes": 262144, "heartbeat_ms": 15000,
                           "cold_timeout_ms": 300000}}"#,
    );
}

#[test]
fn request() {
    golden::<RelayToWorker>(
        r#"{"type": "request", "request_id": "r-17", "model": "qwen", "endpoint_path": "/v1/responses/resp_1?x=%20",
                "is_streaming": false, "headers": {"accept": "a, b"}, "stream": 17, "method": "GET",
                "content_length": 0, "window": 65536, "wants_details": true}"#,
    );
}

#[test]
fn request_of_conversation() {
    let RelayToWorker::Request(request) = golden(
        r#"{"type": "request", "request_id": "r-19", "model": "qwen", "endpoint_path": "/v1/messages",
                "is_streaming": true, "headers": {}, "stream": 19, "content_length": 9, "conversation": "00000000000000ff"}"#,
    ) else {
        panic!("no request")
    };
    assert_eq!(request.conversation, Some(ConversationKey(255)));
}

#[test]
fn request_of_class() {
    let RelayToWorker::Request(request) = golden(
        r#"{"type": "request", "request_id": "r-20", "model": "qwen", "endpoint_path": "/v1/messages",
                "is_streaming": true, "headers": {}, "stream": 20, "content_length": 9, "class": "batch"}"#,
    ) else {
        panic!("no request")
    };
    assert_eq!(request.class, RequestClass::Batch);
}

#[test]
fn request_with_default_method() {
    let RelayToWorker::Request(request) = golden(
        r#"{"type": "request", "request_id": "r-18", "model": "qwen", "endpoint_path": "/v1/chat/completions",
                "is_streaming": true, "headers": {}, "stream": 4294967295, "content_length": 33554432}"#,
    ) else {
        panic!("no request")
    };
    assert_eq!((request.method, request.body, request.window), (None, None, None));
    assert!(!request.wants_details, "a relay that does not know the field wants no details");
}

#[test]
fn cancel_with_detail() {
    golden::<RelayToWorker>(
        r#"{"type": "cancel", "request_id": "r-17", "reason": "client_disconnect", "detail": "slow client"}"#,
    );
}

#[test]
fn credit() {
    golden::<RelayToWorker>(r#"{"type": "credit", "stream": 17, "bytes": 65536}"#);
}

#[test]
fn demand() {
    golden::<RelayToWorker>(
        r#"{"type": "demand", "models": [{"id": "m", "waiting": 3, "oldest_ms": 1200, "sum_ms": 2100}]}"#,
    );
    golden::<RelayToWorker>(r#"{"type": "demand", "models": []}"#);
}

#[test]
fn demand_with_class_and_rank() {
    let RelayToWorker::Demand(demand) = golden(
        r#"{"type": "demand", "models": [
                {"id": "a", "waiting": 64, "oldest_ms": 90, "sum_ms": 99, "class": "batch", "rank": 2},
                {"id": "b", "waiting": 1, "oldest_ms": 5, "sum_ms": 5, "class": "interactive"},
                {"id": "c", "waiting": 1, "oldest_ms": 5, "sum_ms": 5, "rank": 1}]}"#,
    ) else {
        panic!("no demand")
    };
    let places = demand.models.iter().map(|model| (model.class, model.rank));
    let [batch, chat, other] = [(RequestClass::Batch, 2), (RequestClass::Interactive, 0), (RequestClass::Normal, 1)];
    assert!(places.eq([batch, chat, other]));
}

#[test]
fn relays() {
    golden::<RelayToWorker>(r#"{"type": "relays", "relay_count": 3}"#);
}

#[test]
fn graceful_shutdown_with_each_reason() {
    for reason in ["drain", "worker_drain", "relay_shutdown"] {
        golden::<RelayToWorker>(&format!(r#"{{"type": "graceful_shutdown", "reason": "{reason}"}}"#));
    }
    golden::<RelayToWorker>(r#"{"type": "graceful_shutdown"}"#);
}

#[test]
fn command() {
    for command in ["load", "unload", "pin", "unpin"] {
        golden::<RelayToWorker>(&format!(
            r#"{{"type": "command", "op_id": "op-1", "command": "{command}", "model": "qwen", "slot": "gpu0",
                    "mode": "now"}}"#
        ));
    }
    golden::<RelayToWorker>(r#"{"type": "command", "op_id": "op-2", "command": "pin", "model": "qwen"}"#);
}
