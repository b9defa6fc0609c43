//! Checks of API keys.

use std::time::Duration;

use super::{GRACE, History};
use crate::ledger::Ending;
use crate::plan::RequestPlan;

/// Codes for requests that a key does not permit at all.
const REFUSALS: [&str; 2] = ["invalid_api_key", "model_forbidden"];

impl History<'_> {
    /// Returns the code of the rejection that a request's key must get.
    pub(super) fn refusal(&self, request: &RequestPlan) -> Option<&'static str> {
        if self.plan.keys.is_empty() {
            return None;
        }
        let Some(key) = request.key.map(|key| &self.plan.keys[key]).filter(|key| !key.revoked) else {
            return Some("invalid_api_key");
        };
        let may_use = key.models.as_ref().is_none_or(|models| models.contains(&request.model));
        (!may_use).then_some("model_forbidden")
    }

    /// 6: a request that its key does not permit is rejected, for the right reason, and never executed. A relay that
    /// drains does not check keys, and one that checks a key does so before it checks the model.
    pub(super) fn check_refusal(&self, request: &RequestPlan, how: &Ending) -> Option<String> {
        let expected = self.refusal(request);
        if expected.is_some() && self.executions.contains_key(&request.nonce) {
            return Some(format!("was worked on, and its key may expect {expected:?}"));
        }
        let code = match how {
            Ending::Failed(code) | Ending::BrokenStream(code) => code.as_str(),
            Ending::Answered | Ending::BackendError => "",
            Ending::BrokenOff | Ending::Left | Ending::Unconnected | Ending::Hung => return None,
        };
        let is_limited = request.key.is_some_and(|key| self.plan.keys[key].max_in_flight.is_some());
        let is_right = match expected {
            Some("invalid_api_key") => ["invalid_api_key", "draining"].contains(&code),
            Some(expected) => code == expected || code == "draining" || (code == "key_limit" && is_limited),
            None => !REFUSALS.contains(&code) && (code != "key_limit" || is_limited),
        };
        (!is_right).then(|| format!("ended with {how:?}, and its key may expect {expected:?}"))
    }

    /// A key never has more concurrent responses at a relay than its limit. A client sees the end of one slightly later
    /// than the relay, which may have begun another by then.
    pub(super) fn check_key_limit(&self, request: &RequestPlan) -> Option<String> {
        let most = self.plan.keys.get(request.key?)?.max_in_flight?;
        let begin = *self.first_byte.get(&request.nonce)?;
        let later = begin + GRACE + self.plan.tick * 4 + self.plan.latency * 4;
        if self.is_hard_to_reach(request.relay, begin, later)
            || self.relay_was_lost(request.relay, Duration::ZERO, later)
        {
            return None;
        }
        let at_once = self.plan.requests.iter().filter(|other| {
            let is_running = || {
                let began = self.first_byte.get(&other.nonce).is_some_and(|began| *began <= begin);
                let ends = self.ended.get(&other.nonce).and_then(|ends| ends.first());
                began && ends.is_some_and(|(end, _)| *end > later)
            };
            // A response that is read slowly may have been sent long ago.
            (other.key, other.relay, other.reads_each) == (request.key, request.relay, None) && is_running()
        });
        let count = at_once.count();
        (count > most as usize)
            .then(|| format!("relay-{} ran {count} requests of a key that may have {most}", request.relay))
    }
}
