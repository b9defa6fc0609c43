//! `relay.yaml` as written: every field with a default is optional, unknown ones are an error.

use std::collections::BTreeMap;

use modelrelay_protocol::units::{ByteSize, HumanDuration};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::model_names::RawAliases;
use super::tenants::RawTenant;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawFile {
    pub(super) require_api_keys: Option<bool>,
    pub(super) relay_count: Option<u32>,
    pub(super) expect_workers: Option<bool>,
    pub(super) unready_when_saturated: Option<bool>,
    pub(super) tenants: Option<Vec<RawTenant>>,
    /// Required: an empty file, half written by an editor, must not delete every provider.
    pub(super) providers: Vec<RawProvider>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawProvider {
    pub(super) name: String,
    pub(super) enabled: Option<bool>,
    pub(super) cold_models: Option<Vec<String>>,
    pub(super) worker_secrets: Option<Vec<RawSecret>>,
    pub(super) worker_service_accounts: Option<Vec<String>>,
    pub(super) models: Option<Vec<RawModel>>,
    pub(super) aliases: Option<RawAliases>,
    pub(super) default_model: Option<String>,
    pub(super) fallback_model: Option<String>,
    pub(super) model_details: Option<BTreeMap<String, Map<String, Value>>>,
    pub(super) queue: Option<RawQueue>,
    pub(super) placement: Option<RawPlacement>,
    pub(super) fairness: Option<RawFairness>,
    pub(super) request_timeout: Option<HumanDuration>,
    pub(super) stream_idle_timeout: Option<HumanDuration>,
    pub(super) first_byte_timeout: Option<HumanDuration>,
    pub(super) max_models_per_worker: Option<usize>,
    pub(super) require_protocol_version: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawModel {
    pub(super) id: String,
    pub(super) aliases: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawQueue {
    pub(super) max_length: Option<usize>,
    pub(super) max_bytes: Option<ByteSize>,
    pub(super) timeout: Option<HumanDuration>,
    pub(super) cold_timeout: Option<HumanDuration>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawPlacement {
    pub(super) mode: Option<String>,
    pub(super) cache_isolation: Option<String>,
    pub(super) max_homes: Option<usize>,
    pub(super) spill_requests: Option<u32>,
    pub(super) spill_bytes: Option<ByteSize>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawFairness {
    pub(super) mode: Option<String>,
    pub(super) promote_after: Option<HumanDuration>,
}

/// A worker secret; its `Debug` omits the value.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawSecret {
    pub(super) file: Option<String>,
    pub(super) value: Option<String>,
    pub(super) not_after: Option<String>,
}

impl std::fmt::Debug for RawSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawSecret")
            .field("file", &self.file)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}
