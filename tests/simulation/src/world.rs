//! One simulation: the hosts, the faults, and the end.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use modelrelay_relay::app;
use modelrelay_relay::settings::cli::Args as RelayArgs;
use modelrelay_relay::settings::config::Config;
use modelrelay_relay::system::shutdown::{ShutdownSignal, StopSignal};
use modelrelay_relay::telemetry::journal::Journal;
use modelrelay_worker::app::cli::{Command, parse};
use modelrelay_worker::app::run;
use modelrelay_worker::settings::Settings;
use modelrelay_worker::worker::Worker;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use turmoil::Sim;

use crate::backend::{Backend, FIRST_PORT};
use crate::ledger::{Entry, Event, Ledger};
use crate::log::{self, Line};
use crate::plan::{Fault, FaultKind, Plan, RequestPlan, SlotPlan, WorkerPlan};
use crate::{check, client, determinism, keys, old_relay, old_worker, secrets};

/// The time after the last fault within which every model of every relay must be served again.
const HEALING: Duration = Duration::from_secs(60);

/// A simulation that is not over by then never ends.
const LIMIT: Duration = Duration::from_secs(900);

/// The result of a seed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// Violations; empty if there are none.
    pub wrong: Vec<String>,
    /// The number of requests by outcome.
    pub outcomes: BTreeMap<String, usize>,
    /// The kinds of faults that occurred.
    pub faults: Vec<String>,
    /// Simulated time.
    pub elapsed: Duration,
    /// Hash of all events and log lines: the same for the same seed.
    pub fingerprint: u64,
    /// Human-readable events and log lines.
    #[serde(skip)]
    pub story: String,
    /// The steps of the grants protocol, if they are collected.
    #[serde(skip)]
    pub steps: Vec<String>,
}

/// Runs a seed to its end, on its own thread. The first seed of a process behaves the same in every process; a later
/// one does not, because tokio numbers tasks from the start of the process.
pub fn run(seed: u64) -> Report {
    // Created outside: inside, its name would depend on the seed, like that of another process with this seed, and each
    // attempt with another name uses a random number.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let ran = determinism::enter(seed, move || World::run(Plan::new(seed), &path));
    ran.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
        Report::of_failure(seed, format!("the simulation failed: {message}"))
    })
}

impl Report {
    /// Creates the report of a seed that failed without further information.
    pub fn of_failure(seed: u64, why: String) -> Self {
        Self {
            seed,
            wrong: vec![why],
            outcomes: BTreeMap::new(),
            faults: Vec::new(),
            elapsed: Duration::ZERO,
            fingerprint: 0,
            story: String::new(),
            steps: Vec::new(),
        }
    }
}

thread_local!(static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) });

/// Makes panics of tasks, which tokio catches, failures of the program: 5, nothing that a peer does stops a process.
pub fn catch_panics() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let what = info.payload_as_str().unwrap_or("panic").to_owned();
        PANICS.with_borrow_mut(|panics| panics.push(format!("panic at {place}: {what}")));
    }));
}

struct World {
    plan: Rc<Plan>,
    ledger: Ledger,
    hosts: BTreeMap<String, Host>,
    backends: Vec<watch::Sender<bool>>,
    probed: Rc<Cell<usize>>,
}

/// A process that can be ended.
#[derive(Clone)]
struct Host {
    /// SIGTERM, a new channel for each start.
    stop: Rc<RefCell<watch::Sender<Option<StopSignal>>>>,
    has_ended: Rc<Cell<bool>>,
    is_gone: Rc<Cell<bool>>,
    /// The number of faults that keep it from running.
    held_down: Rc<Cell<usize>>,
}

impl World {
    fn run(plan: Plan, folder: &Path) -> Report {
        log::begin();
        let mut sim = turmoil::Builder::new()
            .rng_seed(plan.seed)
            .tick_duration(plan.tick)
            .max_message_latency(plan.latency)
            .simulation_duration(LIMIT)
            .tcp_capacity(1024)
            .build();
        let mut world = Self {
            plan: Rc::new(plan),
            ledger: Ledger::default(),
            hosts: BTreeMap::new(),
            backends: Vec::new(),
            probed: Rc::default(),
        };
        world.start_backends(&mut sim);
        for relay in 0..world.plan.relays {
            let path = folder.join(format!("keys-{relay}.json"));
            if !world.plan.keys.is_empty() {
                fs::write(&path, keys::file(&world.plan.keys)).expect("a folder that can be written");
            }
            world.start_relay(&mut sim, relay, path.display().to_string());
        }
        for worker in 0..world.plan.workers.len() {
            world.start_worker(&mut sim, worker, folder.join(format!("worker-{worker}.yaml")));
        }
        world.start_clients(&mut sim);
        for worker in 0..world.plan.workers.len() {
            // They are on one machine: packets arrive in the order in which they were sent.
            sim.set_link_latency(format!("worker-{worker}"), "backends", Duration::ZERO);
        }
        world.drive(sim)
    }

    fn start_relay(&mut self, sim: &mut Sim<'_>, number: usize, keys: String) {
        let name = format!("relay-{number}");
        let host = self.add_host(&name);
        let (plan, ledger) = (Rc::clone(&self.plan), self.ledger.clone());
        sim.host(name, move || {
            let (plan, keys, host, ledger) = (Rc::clone(&plan), keys.clone(), host.clone(), ledger.clone());
            async move {
                if plan.is_old_relay(number) {
                    let stop = host.stop.borrow().subscribe();
                    old_relay::serve(plan, ledger, stop).await?;
                    return host.end().await;
                }
                let args = RelayArgs::load_from(relay_arguments(&plan, &keys))?;
                let config = Config::from_args(&args)?;
                let signal = ShutdownSignal::sent_by(host.stop.borrow().subscribe());
                app::run(args, config, signal, Journal::default()).await?;
                host.end().await
            }
        });
    }

    fn start_worker(&mut self, sim: &mut Sim<'_>, number: usize, config: PathBuf) {
        let name = format!("worker-{number}");
        let host = self.add_host(&name);
        let plan = Rc::clone(&self.plan);
        if let Some(slot) = &plan.workers[number].slot {
            let yaml = worker_yaml(&plan.workers[number], slot, number);
            fs::write(&config, yaml).expect("a folder that can be written");
        }
        sim.host(name, move || {
            let (plan, host, config) = (Rc::clone(&plan), host.clone(), config.clone());
            async move {
                if plan.workers[number].is_old {
                    let stop = host.stop.borrow().subscribe();
                    old_worker::work(plan, number, stop).await;
                    return host.end().await;
                }
                let Ok(Command::Run(args)) = parse(worker_arguments(&plan, number, &config)) else {
                    return Err("the worker's arguments".into());
                };
                let worker = Arc::new(Worker::new(Settings::load(&args)?)?);
                let mut stop = host.stop.borrow().subscribe();
                let stop = async move {
                    let _ = stop.wait_for(Option::is_some).await;
                    "SIGTERM"
                };
                run::work(&worker, stop).await;
                host.end().await
            }
        });
    }

    fn add_host(&mut self, name: &str) -> Host {
        let host = Host {
            stop: Rc::new(RefCell::new(watch::channel(None).0)),
            has_ended: Rc::default(),
            is_gone: Rc::default(),
            held_down: Rc::default(),
        };
        self.hosts.insert(name.to_owned(), host.clone());
        self.ledger.note(Event::Started(name.to_owned()));
        host
    }

    fn start_backends(&mut self, sim: &mut Sim<'_>) {
        let mut backends = Vec::new();
        for worker in 0..self.plan.workers.len() {
            let (sender, is_up) = watch::channel(true);
            self.backends.push(sender);
            backends.push(Backend::new(worker, Rc::clone(&self.plan), self.ledger.clone(), is_up));
        }
        sim.host("backends", move || {
            for backend in backends.clone() {
                tokio::task::spawn_local(async move { backend.serve().await });
            }
            std::future::pending()
        });
    }

    /// Starts all clients, and those that check at the end that everything works again.
    fn start_clients(&self, sim: &mut Sim<'_>) {
        let (plan, ledger, probed) = (Rc::clone(&self.plan), self.ledger.clone(), Rc::clone(&self.probed));
        sim.client("clients", async move {
            let mut clients = Vec::new();
            for requests in by_client(&plan.requests) {
                clients.push(tokio::task::spawn_local(client::send_in_turn(requests, ledger.clone())));
            }
            for client in clients {
                client.await?;
            }
            let healed = plan.healed_at().saturating_sub(turmoil::elapsed());
            tokio::time::sleep(healed).await;
            for probe in &plan.probes {
                let (relay, model) = (probe.relay, probe.model);
                if let Err(last) = client::probe(probe, HEALING, &ledger).await {
                    let what = format!("relay-{relay} did not serve {model} again in {HEALING:?}: {last:?}");
                    ledger.note(Event::Wrong(what));
                }
                probed.set(probed.get() + 1);
            }
            Ok(())
        });
    }

    fn drive(self, mut sim: Sim<'_>) -> Report {
        let mut begun = 0;
        let mut ending: Vec<(Duration, Fault)> = Vec::new();
        let result = loop {
            let now = sim.elapsed();
            determinism::advance_to(now);
            while let Some(fault) = self.plan.faults.get(begun).filter(|fault| fault.at <= now) {
                self.begin(&mut sim, fault);
                ending.push((fault.at + fault.lasts, fault.clone()));
                begun += 1;
            }
            while let Some(place) = ending.iter().position(|(end, fault)| *end <= now && self.may_end(fault)) {
                let (_, fault) = ending.remove(place);
                self.end(&mut sim, &fault);
            }
            self.bury(&mut sim);
            match sim.step() {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error.to_string()),
            }
        };
        let elapsed = sim.elapsed();
        determinism::advance_to(elapsed);
        drop(sim);
        self.report(elapsed, result.err())
    }

    /// Closes the connections of a process that has ended by itself.
    fn bury(&self, sim: &mut Sim<'_>) {
        for (name, host) in &self.hosts {
            if host.has_ended.get() && !host.is_gone.get() {
                self.kill(sim, name);
            }
        }
    }

    fn kill(&self, sim: &mut Sim<'_>, name: &str) {
        if !self.hosts[name].is_gone.replace(true) {
            self.ledger.note(Event::Gone(name.to_owned()));
            log::note_step(name, "crashes");
            sim.crash(name);
        }
    }

    fn start_again(&self, sim: &mut Sim<'_>, name: &str) {
        let host = &self.hosts[name];
        host.held_down.update(|faults| faults - 1);
        if host.held_down.get() == 0 && host.is_gone.replace(false) {
            host.has_ended.set(false);
            *host.stop.borrow_mut() = watch::channel(None).0;
            self.ledger.note(Event::Started(name.to_owned()));
            sim.bounce(name);
        }
    }

    fn begin(&self, sim: &mut Sim<'_>, fault: &Fault) {
        self.ledger.note(Event::Fault(format!("{:?} for {:?}", fault.kind, fault.lasts)));
        if let FaultKind::Kill(host) | FaultKind::PowerLoss(host) | FaultKind::Terminate(host) = &fault.kind {
            self.hosts[host].held_down.update(|faults| faults + 1);
        }
        match &fault.kind {
            FaultKind::Kill(host) => self.kill(sim, host),
            FaultKind::PowerLoss(host) => {
                self.for_peers(host, |peer| sim.partition(host.as_str(), peer));
                self.kill(sim, host);
            }
            FaultKind::Terminate(host) => {
                self.hosts[host].stop.borrow().send_replace(Some(StopSignal::Terminate));
            }
            FaultKind::Partition(a, b) => sim.partition(a.as_str(), b.as_str()),
            FaultKind::Deaf(from, to) => sim.partition_oneway(from.as_str(), to.as_str()),
            FaultKind::Hold(a, b) => sim.hold(a.as_str(), b.as_str()),
            FaultKind::Slow(a, b, latency) => sim.set_link_max_message_latency(a.as_str(), b.as_str(), *latency),
            FaultKind::BackendDown(worker) => drop(self.backends[*worker].send_replace(false)),
            FaultKind::ClockJump(by) => determinism::jump_wall_clock(*by),
        }
    }

    fn may_end(&self, fault: &Fault) -> bool {
        match &fault.kind {
            FaultKind::Terminate(host) => self.hosts[host].is_gone.get(),
            _ => true,
        }
    }

    fn end(&self, sim: &mut Sim<'_>, fault: &Fault) {
        self.ledger.note(Event::Fault(format!("over: {:?}", fault.kind)));
        match &fault.kind {
            FaultKind::Kill(host) | FaultKind::Terminate(host) => self.start_again(sim, host),
            FaultKind::PowerLoss(host) => {
                self.for_peers(host, |peer| sim.repair(host.as_str(), peer));
                self.start_again(sim, host);
            }
            FaultKind::Partition(a, b) => sim.repair(a.as_str(), b.as_str()),
            FaultKind::Deaf(from, to) => sim.repair_oneway(from.as_str(), to.as_str()),
            FaultKind::Hold(a, b) => sim.release(a.as_str(), b.as_str()),
            FaultKind::Slow(a, b, _) => sim.set_link_max_message_latency(a.as_str(), b.as_str(), self.plan.latency),
            FaultKind::BackendDown(worker) => drop(self.backends[*worker].send_replace(true)),
            FaultKind::ClockJump(_) => {}
        }
    }

    /// A worker's backend is on its machine and loses power with it, but this host serves others too.
    fn for_peers(&self, host: &str, mut act: impl FnMut(&str)) {
        for peer in self.hosts.keys().map(String::as_str).chain(["clients"]).filter(|peer| *peer != host) {
            act(peer);
        }
    }

    fn report(self, elapsed: Duration, error: Option<String>) -> Report {
        let (entries, lines) = (self.ledger.entries(), log::take());
        let mut wrong = check::check(&self.plan, &entries, &lines);
        wrong.extend(PANICS.take());
        wrong.extend(error);
        if self.probed.get() != self.plan.probes.len() && wrong.is_empty() {
            wrong.push("the end was not reached".to_owned());
        }
        let mut hasher = DefaultHasher::new();
        let story = story(&entries, &lines);
        story.hash(&mut hasher);
        Report {
            seed: self.plan.seed,
            wrong,
            outcomes: check::outcomes(&entries),
            faults: self.plan.faults.iter().map(|fault| fault.kind.name().to_owned()).collect(),
            elapsed,
            fingerprint: hasher.finish(),
            story,
            steps: log::take_steps(),
        }
    }
}

impl Host {
    /// The process has ended by itself: its connections are closed at the next step.
    async fn end(&self) -> turmoil::Result {
        self.has_ended.set(true);
        std::future::pending().await
    }
}

/// Returns the requests of each client, in the order of their first requests.
fn by_client(requests: &[RequestPlan]) -> Vec<Vec<RequestPlan>> {
    let mut clients: Vec<Vec<RequestPlan>> = Vec::new();
    for request in requests {
        let known = clients.iter_mut().find(|known| request.client.is_some() && known[0].client == request.client);
        match known {
            Some(known) => known.push(request.clone()),
            None => clients.push(vec![request.clone()]),
        }
    }
    clients
}

fn relay_arguments(plan: &Plan, keys: &str) -> Vec<String> {
    let settings = &plan.settings;
    let mut arguments = vec!["modelrelay-relay".to_owned()];
    let mut set = |flag: &str, value: String| arguments.extend([format!("--{flag}"), value]);
    set("listen-addr", format!("0.0.0.0:{}", client::RELAY_PORT));
    set("worker-secret", secrets::WORKER_SECRET.to_owned());
    set("admin-token", secrets::ADMIN_TOKEN.to_owned());
    set("api-keys-file", keys.to_owned());
    // A thread of its own would write it, and a simulation has one thread.
    set("usage-file", String::new());
    set("require-api-keys", (!plan.keys.is_empty()).to_string());
    set("heartbeat-interval", "1".to_owned());
    set("max-queue-len", settings.queue_len.to_string());
    set("queue-timeout-secs", settings.queue_timeout.to_string());
    set("cold-timeout-secs", settings.cold_timeout.to_string());
    set("request-timeout-secs", settings.request_timeout.to_string());
    set("drain-timeout-secs", settings.drain_timeout.to_string());
    set("stream-keepalive-secs", settings.keepalive.to_string());
    set("relay-count", plan.relays.to_string());
    if settings.places_by_cache {
        set("placement", "cache".to_owned());
    }
    arguments
}

fn worker_arguments(plan: &Plan, number: usize, config: &Path) -> Vec<String> {
    let worker = &plan.workers[number];
    let mut arguments = vec!["modelrelay-worker".to_owned()];
    let mut set = |flag: &str, value: String| arguments.extend([format!("--{flag}"), value]);
    set("proxy-url", format!("dns+http://relay:{}", client::RELAY_PORT));
    set("worker-secret", secrets::WORKER_SECRET.to_owned());
    set("worker-name", format!("worker-{number}"));
    set("shutdown-timeout-secs", plan.settings.drain_timeout.to_string());
    if worker.slot.is_some() {
        set("config", config.display().to_string());
    } else {
        set("backend-url", backend_url(number));
        set("models", worker.models.join(","));
        set("max-concurrency", worker.capacity.to_string());
    }
    arguments
}

/// Returns the `worker.yaml` of a worker with a slot.
fn worker_yaml(worker: &WorkerPlan, slot: &SlotPlan, number: usize) -> String {
    let capacity = worker.capacity;
    let models = worker.models.iter().map(|id| format!("    - {{id: {id}, maxConcurrency: {capacity}}}\n"));
    let (drain, url) = (slot.drain_timeout, backend_url(number));
    let head = format!("multiplexer:\n  drainTimeout: {drain}s\n  minResidency: 1s\n  slots:\n  - id: gpu0\n");
    let slot = format!("    driver: llama-server\n    url: {url}\n    models:\n");
    head + &slot + &models.collect::<String>()
}

fn backend_url(number: usize) -> String {
    format!("http://backends:{}", FIRST_PORT + number as u16)
}

fn story(entries: &[Entry], lines: &[Line]) -> String {
    let mut all: Vec<(Duration, String)> =
        entries.iter().map(|entry| (entry.at, format!("* {:?}", entry.event))).collect();
    all.extend(lines.iter().map(|line| (line.at, format!("{} {}", line.host, line.text))));
    all.sort_by_key(|(at, _)| *at);
    all.iter().map(|(at, text)| format!("{:9.3} {text}\n", at.as_secs_f64())).collect()
}
