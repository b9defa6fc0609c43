//! Effects in a form that can be compared with the reference's, and with earlier ones.

use std::sync::Arc;

use modelrelay_protocol::queue_position::QueuePosition;

use super::super::harness::{show, text};
use crate::dispatch::{Effect, Failure};

/// Returns the text of effects for the digest, without the fields that are newer than it.
pub(super) fn digest_text(effects: &[Effect]) -> String {
    let newer = [", position: None", ", class: Normal", ", rank: 0"];
    newer.iter().fold(text(&effects), |text, field| text.replace(field, ""))
}

/// Checks and removes the position of a request that ends in the queue, or may not enter it. The reference has none.
pub(super) fn check_position(effect: &mut Effect) {
    let Effect::Fail { position, failure, .. } = effect else { return };
    let is_of_queue =
        matches!(failure, Failure::QueueFull { .. } | Failure::QueueShareFull { .. } | Failure::Displaced { .. });
    let position = position.take();
    assert!(position.is_some() || !is_of_queue, "{failure:?} without a position");
    if let Some(QueuePosition { position, waiting }) = position {
        assert!((1..=waiting + 1).contains(&position), "{failure:?} at {position} of {waiting}");
    }
}

/// Sorts the effects of one event in an order that does not depend on how they were found. Demand, which the ledger
/// checks, estimates, and the text of slot reports are left out.
pub(super) fn in_order(effects: Vec<Effect>) -> Vec<Effect> {
    let mut effects: Vec<_> = effects.into_iter().filter(|effect| !matches!(effect, Effect::Demand { .. })).collect();
    for effect in &mut effects {
        if let Effect::Fail {
            failure:
                Failure::QueueFull { retry_after_secs }
                | Failure::QueueTimeout { retry_after_secs }
                | Failure::Displaced { retry_after_secs },
            ..
        } = effect
        {
            assert!((1..=60).contains(retry_after_secs));
            *retry_after_secs = 1;
        }
        if let Effect::Fail { failure: Failure::ModelLoading { retry_after }, .. } = effect {
            *retry_after = None;
        }
        if let Effect::Fail { failure: Failure::ModelFailed { report, .. }, .. } = effect {
            *report = Arc::default();
        }
    }
    effects.sort_by_cached_key(show);
    effects
}
