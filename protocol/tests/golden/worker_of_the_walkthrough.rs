//! The walkthrough's traces of worker messages, elisions filled in.

use super::*;

#[test]
fn register() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["llama3-8b"], "max_concurrent": 4,
                "protocol_version": "1", "current_load": 0}"#,
    );
}

#[test]
fn pong() {
    golden::<WorkerToRelay>(r#"{"type": "pong", "current_load": 1, "timestamp_unix_ms": 1775990400000}"#);
}

#[test]
fn response_chunk() {
    golden::<WorkerToRelay>(
        r#"{"type": "response_chunk", "request_id": "r-002",
                "chunk": "data: {\"choices\":[{\"delta\":{\"content\":\"żółw 🐢\"}}]}\n\n"}"#,
    );
}

#[test]
fn response_complete() {
    golden::<WorkerToRelay>(
        r#"{"type": "response_complete", "request_id": "r-001", "status_code": 200,
                "headers": {"content-type": "application/json"}, "body": "{\"choices\":[]}",
                "token_counts": {"prompt_tokens": 42, "completion_tokens": 128, "total_tokens": 170}}"#,
    );
}

#[test]
fn response_complete_after_stream() {
    golden::<WorkerToRelay>(
        r#"{"type": "response_complete", "request_id": "r-002", "status_code": 200,
                "token_counts": {"prompt_tokens": 42, "completion_tokens": 128, "total_tokens": 170}}"#,
    );
}

#[test]
fn models_update() {
    golden::<WorkerToRelay>(
        r#"{"type": "models_update", "models": ["llama3-8b", "codellama-13b"], "current_load": 1}"#,
    );
}

/// From the walkthrough's table; it shows no trace.
#[test]
fn error() {
    golden::<WorkerToRelay>(
        r#"{"type": "error", "request_id": "r-001", "code": "backend_error", "message": "connection refused"}"#,
    );
}
