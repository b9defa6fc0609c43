//! Every message exactly as documented: the wire traces of the protocol walkthrough, and one of each message that the
//! capabilities add.
//!
//! The JSON is copied, not generated: the tests must match what peers send that know only the document, not what these
//! programs agree on among themselves.

use modelrelay_protocol::message::{
    CancelReason, MessageError, Parsed, RelayToWorker, SlotModelStatus, SlotState, WorkerError, WorkerToRelay, encode,
};
use serde::Serialize;
use serde_json::{Value, json};

/// Both directions parse and encode alike; the tests are written once.
trait Message: Serialize + Sized + PartialEq + std::fmt::Debug {
    fn read(text: &str) -> Result<Parsed<Self>, MessageError>;
}

impl Message for RelayToWorker {
    fn read(text: &str) -> Result<Parsed<Self>, MessageError> {
        Self::parse(text)
    }
}

impl Message for WorkerToRelay {
    fn read(text: &str) -> Result<Parsed<Self>, MessageError> {
        Self::parse(text)
    }
}

fn known<M: Message>(text: &str) -> M {
    match M::read(text) {
        Ok(Parsed::Known(message)) => message,
        Ok(Parsed::Unknown(kind)) => panic!("{kind} is not known"),
        Err(error) => panic!("{error}: {text}"),
    }
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).expect("the traces are JSON")
}

/// Parses the message and encodes it again as the same JSON. Unknown fields at any depth must not change the result.
fn golden<M: Message>(text: &str) -> M {
    let message = known::<M>(text);
    assert_eq!(json_of(&encode(&message)), json_of(text));
    assert_eq!(known::<M>(&with_unknown_fields(json_of(text)).to_string()), message, "an unknown field changed it");
    message
}

/// Adds an unknown field to every object of the JSON, except for maps with the peers' own keys.
fn with_unknown_fields(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let is_map = |key: &str| key == "headers";
            let mut fields: serde_json::Map<_, _> = fields
                .into_iter()
                .map(|(key, value)| if is_map(&key) { (key, value) } else { (key, with_unknown_fields(value)) })
                .collect();
            fields.insert("from_the_future".to_owned(), json!({"depth": [1, null, {"more": "x"}]}));
            Value::Object(fields)
        }
        Value::Array(items) => Value::Array(items.into_iter().map(with_unknown_fields).collect()),
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => other,
    }
}

/// The walkthrough's traces of relay messages, elisions filled in.
mod relay_of_the_walkthrough {
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
}

/// The walkthrough's traces of worker messages, elisions filled in.
mod worker_of_the_walkthrough {
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
}

/// The additions of the capabilities to relay messages.
mod relay_with_capabilities {
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
                "content_length": 0, "window": 65536}"#,
        );
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
}

/// The additions of the capabilities to worker messages.
mod worker_with_capabilities {
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
        golden::<WorkerToRelay>(
            r#"{"type": "response_start", "request_id": "r-17", "status_code": 200, "headers": []}"#,
        );
    }

    #[test]
    fn response_complete() {
        golden::<WorkerToRelay>(
            r#"{"type": "response_complete", "request_id": "r-17", "response_id": "resp_1",
                "token_counts": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "cached_tokens": 1}}"#,
        );
        golden::<WorkerToRelay>(r#"{"type": "response_complete", "request_id": "r-17"}"#);
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
    fn command_result() {
        golden::<WorkerToRelay>(r#"{"type": "command_result", "op_id": "op-1", "ok": true}"#);
        golden::<WorkerToRelay>(
            r#"{"type": "command_result", "op_id": "op-1", "ok": false, "error": "no such model"}"#,
        );
    }
}

/// Missing, unknown or malformed fields.
mod odd_peers {
    use super::*;

    #[test]
    fn message_of_unknown_type_is_identified_by_type() {
        let text = r#"{"payload": [1, {"type": "ping"}], "type": "invented_tomorrow"}"#;
        assert_eq!(RelayToWorker::parse(text).expect("JSON"), Parsed::Unknown("invented_tomorrow".to_owned()));
        assert_eq!(WorkerToRelay::parse(text).expect("JSON"), Parsed::Unknown("invented_tomorrow".to_owned()));
    }

    #[test]
    fn message_of_other_direction_is_unknown() {
        assert_eq!(RelayToWorker::parse(r#"{"type": "pong"}"#).expect("JSON"), Parsed::Unknown("pong".to_owned()));
        assert_eq!(WorkerToRelay::parse(r#"{"type": "ping"}"#).expect("JSON"), Parsed::Unknown("ping".to_owned()));
    }

    #[test]
    fn escaped_type_equals_plain_type() {
        assert!(matches!(known(r#"{"type": "p\u0069ng"}"#), RelayToWorker::Ping(_)));
    }

    #[test]
    fn malformed_message_is_rejected() {
        for text in
            ["", "{}", "[]", "null", "\"ping\"", r#"{"type": 1}"#, r#"{"type": "cancel"}"#, "{\"type\": \"ping\""]
        {
            assert!(RelayToWorker::parse(text).is_err(), "{text}");
        }
        for text in [r#"{"type": "response_chunk", "chunk": "x"}"#, r#"{"type": "credit", "stream": -1, "bytes": 1}"#] {
            assert!(WorkerToRelay::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_message_with_body_may_exceed_one_mebibyte() {
        let long = "x".repeat(1 << 20);
        for text in [
            format!(r#"{{"type": "models_update", "models": ["{long}"]}}"#),
            format!(r#"{{"type": "error", "message": "{long}"}}"#),
        ] {
            assert!(WorkerToRelay::parse(&text).unwrap_err().to_string().contains("more than 1048576 bytes"));
        }
        for text in [
            format!(r#"{{"type": "response_chunk", "request_id": "r", "chunk": "{long}"}}"#),
            format!(r#"{{"type": "response_complete", "request_id": "r", "body": "{long}"}}"#),
        ] {
            assert!(matches!(WorkerToRelay::parse(&text), Ok(Parsed::Known(_))));
        }
    }

    /// Stopping is always safe.
    #[test]
    fn cancel_with_unknown_reason_still_cancels() {
        let RelayToWorker::Cancel(cancel) = known(r#"{"type": "cancel", "request_id": "r", "reason": "whim"}"#) else {
            panic!("no cancel")
        };
        assert_eq!(cancel.reason, CancelReason::ClientDisconnect);
    }

    /// A slot in an unknown state gets no requests, and a model of unknown status is treated as not loaded.
    #[test]
    fn slot_in_unknown_state_is_quarantined() {
        let WorkerToRelay::Slots(slots) = known(
            r#"{"type": "slots", "slots": [{"id": "a", "state": "melting", "models": [{"id": "m", "status": "warm"}]}]}"#,
        ) else {
            panic!("no slots")
        };
        assert_eq!(slots.slots[0].state, SlotState::Quarantined);
        assert_eq!(slots.slots[0].models[0].status, SlotModelStatus::Unloaded);
    }

    /// Unknown values are kept, so that the caller can choose the safest action and log them.
    #[test]
    fn unknown_codes_and_reasons_stay_readable() {
        let WorkerToRelay::Error(error) = known(r#"{"type": "error", "request_id": "r", "code": "novel"}"#) else {
            panic!("no error")
        };
        assert_eq!(error.code, "novel");
        let RelayToWorker::GracefulShutdown(shutdown) = known(r#"{"type": "graceful_shutdown", "reason": "novel"}"#)
        else {
            panic!("no graceful_shutdown")
        };
        assert_eq!(shutdown.reason.as_deref(), Some("novel"));
    }

    /// The shortest worker messages with the seed fields.
    #[test]
    fn shortest_worker_messages_are_read() {
        let messages = [
            r#"{"type": "register", "worker_name": "w", "models": ["m"], "max_concurrent": 1}"#,
            r#"{"type": "models_update", "models": []}"#,
            r#"{"type": "models_update", "models": ["m"], "model_details": null}"#,
            r#"{"type": "register", "models": ["m"], "model_details": [{"m": 1}]}"#,
            r#"{"type": "pong"}"#,
            r#"{"type": "pong", "current_load": null, "timestamp_unix_ms": null}"#,
            r#"{"type": "response_complete", "request_id": "r", "status_code": 200, "headers": {}, "body": null,
                "token_counts": null}"#,
            r#"{"type": "error", "message": "something went wrong"}"#,
        ];
        for text in messages {
            known::<WorkerToRelay>(text);
        }
    }

    /// The shortest relay messages with the seed fields.
    #[test]
    fn shortest_relay_messages_are_read() {
        let messages = [
            r#"{"type": "register_ack", "worker_id": "w"}"#,
            r#"{"type": "register_ack", "worker_id": "w", "models": [], "warnings": [], "protocol_version": null}"#,
            r#"{"type": "request", "request_id": "r", "model": "m", "endpoint_path": "/v1/x", "body": "{}"}"#,
            r#"{"type": "ping"}"#,
            r#"{"type": "graceful_shutdown", "reason": null, "drain_timeout_secs": null}"#,
            r#"{"type": "models_refresh"}"#,
        ];
        for text in messages {
            known::<RelayToWorker>(text);
        }
    }
}
