//! The models that a link's worker advertises, and their details.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use modelrelay_protocol::model_details::DetailsByModel;

use super::super::register::WILDCARD;
use super::{LinkState, WorkerLink};

impl WorkerLink {
    /// True if the worker lists a model. A worker whose backend is down lists none.
    pub fn lists_models(&self) -> bool {
        self.lock().advertised.iter().any(|model| model.trim() != WILDCARD)
    }

    /// Returns the models that the worker last advertised, before cleaning.
    pub fn advertised(&self) -> Vec<String> {
        self.lock().advertised.clone()
    }

    /// True if an older worker has not listed its models yet: it registers `*` if its backend is down at its start. If
    /// it fails to read its backend's list again, it closes its link, so no refresh is requested while it holds
    /// requests.
    pub fn owes_list(&self) -> bool {
        let state = self.lock();
        !self.info.core1 && state.held.is_empty() && state.advertised.iter().any(|model| model.trim() == WILDCARD)
    }

    /// Replaces the advertised models.
    pub fn set_advertised(&self, models: Vec<String>) {
        let mut state = self.lock();
        state.advertised = models;
        state.leave_out_meaningless();
    }

    /// Stores the limits and capabilities of the models that the worker advertises; those of other models are left out.
    pub fn set_details(&self, mut details: DetailsByModel) {
        let mut state = self.lock();
        let advertised: HashSet<&str> = state.advertised.iter().map(|model| model.trim()).collect();
        details.retain(|model| advertised.contains(model));
        state.details = Arc::new(details);
    }

    /// Stores the models whose requests the backend fails; names that the worker does not advertise are left out.
    pub fn set_failing(&self, failing: &[String]) {
        let mut state = self.lock();
        let advertised: HashSet<&str> = state.advertised.iter().map(|model| model.trim()).collect();
        let failing = failing.iter().map(|model| model.trim()).filter(|model| advertised.contains(model));
        state.failing = failing.map(Arc::from).collect();
    }

    /// The models whose requests the backend fails.
    pub fn failing(&self) -> Vec<Arc<str>> {
        self.lock().failing.iter().cloned().collect()
    }

    /// Limits and capabilities of the models that the worker advertises.
    pub fn details(&self) -> Arc<DetailsByModel> {
        Arc::clone(&self.lock().details)
    }

    /// Stores the names that have no meaning because the slots were rejected. They are not advertised until slots are
    /// accepted and the worker advertises the names again.
    pub fn set_meaningless(&self, names: BTreeSet<String>) {
        let mut state = self.lock();
        state.meaningless = names;
        state.leave_out_meaningless();
    }
}

impl LinkState {
    fn leave_out_meaningless(&mut self) {
        let Self { advertised, meaningless, .. } = self;
        advertised.retain(|model| !meaningless.contains(model));
    }
}
