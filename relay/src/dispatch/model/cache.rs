//! What the relay believes of a worker's prompt cache, and the prompts that it has yet to compute.

use std::collections::BTreeMap;

use modelrelay_protocol::limits::MAX_HOMES_PER_MESSAGE;

use super::models::ModelId;

/// Full trust, in permille.
const FULL: u64 = 1000;

/// One observation changes the trust by this part of the difference.
const INERTIA: u64 = 8;

/// A worker's cache and backlog. Sizes are bytes of request bodies.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    /// Sent to it by this relay and not believed to be cached, before the first byte of the response.
    own: u64,
    /// The same for other relays, as the worker reported it.
    others: u64,
    /// The part of what was believed to be in its cache that was there, in permille.
    trust: u64,
    /// Homes recorded before this dispatch are void.
    void_before: u64,
    /// The same for single models.
    models: BTreeMap<ModelId, u64>,
    /// True if reports on other relays' conversations are of requests since the last report, and not of any before.
    is_current: bool,
}

impl Cache {
    pub(crate) fn new(void_before: u64) -> Self {
        Self { own: 0, others: 0, trust: FULL, void_before, models: BTreeMap::new(), is_current: false }
    }

    pub(crate) fn backlog(&self) -> u64 {
        self.own.saturating_add(self.others)
    }

    pub(crate) fn trust(&self) -> u16 {
        u16::try_from(self.trust).unwrap_or(u16::MAX)
    }

    /// Returns the bytes that are likely found in the cache, of those that are believed to be there.
    pub(crate) fn expected(&self, believed: u64) -> u64 {
        believed / FULL * self.trust + believed % FULL * self.trust / FULL
    }

    pub(crate) fn handle_sent(&mut self, cost: u64) {
        self.own = self.own.saturating_add(cost);
    }

    pub(crate) fn handle_computed(&mut self, cost: u64) {
        self.own = self.own.saturating_sub(cost);
    }

    /// Handles a report on this number of other relays' conversations, and their backlog. Returns true if the reported
    /// requests came since the last report. The first reports of a connection have what the worker remembers; the first
    /// one that is not full is the last of these.
    pub(crate) fn handle_reported(&mut self, homes: usize, others: u64) -> bool {
        self.others = others;
        let is_current = self.is_current;
        self.is_current |= homes < MAX_HOMES_PER_MESSAGE;
        is_current
    }

    /// Compares what was believed to be cached of a body with the part of the prompt that was, in permille.
    pub(crate) fn handle_cached(&mut self, believed: u64, body: u64, cached: u16) {
        if believed == 0 {
            return;
        }
        let found = u128::from(body) * u128::from(cached) / u128::from(believed);
        let found = u64::try_from(found).unwrap_or(FULL).min(FULL);
        self.trust = (self.trust * (INERTIA - 1) + found).div_ceil(INERTIA).min(FULL);
    }

    /// Voids the homes of all models.
    pub(crate) fn forget(&mut self, turn: u64) {
        self.void_before = turn;
        self.models.clear();
    }

    /// Voids the homes of a model.
    pub(crate) fn forget_model(&mut self, model: ModelId, turn: u64) {
        self.models.insert(model, turn);
    }

    /// Returns the last dispatch before which homes of any model are void.
    pub(crate) fn voided(&self) -> u64 {
        self.models.values().copied().fold(self.void_before, u64::max)
    }

    /// True if homes of this model were voided, other than with those of all models.
    pub(crate) fn has_forgotten(&self, model: ModelId) -> bool {
        self.models.contains_key(&model)
    }

    /// True if a home that was recorded at this turn still stands.
    pub(crate) fn holds(&self, model: ModelId, turn: u64) -> bool {
        turn >= self.void_before && self.models.get(&model).is_none_or(|void_before| turn >= *void_before)
    }
}
