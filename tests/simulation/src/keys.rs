//! The API keys of a simulation, and the file that the relays read them from.

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::plan::KeyPlan;
use crate::secrets;

/// Returns the key at that index, as a client presents it.
pub fn text(place: usize) -> String {
    format!("mr-{}-{}", id(place), secrets::RELAY_KEY)
}

fn id(place: usize) -> String {
    format!("key{place}")
}

/// Returns the content of `API_KEYS_FILE`.
pub fn file(keys: &[KeyPlan]) -> String {
    let key = |(place, key): (usize, &KeyPlan)| {
        let digest = Sha256::digest(text(place)).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut limits = json!({});
        if let Some(models) = &key.models {
            limits["models"] = json!(models);
        }
        if let Some(most) = key.max_in_flight {
            limits["max_in_flight"] = json!(most);
        }
        json!({
            "id": id(place), "name": id(place), "sha256": digest, "created_at": "2026-01-01T00:00:00Z",
            "revoked": key.revoked, "limits": limits,
        })
    };
    json!({ "version": 1, "keys": keys.iter().enumerate().map(key).collect::<Vec<_>>() }).to_string()
}
