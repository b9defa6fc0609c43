//! Checks of the homes of conversations.

use std::collections::HashMap;

use crate::client;
use crate::log::Line;
use crate::plan::{Plan, Trouble};

/// A turn of a conversation is sent to its home, the worker that had the previous turn, if that is idle.
///
/// Checked where nothing else can move it: one relay, no swaps, no old workers, no faults, and until the first failure
/// of a backend.
pub(super) fn check_homes(plan: &Plan, lines: &[Line]) -> Vec<String> {
    let is_plain = plan.workers.iter().all(|worker| worker.slot.is_none() && !worker.is_old);
    if !plan.settings.places_by_cache || plan.relays > 1 || !is_plain || !plan.faults.is_empty() {
        return Vec::new();
    }
    let requests: HashMap<_, _> = plan.requests.iter().map(|request| (client::id(request.nonce), request)).collect();
    let mut homes = HashMap::new();
    let mut running: HashMap<&str, &str> = HashMap::new();
    let mut wrong = Vec::new();
    for line in lines.iter().filter(|line| !line.host.is_empty()) {
        let Some(id) = line.request_id.as_deref() else { continue };
        if line.message == "response complete" {
            running.remove(id);
        }
        if line.message != "request dispatched" {
            continue;
        }
        let worker = line.text.split(" worker=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        if let Some(request) = requests.get(id) {
            if request.answer.trouble != Trouble::None {
                break;
            }
            let conversation = request.conversation.map(|number| (number, request.model));
            let home = conversation.and_then(|conversation| homes.insert(conversation, worker));
            if let Some(home) = home.filter(|home| *home != worker && !running.values().any(|busy| busy == home)) {
                wrong.push(format!("{id} went to {worker} although its home, {home}, was idle"));
            }
        }
        running.insert(id, worker);
    }
    wrong
}
