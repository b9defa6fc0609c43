//! A multiplexer of slots with fake drivers, one relay that supports slots and one without capabilities.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use modelrelay_protocol::message::{
    Command, CommandResult, Demand, Grant, ModelDemand, RequestClass, SlotState, Slots,
};
use modelrelay_protocol::secret::Secret;
use prometheus::Registry;
use tokio::sync::watch;
use url::Url;

use crate::Model;
use crate::actor::history::Report;
use crate::actor::{Lease, PendingLease, now};
use crate::board::{Peer, RelaySink};
use crate::config::{ModelConfig, SlotConfig};
use crate::driver::key::Key;
use crate::driver::memory::{Blind, SlotMemory};
use crate::driver::slot::SlotDriver;
use crate::driver::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::error::{LoadFailure, SlotError};
use crate::estimate::LoadKind;
use crate::event::{Left, RelayKey};
use crate::metrics::MultiplexerMetrics;
use crate::slots::Multiplexer;

pub(super) const LOAD: Duration = Duration::from_secs(2);
pub(super) const EVICT: Duration = Duration::from_secs(1);
/// The API key of the slot's backends.
pub(super) const KEY: &str = "shown-to-backends";

pub(super) fn secs(secs: f64) -> Duration {
    Duration::from_secs_f64(secs)
}

pub(super) async fn pass(seconds: f64) {
    tokio::time::sleep(secs(seconds)).await;
}

/// The behaviour of a call.
#[derive(Clone, Debug)]
pub(super) enum Play {
    Done(Duration),
    Fail(Duration),
    Never,
    /// Never, and takes real time to be dropped.
    Stuck,
    Panic,
}

/// A backend and its driver. By default, a load takes 2 s and an eviction 1 s.
#[derive(Debug)]
pub(super) struct Fake {
    models: Vec<Model>,
    plays: Mutex<HashMap<String, VecDeque<Play>>>,
    log: Mutex<Vec<String>>,
    serving: Mutex<Option<Model>>,
    dead: watch::Sender<HashSet<Model>>,
    alone: Mutex<bool>,
    pub(super) owns_backends: bool,
}

/// Logs that a call was dropped, unless it ended.
struct Running<'a>(&'a Fake, Option<String>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        *self.0.alone.lock().unwrap() = true;
        if let Some(name) = self.1.take() {
            self.0.log.lock().unwrap().push(format!("dropped {name}"));
        }
    }
}

struct SlowDrop;

impl Drop for SlowDrop {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Fake {
    /// Sets the behaviour of the next call of this name.
    pub(super) fn play(&self, call: &str, play: Play) {
        self.plays.lock().unwrap().entry(call.to_owned()).or_default().push_back(play);
    }

    /// Returns the calls since the last invocation.
    pub(super) fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    pub(super) fn serve(&self, model: Option<&str>) {
        *self.serving.lock().unwrap() = model.map(Model::from);
    }

    /// Makes the backend's process end by itself.
    pub(super) fn die(&self, model: &str) {
        self.serve(None);
        self.dead.send_modify(|dead| {
            dead.insert(model.into());
        });
    }

    async fn call(&self, verb: &str, model: &Model, usual: Play) -> Result<(), String> {
        let name = format!("{verb} {model}");
        assert!(std::mem::replace(&mut *self.alone.lock().unwrap(), false), "{name}: the call before is still there");
        self.log.lock().unwrap().push(name.clone());
        let mut running = Running(self, Some(name.clone()));
        let play = self.plays.lock().unwrap().get_mut(&name).and_then(VecDeque::pop_front).unwrap_or(usual);
        let result = match play {
            Play::Done(takes) => {
                tokio::time::sleep(takes).await;
                Ok(())
            }
            Play::Fail(takes) => {
                tokio::time::sleep(takes).await;
                Err(format!("{name} failed"))
            }
            Play::Never => std::future::pending().await,
            Play::Stuck => {
                let _slow = SlowDrop;
                std::future::pending().await
            }
            Play::Panic => panic!("{name}: as the test wants it"),
        };
        running.1 = None;
        result
    }
}

impl Driver for Fake {
    fn capabilities(&self) -> Capabilities {
        let owns_backends = self.owns_backends;
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        self.models.clone()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        let panics = self.plays.lock().unwrap().contains_key("url");
        assert!(!panics, "url: as the test wants it");
        let serving = self.serving.lock().unwrap().as_ref() == Some(model);
        serving.then(|| format!("http://127.0.0.1:1/{model}").parse().unwrap())
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let play = self.plays.lock().unwrap().get_mut("probe").and_then(VecDeque::pop_front);
            match play {
                Some(Play::Panic) => panic!("probe: as the test wants it"),
                Some(Play::Never | Play::Stuck) => std::future::pending().await,
                Some(Play::Done(_) | Play::Fail(_)) | None => {}
            }
            let ready = self.serving.lock().unwrap().as_ref() == Some(model);
            Ok(Probed { ready, gone: !ready, ..Probed::default() })
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async {
            self.call("load", model, Play::Done(LOAD)).await.map_err(LoadFailure::Exited)?;
            self.dead.send_modify(|dead| {
                dead.remove(model);
            });
            self.serve(Some(model));
            Ok(())
        })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async {
            self.call("evict", model, Play::Done(EVICT)).await.map_err(DriverError::CannotStart)?;
            self.serve(None);
            Ok(Left::Nothing)
        })
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            self.call("force", model, Play::Done(Duration::ZERO)).await.map_err(DriverError::CannotStart)?;
            self.serve(None);
            Ok(())
        })
    }

    /// In parallel: the slot's last calls do not wait for each other.
    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            *self.alone.lock().unwrap() = true;
            self.call("stop", model, Play::Done(Duration::ZERO)).await.map_err(DriverError::CannotStart)
        })
    }

    fn owns(&self, model: &Model) -> bool {
        self.owns_backends && !model.starts_with("foreign")
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(async {
            let _ = self.dead.subscribe().wait_for(|dead| dead.contains(model)).await;
        })
    }
}

/// The messages that a link received.
#[derive(Debug, Default)]
pub(super) struct Sink {
    grants: Mutex<Vec<Grant>>,
    slots: Mutex<Vec<Slots>>,
    results: Mutex<Vec<CommandResult>>,
    models: Mutex<Vec<Vec<Model>>>,
}

impl RelaySink for Sink {
    fn grant(&self, grant: Grant) {
        self.grants.lock().unwrap().push(grant);
    }

    fn slots(&self, slots: Slots) {
        self.slots.lock().unwrap().push(slots);
    }

    fn models(&self, names: &[Model]) {
        self.models.lock().unwrap().push(names.to_vec());
    }

    fn command_result(&self, result: CommandResult) {
        self.results.lock().unwrap().push(result);
    }
}

impl Sink {
    pub(super) fn announced(&self) -> Vec<Vec<Model>> {
        self.models.lock().unwrap().clone()
    }

    pub(super) fn grant_now(&self) -> Grant {
        self.grants.lock().unwrap().last().cloned().expect("a grant")
    }

    /// Returns the newest grant's slots for a model; `None`: its gate is closed.
    pub(super) fn granted(&self, model: &str) -> Option<u32> {
        let models = self.grant_now().models.expect("a relay that knows slots");
        models.iter().find(|grant| grant.id == model).map(|grant| grant.slots)
    }

    pub(super) fn states(&self) -> Vec<SlotState> {
        self.slots.lock().unwrap().iter().map(|slots| slots.slots[0].state).collect()
    }

    pub(super) fn slots_now(&self) -> Slots {
        self.slots.lock().unwrap().last().cloned().expect("slots")
    }

    pub(super) fn results(&self) -> Vec<CommandResult> {
        std::mem::take(&mut *self.results.lock().unwrap())
    }
}

pub(super) struct Stage {
    pub(super) mux: Arc<Multiplexer>,
    pub(super) drivers: Vec<Arc<Fake>>,
    pub(super) registry: Registry,
    /// The relay that supports slots.
    pub(super) new: RelayKey,
    pub(super) told: Arc<Sink>,
    /// The relay without capabilities: its requests wait here.
    pub(super) old: RelayKey,
}

/// A slot for these models, each with four requests at once.
pub(super) fn config(models: &[&str]) -> SlotConfig {
    let mut config = SlotConfig::new("gpu0", models.iter().map(|id| ModelConfig::new(*id, 4)).collect());
    config.knobs.drain_timeout = Duration::from_secs(30);
    config
}

pub(super) fn fake(config: &SlotConfig, owns_backends: bool) -> Arc<Fake> {
    Arc::new(Fake {
        models: config.models.iter().map(|model| Model::clone(&model.id)).collect(),
        plays: Mutex::default(),
        log: Mutex::default(),
        serving: Mutex::default(),
        dead: watch::Sender::default(),
        alone: Mutex::new(true),
        owns_backends,
    })
}

pub(super) fn slot_driver(driver: &Arc<Fake>) -> Arc<SlotDriver> {
    let slot = SlotDriver::new(Arc::<Fake>::clone(driver), SlotMemory::new(Arc::new(Blind)));
    Arc::new(slot.with_key(Key::new(Some(Secret::new(KEY)))))
}

impl Stage {
    pub(super) async fn new(models: &[&str]) -> Self {
        Self::with(vec![config(models)], false).await
    }

    pub(super) async fn with(configs: Vec<SlotConfig>, owns_backends: bool) -> Self {
        let drivers: Vec<_> = configs.iter().map(|config| fake(config, owns_backends)).collect();
        Self::start(configs, drivers).await
    }

    pub(super) async fn start(configs: Vec<SlotConfig>, drivers: Vec<Arc<Fake>>) -> Self {
        let slots = configs.into_iter().zip(drivers.iter().map(slot_driver)).collect();
        let registry = Registry::new();
        let mux = Arc::new(Multiplexer::start_unjittered(slots, Arc::new(MultiplexerMetrics::new(&registry))));
        let told = Arc::new(Sink::default());
        let new = mux.join(Peer::Slots1, Arc::<Sink>::clone(&told));
        let old = mux.join(Peer::Old, Arc::new(Sink::default()));
        pass(0.01).await;
        Self { mux, drivers, registry, new, told, old }
    }

    /// Creates a stage with this model resident and idle for ten seconds.
    pub(super) async fn serving(model: &str, models: &[&str]) -> Self {
        let stage = Self::new(models).await;
        drop(stage.send_request(model).await.unwrap());
        pass(10.0).await;
        stage.driver().log();
        stage
    }

    pub(super) fn driver(&self) -> &Fake {
        &self.drivers[0]
    }

    /// Sends a request of the relay without capabilities.
    pub(super) fn send_request(&self, model: &str) -> PendingLease {
        self.mux.arrive(self.old, (model, RequestClass::Normal), now())
    }

    /// Sends a request of the relay that supports slots: it gets its lease at once, or never.
    pub(super) async fn send(&self, model: &str) -> Result<Lease, SlotError> {
        self.mux.arrive(self.new, (model, RequestClass::Normal), now()).await
    }

    pub(super) fn demand(&self, model: &str, waiting: u32) {
        self.demand_of(self.new, model, waiting);
    }

    pub(super) fn demand_of(&self, relay: RelayKey, model: &str, waiting: u32) {
        let models =
            vec![ModelDemand { id: model.to_owned(), waiting, oldest_ms: 0, sum_ms: 0, ..ModelDemand::default() }];
        self.mux.handle_demand(relay, &Demand { models });
    }

    pub(super) fn command(&self, op_id: &str, command: &str, model: &str) {
        let command = Command {
            op_id: op_id.to_owned(),
            command: command.to_owned(),
            model: model.to_owned(),
            slot: None,
            mode: None,
        };
        self.mux.handle_command(self.new, &command);
    }

    pub(super) async fn report(&self) -> Report {
        self.mux.reports().await.swap_remove(0)
    }

    pub(super) async fn state(&self) -> SlotState {
        self.report().await.slot.state
    }

    pub(super) async fn resident(&self) -> Option<String> {
        self.report().await.slot.resident
    }

    /// Returns the numbers of running and of held requests.
    pub(super) async fn counts(&self) -> (usize, usize) {
        let requests = self.report().await.requests;
        requests.iter().fold((0, 0), |sum, (_, of)| (sum.0 + of.leases, sum.1 + of.held))
    }
}
