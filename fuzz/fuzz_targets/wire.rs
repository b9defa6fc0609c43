//! The text messages of the worker socket, both directions: a parsed message is encoded as text that parses to the same
//! message.

#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use modelrelay_protocol::message::{MessageError, Parsed, RelayToWorker, WorkerToRelay, encode};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct TypeOnly {
    #[serde(rename = "type")]
    kind: String,
}

fuzz_target!(|text: &str| {
    survives(text, RelayToWorker::parse);
    survives(text, WorkerToRelay::parse);
});

fn survives<M>(text: &str, parse: fn(&str) -> Result<Parsed<M>, MessageError>)
where
    M: Serialize + PartialEq + Debug,
{
    let message = match parse(text) {
        Ok(Parsed::Known(message)) => message,
        Ok(Parsed::Unknown(kind)) => {
            // Skipped, not misunderstood: it states its own type. The rest of it does not matter.
            let said = serde_json::from_str::<TypeOnly>(text).expect("it has a type");
            assert_eq!(said.kind, kind);
            return;
        }
        Err(_) => return,
    };
    let written = encode(&message);
    match parse(&written) {
        Ok(Parsed::Known(again)) => {
            assert_eq!(again, message, "{written}");
            assert_eq!(encode(&again), written);
        }
        other => panic!("{written} was read as {other:?}"),
    }
}
