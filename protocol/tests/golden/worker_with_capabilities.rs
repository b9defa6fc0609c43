//! The additions of the capabilities to worker messages.

use super::*;

const SLOT: &str = r#"{"id": "gpu0", "state": "ready", "resident": "qwen", "generation": 3, "target": null,
        "eta_ms": null, "since_ms": 9000, "idle_ms": 0, "wanted": 2,
        "models": [{"id": "qwen", "status": "resident", "capacity": 8, "swap_cost_ms": 3100, "pinned": false}]}"#;

#[test]
fn register() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["llama3-8b"], "max_concurrent": 4,
                "protocol_version": "1", "current_load": 0, "instance_id": "00112233445566778899aabbccddeeff",
                "pool": "llama", "version": "0.1.0", "have": ["5d1f"], "capabilities": ["core1", "slots1"],
                "limits": {"stream_window_bytes": 262144}}"#,
    );
}

#[test]
fn register_with_location() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["qwen"], "max_concurrent": 8, "current_load": 0,
                "location": {"zone": "eu-west-1a", "cluster": "cluster-1"}}"#,
    );
}

#[test]
fn details_of_models() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["qwen"], "max_concurrent": 8, "current_load": 0,
                "model_details": {"qwen": {"max_model_len": 40960, "capabilities": ["tools"]}}}"#,
    );
    golden::<WorkerToRelay>(
        r#"{"type": "models_update", "models": ["qwen"], "current_load": 1,
                "model_details": {"qwen": {"meta": {"n_ctx": 32768}}}}"#,
    );
}

#[test]
fn naming_of_models() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["llama3.2:latest"], "max_concurrent": 1,
                "current_load": 0, "naming": "ollama"}"#,
    );
    golden::<WorkerToRelay>(r#"{"type": "models_update", "models": ["llama3.2:latest"], "naming": "ollama"}"#);
}

#[test]
fn failing_models() {
    golden::<WorkerToRelay>(
        r#"{"type": "register", "worker_name": "gpu-box-1", "models": ["qwen", "llama"], "max_concurrent": 8,
                "current_load": 0, "failing": ["qwen"]}"#,
    );
    golden::<WorkerToRelay>(
        r#"{"type": "models_update", "models": ["qwen", "llama"], "current_load": 1, "failing": ["qwen"]}"#,
    );
}

#[test]
fn register_of_multiplexer() {
    golden::<WorkerToRelay>(&format!(
        r#"{{"type": "register", "worker_name": "gpu-box-1", "models": ["qwen"], "max_concurrent": 8,
                "protocol_version": "1", "current_load": 0, "slots": [{SLOT}]}}"#
    ));
}

#[test]
fn response_start() {
    let WorkerToRelay::ResponseStart(start) = golden(
        r#"{"type": "response_start", "request_id": "r-17", "status_code": 404,
                "headers": [["set-cookie", "a=1"], ["set-cookie", "b=2"]], "content_length": 12}"#,
    ) else {
        panic!("no response_start")
    };
    assert_eq!(start.headers.len(), 2, "repeated headers stay repeated");
    golden::<WorkerToRelay>(r#"{"type": "response_start", "request_id": "r-17", "status_code": 200, "headers": []}"#);
}

#[test]
fn response_complete() {
    golden::<WorkerToRelay>(
        r#"{"type": "response_complete", "request_id": "r-17", "response_id": "resp_1",
                "token_counts": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "cached_tokens": 1}}"#,
    );
    golden::<WorkerToRelay>(r#"{"type": "response_complete", "request_id": "r-17"}"#);
    golden::<WorkerToRelay>(
        r#"{"type": "response_complete", "request_id": "r-17",
                "details": {"backend": "vllm", "model": "qwen", "id": "chatcmpl-1", "finish_reasons": ["stop", "length"]}}"#,
    );
    golden::<WorkerToRelay>(r#"{"type": "response_complete", "request_id": "r-17", "details": {"model": "qwen"}}"#);
}

#[test]
fn error_with_each_code() {
    let codes = [
        (WorkerError::AT_CAPACITY, "at_capacity"),
        (WorkerError::DRAINING, "draining"),
        (WorkerError::SEVERED_BY_SWAP, "severed_by_swap"),
        (WorkerError::BACKEND_UNREACHABLE, "backend_unreachable"),
        (WorkerError::BACKEND_RESET, "backend_reset"),
        (WorkerError::INSUFFICIENT_MEMORY, "insufficient_memory"),
        (WorkerError::BACKEND_UNAVAILABLE, "backend_unavailable"),
        (WorkerError::SLOT_QUARANTINED, "slot_quarantined"),
        (WorkerError::RESPONSE_TOO_LARGE, "response_too_large"),
        (WorkerError::BAD_PATH, "bad_path"),
    ];
    for (constant, code) in codes {
        let WorkerToRelay::Error(error) = golden(&format!(
            r#"{{"type": "error", "request_id": "r-17", "code": "{code}", "message": "", "retry_after_ms": 4000}}"#
        )) else {
            panic!("no error")
        };
        assert_eq!(error.code, constant);
    }
}

#[test]
fn error_of_no_request() {
    golden::<WorkerToRelay>(r#"{"type": "error", "code": "odd", "message": "for the log"}"#);
}

#[test]
fn credit() {
    golden::<WorkerToRelay>(r#"{"type": "credit", "stream": 17, "bytes": 65536}"#);
}

#[test]
fn grant() {
    golden::<WorkerToRelay>(r#"{"type": "grant", "slots": 4, "others": 9, "capacity": 16, "links": 2}"#);
    golden::<WorkerToRelay>(
        r#"{"type": "grant", "slots": 4, "others": 0, "capacity": 16, "links": 2,
                "models": [{"id": "qwen", "slots": 4, "others": 0, "capacity": 8}]}"#,
    );
}

#[test]
fn drain() {
    golden::<WorkerToRelay>(r#"{"type": "drain", "reason": "SIGTERM", "timeout_secs": 30}"#);
}

#[test]
fn slots() {
    golden::<WorkerToRelay>(&format!(r#"{{"type": "slots", "slots": [{SLOT}]}}"#));
}

#[test]
fn slots_with_model_aliases() {
    let slot = SLOT.replace(r#"{"id": "qwen", "#, r#"{"id": "qwen", "aliases": ["qwen3", "claude-sonnet-4-5"], "#);
    golden::<WorkerToRelay>(&format!(r#"{{"type": "slots", "slots": [{slot}]}}"#));
}

/// The document leaves out fields that add nothing to a failed model; a worker may send them.
#[test]
fn slots_with_failed_model() {
    let failed = json!({"id": "bad", "status": "failed", "code": "backend_unavailable", "message": "exit 1",
            "retry_ms": 4000});
    let text = json!({"type": "slots", "slots": [{"id": "gpu0", "models": [failed]}]}).to_string();
    let message = known::<WorkerToRelay>(&text);
    let encoded = encode(&message);
    assert_eq!(known::<WorkerToRelay>(&encoded), message);
    let encoded = &json_of(&encoded)["slots"][0]["models"][0];
    for (key, value) in failed.as_object().expect("an object") {
        assert_eq!(&encoded[key], value, "{key}");
    }
}

#[test]
fn slots_in_every_state_and_status() {
    let states = [
        "empty",
        "ready",
        "draining",
        "severing",
        "evicting",
        "loading",
        "rolling_back",
        "backoff",
        "quarantined",
        "stopping",
    ];
    for state in states {
        golden::<WorkerToRelay>(
            &json!({"type": "slots", "slots": [json_of(&SLOT.replace("ready", state))]}).to_string(),
        );
    }
    for status in ["resident", "sleeping", "unloaded", "failed"] {
        let slot = SLOT.replace(r#""status": "resident""#, &format!(r#""status": "{status}""#));
        golden::<WorkerToRelay>(&json!({"type": "slots", "slots": [json_of(&slot)]}).to_string());
    }
}

#[test]
fn homes() {
    let WorkerToRelay::Homes(homes) = golden(
        r#"{"type": "homes", "homes": [["00ff00ff00ff00ff", 48900], ["fedcba9876543210", 33554432]], "backlog": 120}"#,
    ) else {
        panic!("no homes")
    };
    assert_eq!(homes.homes[0], (ConversationKey(0x00ff_00ff_00ff_00ff), 48_900));
    golden::<WorkerToRelay>(r#"{"type": "homes", "homes": [], "backlog": 0}"#);
}

#[test]
fn command_result() {
    golden::<WorkerToRelay>(r#"{"type": "command_result", "op_id": "op-1", "ok": true}"#);
    golden::<WorkerToRelay>(r#"{"type": "command_result", "op_id": "op-1", "ok": false, "error": "no such model"}"#);
}
