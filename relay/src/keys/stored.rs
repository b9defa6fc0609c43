//! The format of keys in a file or a Secret.

use serde::{Deserialize, Serialize};

use super::KeyRecord;

/// The only version so far.
const VERSION: u32 = 1;

/// The stored form. Unknown fields are an error, as in [`KeyRecord`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredKeys {
    version: u32,
    keys: Vec<KeyRecord>,
}

/// Decodes stored keys; an error states the problem.
pub(super) fn decode(text: &[u8]) -> Result<Vec<KeyRecord>, String> {
    let stored: StoredKeys = serde_json::from_slice(text).map_err(|error| format!("not an API key file: {error}"))?;
    if stored.version != VERSION {
        return Err(format!("unsupported API key file version {}; the supported version is {VERSION}", stored.version));
    }
    Ok(stored.keys)
}

/// Encodes keys in a human-readable form.
pub(super) fn encode_pretty(records: &[KeyRecord]) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(&stored(records))?;
    text.push(b'\n');
    Ok(text)
}

/// Encodes keys in the smallest form.
pub(super) fn encode_compact(records: &[KeyRecord]) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&stored(records))
}

fn stored(records: &[KeyRecord]) -> StoredKeys {
    StoredKeys { version: VERSION, keys: records.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_earlier_versions_are_written_unchanged() {
        let digest = "0f".repeat(32);
        let key = |rest: &str| {
            format!(r#"{{"id":"a","name":"n","sha256":"{digest}","created_at":"2026-01-01T00:00:00.000Z",{rest}}}"#)
        };
        let keys = [
            key(
                r#""last_used_at":"2026-01-02T00:00:00.000Z","revoked":false,"limits":{"models":["m"],"max_in_flight":2}"#,
            ),
            key(r#""revoked":true,"limits":{}"#),
        ];
        let text = format!(r#"{{"version":1,"keys":[{}]}}"#, keys.join(","));
        let records = decode(text.as_bytes()).expect("keys");
        assert_eq!(String::from_utf8(encode_compact(&records).expect("JSON")), Ok(text));
    }
}
