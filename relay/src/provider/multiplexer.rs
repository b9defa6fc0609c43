//! Reports from workers with a multiplexer, and commands to them.

use std::sync::Arc;
use std::time::Instant;

use modelrelay_protocol::message::{self as wire, Command, CommandResult, RelayToWorker, Slot};
use tracing::{debug, info, warn};

use super::Provider;
use crate::dispatch::{Event, Grant, NewMultiplexer};
use crate::provider::worker::link::WorkerLink;
use crate::provider::worker::slots::{clean_gates, clean_slots, most_models};

/// Returns the core's input about a new worker's multiplexer.
pub(super) fn registered(link: &WorkerLink) -> Option<NewMultiplexer> {
    link.info.slots1.then(|| NewMultiplexer {
        // A worker without an instance id can be assigned too, but relays may choose differently.
        instance: Arc::clone(link.info.instance.as_ref().unwrap_or(&link.info.id)),
        slots: link.slots().0.to_vec(),
    })
}

impl Provider {
    /// Records the models that the worker serves now, and this relay's share of each.
    pub fn gates_set(&self, link: &WorkerLink, grant: &wire::Grant) {
        let reported = grant.models.as_deref().unwrap_or_default();
        let gates = clean_gates(reported, most_models(self.config().max_models_per_worker)).unwrap_or_else(|why| {
            let (provider, worker) = (&self.name, &link.info.name);
            match link.note_gates_refused() {
                Some(suppressed) => warn!(%provider, %worker, why, suppressed, "invalid gate report; excluding worker"),
                None => debug!(%provider, %worker, why, "invalid gate report; excluding worker"),
            }
            Vec::new()
        });
        let sums = Grant::from(grant);
        let mut state = self.lock();
        self.end_succession(&mut state, link.info.key);
        self.handle(&mut state, Event::GatesSet { worker: link.info.key, sums, gates });
    }

    /// Records the state of the worker's slots.
    pub fn slots_reported(&self, link: &WorkerLink, slots: Vec<Slot>) {
        match clean_slots(slots, most_models(self.config().max_models_per_worker)) {
            Ok(slots) => {
                link.set_slots(slots.clone());
                self.apply(Event::SlotsReported { worker: link.info.key, slots });
            }
            Err(why) => {
                let (provider, worker) = (&self.name, &link.info.name);
                match link.note_slots_refused() {
                    Some(suppressed) => {
                        warn!(%provider, %worker, why, suppressed, "invalid slot report; keeping previous slots");
                    }
                    None => debug!(%provider, %worker, why, "invalid slot report; keeping previous slots"),
                }
            }
        }
    }

    /// Sends a command to a multiplexer; `op_id` identifies it. If the worker has left meanwhile, the command ends.
    pub fn command(&self, link: &WorkerLink, command: Command) {
        info!(
            provider = %self.name,
            worker = %link.info.name,
            command = command.command,
            model = command.model,
            op_id = command.op_id,
            "command sent to worker by an admin"
        );
        link.push(&RelayToWorker::Command(command));
        if self.link(&link.info.id).is_none() {
            // The worker left after the command was issued, and no other code would end the command.
            self.shared.operations.worker_left(link.info.key, Instant::now());
        }
    }

    /// True if the worker advertises the model.
    pub fn worker_has_model(&self, link: &WorkerLink, model: &str) -> bool {
        let worker = self.lock().core.worker(link.info.key);
        worker.is_some_and(|worker| worker.models.iter().any(|known| **known == *model))
    }

    /// Records the result of a command.
    pub fn command_ended(&self, link: &WorkerLink, result: &CommandResult) {
        let outcome = if result.ok { Ok(()) } else { Err(result.error.as_deref().unwrap_or_default()) };
        if !self.shared.operations.finish(link.info.key, &result.op_id, outcome, Instant::now()) {
            debug!(worker = %link.info.name, "dropped the result of an unknown command");
        }
    }
}
