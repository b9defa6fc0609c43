//! Every message exactly as documented: the wire traces of the protocol walkthrough, and one of each message that the
//! capabilities add.
//!
//! The JSON is copied, not generated: the tests must match what peers send that know only the document, not what these
//! programs agree on among themselves.

mod odd_peers;
mod relay_of_the_walkthrough;
mod relay_with_capabilities;
mod worker_of_the_walkthrough;
mod worker_with_capabilities;

use modelrelay_protocol::message::{
    CancelReason, ConversationKey, MessageError, Parsed, RelayToWorker, RequestClass, SlotModelStatus, SlotState,
    WorkerError, WorkerToRelay, encode,
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
