//! A llama-server in router mode: the models of a slot, one of which is loaded on the worker's command.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::plan::SlotPlan;

/// The router of one worker.
#[derive(Debug)]
pub struct Router {
    plan: SlotPlan,
    states: BTreeMap<&'static str, State>,
    loads: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unloaded,
    /// The process that should serve it has ended.
    Failed,
    Loading {
        until: Duration,
        fails: bool,
    },
    Loaded,
}

impl Router {
    /// Creates a router with these models, none of them loaded.
    pub fn new(plan: SlotPlan, models: &[&'static str]) -> Self {
        Self { plan, states: models.iter().map(|model| (*model, State::Unloaded)).collect(), loads: 0 }
    }

    /// Returns the response to `GET /models`.
    pub fn list(&mut self, now: Duration) -> Value {
        self.pass(now);
        let status = |state: &State| match state {
            State::Unloaded => json!({ "value": "unloaded" }),
            State::Failed => json!({ "value": "unloaded", "failed": true, "exit_code": 1 }),
            State::Loading { .. } => json!({ "value": "loading" }),
            State::Loaded => json!({ "value": "loaded" }),
        };
        let models =
            self.states.iter().map(|(id, state)| json!({ "id": id, "object": "model", "status": status(state) }));
        json!({ "object": "list", "data": models.collect::<Vec<_>>() })
    }

    /// Starts loading; the error describes a violation.
    pub fn load(&mut self, model: &str, now: Duration) -> Result<(), String> {
        self.pass(now);
        let other = self.states.iter().find(|(id, state)| **id != model && takes_memory(**state));
        let other = other.map(|(id, _)| format!("{model} is loaded in addition to {id}"));
        self.loads += 1;
        let fails = self.plan.fails_each > 0 && self.loads.is_multiple_of(self.plan.fails_each);
        if let Some(state) = self.states.get_mut(model).filter(|state| !takes_memory(**state)) {
            *state = State::Loading { until: now + self.plan.loads_in, fails };
        }
        other.map_or(Ok(()), Err)
    }

    /// Unloads at once.
    pub fn unload(&mut self, model: &str) {
        if let Some(state) = self.states.get_mut(model) {
            *state = State::Unloaded;
        }
    }

    /// True if requests for it can be served.
    pub fn is_loaded(&mut self, model: &str, now: Duration) -> bool {
        self.pass(now);
        self.states.get(model) == Some(&State::Loaded)
    }

    fn pass(&mut self, now: Duration) {
        for state in self.states.values_mut() {
            match *state {
                State::Loading { until, fails } if until <= now => {
                    *state = if fails { State::Failed } else { State::Loaded };
                }
                _ => {}
            }
        }
    }
}

fn takes_memory(state: State) -> bool {
    matches!(state, State::Loading { .. } | State::Loaded)
}
