//! Checks that the recorded events are allowed: six invariants, each with its number here, and the order of requests.
//!
//! 1. A request ends exactly once: it succeeds, fails for a stated reason, or is cancelled. None hangs past its
//!    deadline.
//! 2. No byte of a response reaches a client twice, or another client (a client compares each byte itself).
//! 3. A worker never holds more than it acknowledged, in models (a backend checks itself) or in number.
//! 4. A truncated response never looks complete.
//! 5. Nothing that a peer does stops a process (a panic anywhere fails the seed).
//! 6. No secret is logged, or forwarded to a party that must not have it (a backend checks itself); and no key exceeds
//!    its permissions.

mod homes;
mod keys;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::client;
use crate::ledger::{Ending, Entry, Event};
use crate::log::Line;
use crate::plan::{Fault, FaultKind, Plan, RequestPlan, Trouble};
use crate::secrets;

/// Codes with which a relay may end a request here.
const REASONS: [&str; 9] = [
    "queue_full",
    "queue_timeout",
    "request_timeout",
    "requeue_exhausted",
    "backend_unreachable",
    "backend_reset",
    "backend_unavailable",
    "draining",
    "worker_lost",
];

/// Those of them that occur without a fault.
const REASONS_OF_LOAD: [&str; 3] = ["queue_full", "queue_timeout", "request_timeout"];

/// Those that a worker with a slot adds, and that occur without faults other than failed loads.
const REASONS_OF_SLOTS: [&str; 3] = ["model_loading", "severed_by_swap", "backend_unavailable"];

/// The code for a model that no worker has ever listed.
const UNKNOWN_MODEL: &str = "model_not_found";

/// The code that is assumed for a worker that sends no code with an error, as old ones do.
const REASON_OF_OLD_WORKERS: &str = "worker_error";

/// The maximum number of times that a request is begun before its first byte: it is sent to a worker once and three
/// times again, and a worker sends it to its backend once more if a kept connection turns out to be closed.
const MAX_EXECUTIONS: usize = 8;

/// The number of requests that may overtake another one where they are placed by cache.
const MAX_OVERTAKEN: usize = 8;

/// The allowed delay of a request's end: timers, and the way to its client.
const SLACK: Duration = Duration::from_secs(8);

/// The delay after which a backend notices that its worker has abandoned a request, besides the latency of a packet.
const GRACE: Duration = Duration::from_millis(100);

/// Returns all violations, one line each.
pub fn check(plan: &Plan, entries: &[Entry], lines: &[Line]) -> Vec<String> {
    let history = History::new(plan, entries);
    let mut wrong: Vec<String> = entries
        .iter()
        .filter_map(|entry| match &entry.event {
            Event::Wrong(what) => Some(what.clone()),
            _ => None,
        })
        .collect();
    for request in &plan.requests {
        wrong.extend(history.check_ending(request).map(|what| format!("request {}: {what}", request.nonce)));
        wrong.extend(history.check_executions(request).map(|what| format!("request {}: {what}", request.nonce)));
        wrong.extend(history.check_log(request, lines).map(|what| format!("request {}: {what}", request.nonce)));
    }
    wrong.extend((0..plan.workers.len()).filter_map(|worker| history.check_capacity(worker)));
    wrong.extend(plan.requests.iter().filter_map(|request| history.check_key_limit(request)));
    let most_overtaken = if plan.settings.places_by_cache { MAX_OVERTAKEN } else { 0 };
    wrong.extend(check_order(lines, most_overtaken));
    wrong.extend(homes::check_homes(plan, lines));
    wrong.extend(check_secrets(lines));
    wrong
}

struct History<'a> {
    plan: &'a Plan,
    sent: HashMap<usize, Duration>,
    first_byte: HashMap<usize, Duration>,
    ended: HashMap<usize, Vec<(Duration, &'a Ending)>>,
    executions: HashMap<usize, Vec<Duration>>,
    /// Begin and end of each execution, by worker.
    work: BTreeMap<usize, BTreeMap<usize, (Duration, Option<Duration>)>>,
    /// The periods in which a host was gone.
    gone: HashMap<&'a str, Vec<(Duration, Duration)>>,
}

impl<'a> History<'a> {
    fn new(plan: &'a Plan, entries: &'a [Entry]) -> Self {
        let mut history = Self {
            plan,
            sent: HashMap::new(),
            first_byte: HashMap::new(),
            ended: HashMap::new(),
            executions: HashMap::new(),
            work: BTreeMap::new(),
            gone: HashMap::new(),
        };
        for Entry { at, event } in entries {
            history.handle(*at, event);
        }
        history
    }

    fn handle(&mut self, at: Duration, event: &'a Event) {
        match event {
            Event::Sent { nonce } => drop(self.sent.insert(*nonce, at)),
            Event::FirstByte { nonce } => drop(self.first_byte.insert(*nonce, at)),
            Event::Ended { nonce, how } => self.ended.entry(*nonce).or_default().push((at, how)),
            Event::Began { nonce, worker, execution } => {
                self.executions.entry(*nonce).or_default().push(at);
                self.work.entry(*worker).or_default().insert(*execution, (at, None));
            }
            Event::Finished { worker, execution } => {
                if let Some((_, end)) = self.work.entry(*worker).or_default().get_mut(execution) {
                    *end = Some(at);
                }
            }
            Event::Gone(host) => self.gone.entry(host).or_default().push((at, Duration::MAX)),
            Event::Started(host) => {
                // Each host starts once without having been gone.
                if let Some((_, back)) = self.gone.get_mut(host.as_str()).and_then(|gone| gone.last_mut()) {
                    *back = at;
                }
            }
            Event::Fault(_) | Event::Wrong(_) => {}
        }
    }

    /// 1: a request ends exactly once, in time, and for a reason. 4: a truncated response is recognizable.
    fn check_ending(&self, request: &RequestPlan) -> Option<String> {
        let ends = self.ended.get(&request.nonce).map_or(&[][..], Vec::as_slice);
        let (Some(sent), [(at, how)]) = (self.sent.get(&request.nonce), ends) else {
            return Some(format!("ended {} times", ends.len()));
        };
        let connected = self.connected(request);
        let relay_was_lost = self.relay_was_lost(request.relay, connected, *at);
        // A response that has begun came from the relay as it was then.
        let has_excuse =
            self.relay_was_lost(request.relay, *sent, *at) || self.is_hard_to_reach(request.relay, connected, *at);
        if let Some(why) = self.check_refusal(request, how) {
            return Some(why);
        }
        match how {
            Ending::Hung if self.lost_power(request.relay, connected, *at) => return None,
            Ending::Hung => return Some("hung".to_owned()),
            Ending::Unconnected if !relay_was_lost => return Some("lost its relay, which was running".to_owned()),
            // A document cannot contain any other reason for its truncation.
            Ending::BrokenOff
                if (request.answer.streams || (self.is_quiet(request) && !self.has_slots()))
                    && !has_excuse
                    && request.reads_each.is_none() =>
            {
                return Some("ended prematurely without a reason".to_owned());
            }
            Ending::BackendError if request.answer.trouble != Trouble::Refuses => {
                return Some("received an error that its backend did not return".to_owned());
            }
            Ending::Failed(code) | Ending::BrokenStream(code) => {
                if let Some(why) = self.check_reason(request, code) {
                    return Some(why);
                }
            }
            Ending::Answered if !matches!(request.answer.trouble, Trouble::None) => {
                return Some("was answered by a backend that failed".to_owned());
            }
            _ => {}
        }
        let took = *at - *sent;
        let most = self.longest(request);
        (took > most).then(|| format!("took {took:?}; the limit is {most:?}"))
    }

    /// Returns the earliest time at which the request's connection was made: that of the first in the client's sequence
    /// of requests that kept the connection.
    fn connected(&self, request: &RequestPlan) -> Duration {
        let sent = |of: &RequestPlan| self.sent.get(&of.nonce).copied().unwrap_or_default();
        let how = |of: &RequestPlan| self.ended.get(&of.nonce)?.first().map(|(_, how)| *how);
        let before = self.plan.requests[..request.nonce].iter().rev();
        let of_client = before.filter(|other| request.client.is_some() && other.client == request.client);
        let kept = of_client.take_while(|other| how(other).is_some_and(Ending::keeps_the_connection));
        sent(kept.last().unwrap_or(request))
    }

    fn check_reason(&self, request: &RequestPlan, code: &str) -> Option<String> {
        // A stream that has begun with a comment has sent 200, and reports the backend's error in-band.
        let own_error = request.answer.trouble == Trouble::Refuses && code == "backend_error";
        let by_key = code == "key_limit" || self.refusal(request) == Some(code);
        let by_old_worker = code == REASON_OF_OLD_WORKERS && self.plan.workers.iter().any(|worker| worker.is_old);
        if own_error || by_key || (self.has_slots() && REASONS_OF_SLOTS.contains(&code)) {
            None
        } else if code == UNKNOWN_MODEL {
            // A restarted relay may not know it yet.
            let may_be_unknown = !self.plan.is_served(request.model, request.relay) || !self.plan.faults.is_empty();
            (!may_be_unknown).then(|| "a model that a worker serves was unknown".to_owned())
        } else if !REASONS.contains(&code) && !by_old_worker {
            Some(format!("ended for the reason {code:?}, which is none"))
        } else if self.is_quiet(request) && !REASONS_OF_LOAD.contains(&code) {
            Some(format!("failed with {code} without a fault"))
        } else {
            None
        }
    }

    fn has_slots(&self) -> bool {
        self.plan.workers.iter().any(|worker| worker.slot.is_some())
    }

    /// True if nothing goes wrong except load, and swaps if there are slots.
    fn is_quiet(&self, request: &RequestPlan) -> bool {
        self.plan.faults.is_empty() && request.answer.trouble == Trouble::None
    }

    fn longest(&self, request: &RequestPlan) -> Duration {
        let settings = &self.plan.settings;
        let held: Duration = self.delays(request.relay).map(|(_, by)| by).sum();
        let read = request.reads_each.map_or(Duration::ZERO, |each| each * 2 * (request.answer.pieces as u32 + 10));
        Duration::from_secs(settings.queue_timeout + settings.cold_timeout + settings.request_timeout)
            + SLACK
            + held
            + read
    }

    /// Returns the faults between clients and that relay, and how long each may delay a packet.
    fn delays(&self, relay: usize) -> impl Iterator<Item = (&Fault, Duration)> {
        let relay = format!("relay-{relay}");
        self.plan.faults.iter().filter_map(move |fault| match &fault.kind {
            FaultKind::Hold(a, b) if *a == relay && b == "clients" => Some((fault, fault.lasts)),
            FaultKind::Slow(a, b, by) if *a == relay && b == "clients" => Some((fault, *by * 6)),
            _ => None,
        })
    }

    /// True if anything in that period may have been delayed.
    fn is_hard_to_reach(&self, relay: usize, from: Duration, to: Duration) -> bool {
        self.delays(relay).any(|(fault, by)| fault.at <= to && fault.at + fault.lasts + by >= from)
    }

    fn relay_was_lost(&self, relay: usize, from: Duration, to: Duration) -> bool {
        let host = format!("relay-{relay}");
        let gone = self.gone.get(host.as_str()).map_or(&[][..], Vec::as_slice);
        // A relay that shuts down accepts no connection for a while before it is gone.
        let early = Duration::from_secs(self.plan.settings.drain_timeout + 2);
        gone.iter().any(|(begin, back)| {
            begin.saturating_sub(early) <= to && back.saturating_add(self.plan.latency * 4) >= from
        })
    }

    fn lost_power(&self, relay: usize, from: Duration, to: Duration) -> bool {
        let host = format!("relay-{relay}");
        self.plan.faults.iter().any(|fault| match &fault.kind {
            FaultKind::PowerLoss(name) => *name == host && fault.at <= to && fault.at + fault.lasts + GRACE >= from,
            _ => false,
        })
    }

    /// Checks that the outcome that a relay logs and counts is the one that its client saw.
    fn check_log(&self, request: &RequestPlan, lines: &[Line]) -> Option<String> {
        let (at, how) = self.ended.get(&request.nonce)?.first()?;
        let id = client::id(request.nonce);
        let completion = lines.iter().find(|line| {
            line.message == "response complete" && line.request_id.as_deref() == Some(&id) && !line.host.is_empty()
        });
        let outcome = completion.and_then(|completion| completion.text.split(" outcome=").nth(1)?.split(' ').next());
        let Some(outcome) = outcome else {
            let may_be_silent = request.is_to_old_relay || self.relay_was_lost(request.relay, Duration::ZERO, *at);
            let is_answered = matches!(how, Ending::Answered | Ending::BackendError);
            return (is_answered && !may_be_silent).then(|| format!("its client saw {how:?}, and the log is silent"));
        };
        let is_consistent = match how {
            Ending::Answered => outcome == "ok",
            Ending::BackendError | Ending::Failed(_) | Ending::BrokenStream(_) => {
                !["ok", "cancelled"].contains(&outcome)
            }
            Ending::BrokenOff | Ending::Left | Ending::Unconnected | Ending::Hung => true,
        };
        (!is_consistent).then(|| format!("its client received {how:?}, but the log states {outcome}"))
    }

    /// 2: no request is begun after its client has received a part of the response, and none is begun too often before.
    fn check_executions(&self, request: &RequestPlan) -> Option<String> {
        let begun = self.executions.get(&request.nonce).map_or(&[][..], Vec::as_slice);
        if begun.len() > MAX_EXECUTIONS {
            return Some(format!("was worked on {} times", begun.len()));
        }
        let first = self.first_byte.get(&request.nonce)?;
        begun.iter().any(|begin| begin > first).then(|| "was begun again behind its first byte".to_owned())
    }

    /// 3: a worker never has more than it acknowledged. Its backend notices slightly later that the worker abandoned a
    /// request, or was killed.
    fn check_capacity(&self, worker: usize) -> Option<String> {
        let host = format!("worker-{worker}");
        let capacity = self.plan.workers[worker].capacity;
        let work: Vec<_> = self.work.get(&worker)?.values().collect();
        let grace = GRACE + self.plan.tick * 4 + self.plan.latency * 4;
        work.iter().find_map(|(begin, _)| {
            let later = *begin + grace;
            let running =
                work.iter().filter(|(began, end)| began <= begin && end.is_none_or(|end| end > later)).count();
            (running > capacity)
                .then(|| format!("{host} had {running} requests at {later:?}; its capacity is {capacity}"))
        })
    }
}

/// Checks that requests of one API key for the same model are sent to workers in order of arrival, a requeued one at
/// its place, and that none is overtaken more often than this.
fn check_order(lines: &[Line], most_overtaken: usize) -> Vec<String> {
    // The place and the API key of each request.
    let mut submitted: HashMap<(&str, &str), (usize, Option<&str>)> = HashMap::new();
    // The requests that were sent of each model and key, by relay.
    let mut all_sent: HashMap<(&str, &str, Option<&str>), BTreeMap<usize, &str>> = HashMap::new();
    let mut sent: HashSet<(&str, &str)> = HashSet::new();
    let mut wrong = Vec::new();
    // Lines without a host come from a killed process being dropped, in which nothing would run any more.
    for (place, line) in lines.iter().enumerate().filter(|(_, line)| !line.host.is_empty()) {
        let Some(id) = line.request_id.as_deref() else { continue };
        let key = (line.host.as_str(), id);
        match line.message.as_str() {
            "request submitted" => drop(submitted.insert(key, (place, line.key_id.as_deref()))),
            "request dispatched" if sent.insert(key) => {
                let Some((arrival, api_key)) = submitted.get(&key) else {
                    wrong.push(format!("{id} was dispatched and never submitted"));
                    continue;
                };
                let sent = all_sent.entry((key.0, line.model.as_deref().unwrap_or_default(), *api_key)).or_default();
                if let Some((_, other)) = sent.range(arrival..).nth(most_overtaken) {
                    wrong.push(format!("{other} overtook {id} at {}", key.0));
                }
                sent.insert(*arrival, id);
            }
            _ => {}
        }
    }
    wrong
}

/// 6: no secret is logged.
fn check_secrets(lines: &[Line]) -> Option<String> {
    lines.iter().find_map(|line| {
        let secret = secrets::NOT_FOR_LOGS.iter().find(|secret| line.text.contains(**secret))?;
        Some(format!("{} logged {secret}: {}", line.host, line.text))
    })
}

/// Returns the number of requests by outcome, in human-readable form.
pub fn outcomes(entries: &[Entry]) -> BTreeMap<String, usize> {
    let mut outcomes = BTreeMap::new();
    for entry in entries {
        let Event::Ended { how, .. } = &entry.event else { continue };
        let name = match how {
            Ending::Answered => "answered".to_owned(),
            Ending::BackendError => "error of the backend".to_owned(),
            Ending::Failed(code) => format!("failed: {code}"),
            Ending::BrokenStream(code) => format!("stream broken: {code}"),
            Ending::BrokenOff => "broken off".to_owned(),
            Ending::Left => "client left".to_owned(),
            Ending::Unconnected => "relay was gone".to_owned(),
            Ending::Hung => "relay lost power".to_owned(),
        };
        *outcomes.entry(name).or_default() += 1;
    }
    outcomes
}
