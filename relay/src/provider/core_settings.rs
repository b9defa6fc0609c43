//! A provider's configuration, as the dispatch core takes it.

use crate::dispatch::Settings;
use crate::settings::config::ProviderConfig;

pub(super) fn settings(config: &ProviderConfig) -> Settings {
    Settings {
        enabled: config.enabled,
        max_queue_len: config.max_queue_len,
        max_queue_bytes: config.max_queue_bytes,
        queue_timeout: config.queue_timeout(),
        absent_timeout: config.queue_timeout.is_none().then(|| config.absent_timeout()),
        cold_timeout: config.cold_timeout,
        cold_models: config.cold_models.iter().map(|model| model.as_str().into()).collect(),
        request_timeout: config.request_timeout(),
        placement: config.placement.mode,
        spill: config.placement.spill,
        max_homes: config.placement.max_homes,
        fairness: config.fairness.into(),
    }
}
