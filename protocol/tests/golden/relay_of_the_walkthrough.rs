//! The walkthrough's traces of relay messages, elisions filled in.

use super::*;

#[test]
fn register_ack() {
    golden::<RelayToWorker>(
        r#"{"type": "register_ack", "worker_id": "w-a1b2c3", "models": ["llama3-8b"], "protocol_version": "1"}"#,
    );
}

#[test]
fn ping() {
    golden::<RelayToWorker>(r#"{"type": "ping", "timestamp_unix_ms": 1775990400000}"#);
}

#[test]
fn request() {
    golden::<RelayToWorker>(
        r#"{"type": "request", "request_id": "r-001", "model": "llama3-8b", "endpoint_path": "/v1/chat/completions",
                "is_streaming": false, "body": "{\"model\":\"llama3-8b\",\"stream\":false,\"messages\":[]}",
                "headers": {"content-type": "application/json"}}"#,
    );
}

#[test]
fn streaming_request() {
    golden::<RelayToWorker>(
        r#"{"type": "request", "request_id": "r-002", "model": "llama3-8b", "endpoint_path": "/v1/chat/completions",
                "is_streaming": true, "body": "{\"stream\":true}", "headers": {}}"#,
    );
}

#[test]
fn cancel_with_each_reason() {
    let reasons = [
        ("client_disconnect", CancelReason::ClientDisconnect),
        ("timeout", CancelReason::Timeout),
        ("graceful_shutdown", CancelReason::GracefulShutdown),
        ("worker_disconnect", CancelReason::WorkerDisconnect),
        ("requeue_exhausted", CancelReason::RequeueExhausted),
        ("server_shutdown", CancelReason::ServerShutdown),
    ];
    for (name, reason) in reasons {
        let text = format!(r#"{{"type": "cancel", "request_id": "r-002", "reason": "{name}"}}"#);
        let RelayToWorker::Cancel(cancel) = golden(&text) else { panic!("no cancel") };
        assert_eq!((cancel.reason, reason.as_str()), (reason, name));
    }
}

#[test]
fn graceful_shutdown() {
    golden::<RelayToWorker>(r#"{"type": "graceful_shutdown", "reason": "maintenance", "drain_timeout_secs": 30}"#);
}

#[test]
fn models_refresh() {
    golden::<RelayToWorker>(r#"{"type": "models_refresh", "reason": "periodic"}"#);
}
