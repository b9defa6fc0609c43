//! Bugs as a machine could have them, made by changing what it receives and what it returns. The explorer must find
//! each.

#![cfg_attr(not(unix), allow(dead_code, reason = "the explorer runs only on Unix"))]

use super::World;
use crate::effect::Effect;
use crate::event::{Event, Outcome};

/// A bug of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// It loads a model although the memory of the last one is not free.
    TrustsMemory,
    /// It does not ignore the result of a superseded call.
    AcceptsLateResult,
    /// It forgets that a waiting request was cancelled.
    ForgetsCancel,
    /// It sends a relay no grants after the first swap.
    ForgetsGrant,
}

impl World {
    /// Returns an event as a machine with the bug understands it; `None` if it ignores the event.
    pub(super) fn misunderstood(&self, event: Event) -> Option<Event> {
        let Some(bug) = self.bug else { return Some(event) };
        match (bug, event) {
            (Bug::TrustsMemory, Event::Done { op, outcome: Outcome::MemoryChecked { freed: false } }) => {
                Some(Event::Done { op, outcome: Outcome::MemoryChecked { freed: true } })
            }
            (Bug::AcceptsLateResult, Event::Done { op, outcome }) if !matches!(outcome, Outcome::Probed(_)) => {
                let current = self.call.as_ref().map(|(current, _)| *current);
                Some(Event::Done { op: current.unwrap_or(op), outcome })
            }
            (Bug::ForgetsCancel, Event::Cancelled { request }) if !self.running.contains_key(&request) => None,
            (_, event) => Some(event),
        }
    }

    /// Returns the effects that a machine with the bug does not forget.
    pub(super) fn remembered(&self, mut effects: Vec<Effect>) -> Vec<Effect> {
        let forgets = self.bug == Some(Bug::ForgetsGrant) && self.machine.generation > 1;
        effects.retain(|effect| !forgets || !matches!(effect, Effect::Grant { .. }));
        effects
    }
}
