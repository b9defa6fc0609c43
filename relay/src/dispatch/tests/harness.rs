//! A provider with a clock that the test controls. Effects come back as short lines, so that a test is easy to read:
//! `send r1 to w1 #2` is the second attempt of request 1, at worker 1.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dispatch::{
    AttemptFailure, CancelReason, Class, Conversation, Decision, Dispatch, Distance, Effect, Event, Failure,
    FailureReport, Fairness, Grant, LossCause, Model, NewRequest, NewWorker, Placement, RequestKey, RequestPlace,
    Settings, Spill, WorkerKey,
};

/// The seed settings: 100 in the queue, 30 s of waiting, 300 s in total.
pub(super) fn settings() -> Settings {
    Settings {
        enabled: true,
        max_queue_len: 100,
        max_queue_bytes: 1 << 20,
        queue_timeout: Duration::from_secs(30),
        absent_timeout: None,
        cold_timeout: None,
        cold_models: HashSet::new(),
        request_timeout: Duration::from_secs(300),
        placement: Placement::LeastLoad,
        spill: Spill { requests: 2, bytes: 100 },
        max_homes: 100,
        fairness: Fairness::default(),
    }
}

pub(super) fn request(key: u64, model: &str) -> NewRequest {
    NewRequest::new(RequestKey(key), Model::from(model), 100)
}

pub(super) fn secs(secs: f64) -> Duration {
    Duration::from_secs_f64(secs)
}

pub(super) struct Provider {
    pub(super) dispatch: Dispatch,
    /// The message of the last failure with a worker's report.
    pub(super) message: String,
    /// The decision of the last send.
    pub(super) decision: Option<Decision>,
    start: Instant,
    now: Duration,
}

impl Provider {
    pub(super) fn new() -> Self {
        Self::with(settings())
    }

    pub(super) fn with(settings: Settings) -> Self {
        let (dispatch, message) = (Dispatch::new(settings), String::new());
        Self { dispatch, message, decision: None, start: Instant::now(), now: Duration::ZERO }
    }

    pub(super) fn instant(&self) -> Instant {
        self.start + self.now
    }

    /// Passes an event to the core, without any ticks before.
    pub(super) fn handle(&mut self, event: Event) -> Vec<String> {
        let mut out = Vec::new();
        self.dispatch.handle(event, self.instant(), &mut out);
        if let Some(report) = out.iter().find_map(report_of) {
            self.message.clone_from(&report.message);
        }
        self.decision = out.iter().filter_map(decision_of).next_back().or(self.decision);
        out.iter().map(show).collect()
    }

    /// Lets time pass, with ticks exactly when they are due.
    pub(super) fn pass(&mut self, seconds: f64) -> Vec<String> {
        let until = self.now + secs(seconds);
        let mut lines = Vec::new();
        while let Some(due) = self.next_timeout().filter(|due| *due <= until) {
            assert!(due >= self.now, "a timeout in the past was left over");
            self.now = due;
            lines.extend(self.handle(Event::Tick));
            assert!(self.next_timeout().is_none_or(|next| next > due), "a tick left something due");
        }
        self.now = until;
        lines
    }

    /// Lets time pass without a tick, as if the timer were late.
    pub(super) fn advance_late(&mut self, seconds: f64) {
        self.now += secs(seconds);
    }

    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.dispatch.next_timeout().map(|due| due - self.start)
    }

    pub(super) fn submit(&mut self, key: u64, model: &str) -> Vec<String> {
        self.handle(Event::Submit(request(key, model)))
    }

    pub(super) fn submit_with(&mut self, key: u64, model: &str, change: impl FnOnce(&mut NewRequest)) -> Vec<String> {
        let mut new = request(key, model);
        change(&mut new);
        self.handle(Event::Submit(new))
    }

    pub(super) fn submit_pinned(&mut self, key: u64, model: &str, to: u64) -> Vec<String> {
        self.submit_with(key, model, |new| new.pin = Some(WorkerKey(to)))
    }

    pub(super) fn submit_core1(&mut self, key: u64, model: &str) -> Vec<String> {
        self.submit_with(key, model, |new| new.needs_core1 = true)
    }

    /// Adds a worker that supports only the seed messages.
    pub(super) fn join(&mut self, key: u64, models: &[&str], max_concurrent: u32) -> Vec<String> {
        self.handle(Event::WorkerJoined(worker(key, models, max_concurrent, false)))
    }

    /// Adds a `core1` worker, before its first grant.
    pub(super) fn join_core1(&mut self, key: u64, models: &[&str]) -> Vec<String> {
        self.handle(Event::WorkerJoined(worker(key, models, 8, true)))
    }

    /// Adds a `core1` worker that is linked to this relay only, with all its slots granted.
    pub(super) fn join_granted(&mut self, key: u64, models: &[&str], slots: u32) -> Vec<String> {
        let mut lines = self.join_core1(key, models);
        lines.extend(self.grant(key, slots, 0, 1));
        lines
    }

    pub(super) fn grant(&mut self, key: u64, slots: u32, others: u32, links: u32) -> Vec<String> {
        let grant = Grant { slots, others, capacity: 8, links };
        self.handle(Event::Granted { worker: WorkerKey(key), grant })
    }

    pub(super) fn load(&mut self, key: u64, load: u32) -> Vec<String> {
        self.handle(Event::LoadReported { worker: WorkerKey(key), load })
    }

    pub(super) fn models(&mut self, key: u64, models: &[&str]) -> Vec<String> {
        self.models_failing(key, models, &[])
    }

    /// The worker advertises models, some of which its backend fails.
    pub(super) fn models_failing(&mut self, key: u64, models: &[&str], failing: &[&str]) -> Vec<String> {
        let named = |names: &[&str]| names.iter().map(|name| Model::from(*name)).collect();
        let (models, failing) = (named(models), named(failing));
        self.handle(Event::ModelsUpdated { worker: WorkerKey(key), models, failing, load: None })
    }

    pub(super) fn lose(&mut self, key: u64, started: &[u64]) -> Vec<String> {
        self.handle(Event::WorkerLost {
            worker: WorkerKey(key),
            started: started.iter().copied().map(RequestKey).collect(),
            cause: LossCause::Disconnected,
        })
    }

    pub(super) fn drain(&mut self, key: u64) -> Vec<String> {
        self.handle(Event::WorkerDraining { worker: WorkerKey(key) })
    }

    pub(super) fn cancel(&mut self, key: u64) -> Vec<String> {
        let reason = CancelReason::ClientDisconnect;
        self.handle(Event::Cancel { request: RequestKey(key), reason })
    }

    /// The worker of the request completes it.
    pub(super) fn complete(&mut self, key: u64) -> Vec<String> {
        let (worker, attempt) = self.runs_at(key);
        self.handle(Event::Completed { worker, request: RequestKey(key), attempt, cached: None, usage: None })
    }

    /// The worker of the request fails it.
    pub(super) fn fail(&mut self, key: u64, failure: AttemptFailure) -> Vec<String> {
        let (worker, attempt) = self.runs_at(key);
        self.handle(Event::AttemptFailed { worker, request: RequestKey(key), attempt, failure })
    }

    /// The worker of the request sends nothing.
    pub(super) fn silent(&mut self, key: u64) -> Vec<String> {
        self.handle(Event::Silent { request: RequestKey(key) })
    }

    pub(super) fn change(&mut self, change: impl FnOnce(&mut Settings)) -> Vec<String> {
        let mut new = settings();
        change(&mut new);
        self.handle(Event::SettingsChanged(new))
    }

    fn runs_at(&self, key: u64) -> (WorkerKey, u32) {
        match self.dispatch.place_of(RequestKey(key)) {
            Some(RequestPlace::Running { worker, attempt }) => (worker, attempt),
            other => panic!("request {key} does not run: {other:?}"),
        }
    }
}

pub(super) fn worker(key: u64, models: &[&str], max_concurrent: u32, core1: bool) -> NewWorker {
    NewWorker {
        key: WorkerKey(key),
        models: models.iter().map(|name| Model::from(*name)).collect(),
        failing: Vec::new(),
        max_concurrent,
        load: 0,
        core1,
        multiplexer: None,
        instance: None,
        distance: Distance::Zone,
    }
}

pub(super) fn report(message: &str) -> Arc<FailureReport> {
    Arc::new(FailureReport { code: String::new(), message: message.to_owned() })
}

fn report_of(effect: &Effect) -> Option<&FailureReport> {
    use Failure::{Fatal, LoadFailed, ModelFailed};
    let Effect::Fail { failure: LoadFailed { report, .. } | ModelFailed { report, .. } | Fatal(report), .. } = effect
    else {
        return None;
    };
    Some(report)
}

fn decision_of(effect: &Effect) -> Option<Decision> {
    if let Effect::Send { decision, .. } = effect { Some(*decision) } else { None }
}

/// Formats effects or failures without the reports of workers, which the core does not read.
pub(super) fn text(of: &impl Debug) -> String {
    format!("{of:?}").replace(", report: …", "").replace("(…)", "")
}

/// Formats one effect as one line.
pub(super) fn show(effect: &Effect) -> String {
    match effect {
        Effect::Send { worker, request, attempt, .. } => {
            format!("send r{} to w{} #{attempt}", request.0, worker.0)
        }
        Effect::CancelSent { worker, request, attempt, reason } => {
            format!("cancel r{} at w{} #{attempt}: {reason:?}", request.0, worker.0)
        }
        Effect::Fail { request, failure, .. } => format!("fail r{}: {}", request.0, text(failure)),
        Effect::Cancelled { request, reason, stage } => {
            format!("cancelled r{} {stage:?}: {reason:?}", request.0)
        }
        Effect::Severed { request, worker } => format!("severed r{} of w{}", request.0, worker.0),
        Effect::Finished { request, worker, attempt } => {
            format!("finished r{} at w{} #{attempt}", request.0, worker.0)
        }
        Effect::Requeued { request, reason, attempt } => {
            format!("requeued r{} #{attempt}: {reason:?}", request.0)
        }
        Effect::Demand { worker, demand } => {
            let models: Vec<_> = demand
                .iter()
                .map(|entry| {
                    let (oldest, sum) = (entry.oldest.as_millis(), entry.sum.as_millis());
                    let class =
                        if entry.class == Class::Normal { String::new() } else { format!(" {:?}", entry.class) };
                    let rank = if entry.rank == 0 { String::new() } else { format!(" #{}", entry.rank) };
                    format!(" {} {} {oldest} {sum}{class}{rank}", entry.model, entry.waiting)
                })
                .collect();
            format!("demand w{}:{}", worker.0, models.join(","))
        }
        Effect::DrainedIdle { worker } => format!("idle w{}", worker.0),
    }
}

/// Submits a turn of a conversation for model `m`, and returns its worker; 0 if it waits.
pub(super) fn turn(p: &mut Provider, key: u64, conversation: u64, bytes: u64) -> u64 {
    p.submit_with(key, "m", |new| (new.conversation, new.bytes) = (Some(Conversation(conversation)), bytes));
    runs_at(p, key)
}

/// Returns the worker of a request; 0 for one that waits or has ended.
pub(super) fn runs_at(p: &Provider, key: u64) -> u64 {
    match p.dispatch.place_of(RequestKey(key)) {
        Some(RequestPlace::Running { worker, .. }) => worker.0,
        Some(RequestPlace::Queued) | None => 0,
    }
}
