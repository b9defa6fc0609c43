//! The relay's dispatch core, as measurements and simulations start it.

use std::collections::HashSet;
use std::time::Duration;

use modelrelay_relay::dispatch::{Fairness, Placement, Settings, Spill};

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// Settings without limits: no request is rejected, or ends at a time limit.
pub fn unlimited() -> Settings {
    Settings {
        enabled: true,
        max_queue_len: usize::MAX,
        max_queue_bytes: u64::MAX,
        queue_timeout: FOREVER,
        absent_timeout: None,
        cold_timeout: None,
        cold_models: HashSet::new(),
        request_timeout: FOREVER,
        placement: Placement::LeastLoad,
        spill: Spill::default(),
        max_homes: 0,
        fairness: Fairness::default(),
    }
}
