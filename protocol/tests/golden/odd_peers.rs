//! Missing, unknown or malformed fields.

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
    for text in ["", "{}", "[]", "null", "\"ping\"", r#"{"type": 1}"#, r#"{"type": "cancel"}"#, "{\"type\": \"ping\""] {
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

#[test]
fn unknown_class_is_normal() {
    for class in ["\"urgent\"", "\"Batch\"", "1", "null", "[]"] {
        let text = format!(r#"{{"type": "request", "request_id": "r", "endpoint_path": "/", "class": {class}}}"#);
        let RelayToWorker::Request(request) = known(&text) else { panic!("no request") };
        assert_eq!(request.class, RequestClass::Normal, "{class}");
        let text = format!(r#"{{"type": "demand", "models": [{{"id": "m", "waiting": 1, "class": {class}}}]}}"#);
        let RelayToWorker::Demand(demand) = known(&text) else { panic!("no demand") };
        assert_eq!((demand.models[0].class, demand.models[0].waiting), (RequestClass::Normal, 1), "{class}");
    }
}

/// The request can be served without it.
#[test]
fn malformed_conversation_of_request_is_ignored() {
    for key in ["\"0ff\"", "\"+00000000000000f\"", "255", "null", "{\"a\": []}"] {
        let text = format!(r#"{{"type": "request", "request_id": "r", "endpoint_path": "/", "conversation": {key}}}"#);
        let RelayToWorker::Request(request) = known(&text) else { panic!("no request") };
        assert_eq!(request.conversation, None, "{key}");
    }
}

#[test]
fn malformed_home_is_rejected() {
    for home in [r#"["0ff", 1]"#, r#"["00000000000000ff"]"#, r#"["00000000000000ff", -1]"#, r#"[255, 1]"#] {
        let text = format!(r#"{{"type": "homes", "homes": [{home}]}}"#);
        assert!(WorkerToRelay::parse(&text).is_err(), "{home}");
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
    let RelayToWorker::GracefulShutdown(shutdown) = known(r#"{"type": "graceful_shutdown", "reason": "novel"}"#) else {
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
                "token_counts": null, "details": null}"#,
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
