//! Random histories of a whole slot: its task, its driver's calls, and a GPU with a meter. The driver fails, hangs,
//! dies, is late, and lies: it reports that a model is unloaded whose memory is still in use. The tests ignore its
//! reports; the GPU knows the true state, and records whenever something is loaded that does not fit next to the
//! present models.
//!
//! Histories of the machine alone are far more numerous and check more, see `machine::tests::history`. This file tests
//! what they cannot: that nothing is loaded into memory that was not freed (I1), that the task responds at once
//! whatever its driver does (I6), that relays never see a resident that was not ready (I9), and that each request ends
//! once and nothing leaks wherever tasks are dropped (I4, I5).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use modelrelay_protocol::message::{Command, RequestClass, SlotState};
use prometheus::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use url::Url;

use super::harness::{Sink, pass};
use crate::Model;
use crate::actor::{PendingLease, now};
use crate::board::Peer;
use crate::config::{ModelConfig, SlotConfig};
use crate::driver::memory::{Meter, SlotMemory};
use crate::driver::roster::Roster;
use crate::driver::served::Served;
use crate::driver::settings::{DriverSettings, SlotSettings};
use crate::driver::slot::SlotDriver;
use crate::driver::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::error::{LoadFailure, SlotError};
use crate::estimate::LoadKind;
use crate::event::{Left, RelayKey};
use crate::metrics::MultiplexerMetrics;
use crate::slots::Multiplexer;

const MODELS: [&str; 3] = ["a", "b", "c"];
const TOTAL: u64 = 100;
/// Two models do not fit.
const SIZE: u64 = 60;
const OPS: u64 = 200;
const MOST_HELD: usize = 6;

/// splitmix64
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }

    fn model(&mut self) -> &'static str {
        MODELS[self.below(3) as usize]
    }

    fn wait(&mut self, most_millis: u64) -> Duration {
        Duration::from_millis(self.below(most_millis))
    }
}

/// A GPU and the backends on it.
#[derive(Debug, Default)]
struct Gpu {
    taken: Mutex<HashMap<Model, u64>>,
    /// The models that were loaded completely and have not gone since.
    serving: Mutex<HashSet<Model>>,
    /// The violations that were found. A panic would be attributed to the driver.
    wrong: Mutex<Vec<String>>,
}

impl Gpu {
    fn take(&self, model: &Model, bytes: u64) {
        let mut taken = self.taken.lock().unwrap();
        taken.insert(Model::clone(model), bytes);
        if taken.values().sum::<u64>() > TOTAL {
            self.wrong.lock().unwrap().push(format!("I1: {model} was loaded beside others: {taken:?}"));
        }
    }

    fn give_back(&self, model: &Model) {
        self.taken.lock().unwrap().remove(model);
    }

    fn holds(&self, model: &Model) -> bool {
        self.taken.lock().unwrap().contains_key(model)
    }

    fn serves(&self, model: &str) -> bool {
        self.serving.lock().unwrap().contains(model)
    }
}

impl Meter for Gpu {
    fn free(&self) -> Option<u64> {
        Some(TOTAL.saturating_sub(self.taken.lock().unwrap().values().sum()))
    }

    fn host_free(&self) -> Option<u64> {
        None
    }
}

/// A driver that carries out most calls.
#[derive(Debug)]
struct Liar {
    gpu: Arc<Gpu>,
    dice: Mutex<Dice>,
    is_honest: AtomicBool,
    dead: watch::Sender<HashSet<Model>>,
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    Good,
    /// Success, but the memory is freed seconds later.
    Late,
    /// It reports success and has done nothing.
    Lie,
    /// It reports failure and has done half of it.
    Fail,
    Hang,
}

impl Liar {
    /// `honesty`: the percentage of calls that go well.
    fn mood(&self, honesty: u64) -> (Mood, Duration) {
        let mut dice = self.dice.lock().unwrap();
        let wait = dice.wait(3_000);
        if self.is_honest.load(Ordering::Relaxed) || dice.below(100) < honesty {
            return (Mood::Good, wait);
        }
        ([Mood::Late, Mood::Lie, Mood::Fail, Mood::Hang][dice.below(4) as usize], wait)
    }

    fn free_later(&self, model: &Model, after: Duration) {
        let (gpu, model) = (Arc::clone(&self.gpu), Model::clone(model));
        drop(tokio::spawn(async move {
            tokio::time::sleep(after).await;
            gpu.give_back(&model);
        }));
    }

    /// A backend that is unloaded serves no requests from then on.
    async fn go(&self, model: &Model, honesty: u64) -> Result<(), DriverError> {
        let (mood, wait) = self.mood(honesty);
        tokio::time::sleep(wait).await;
        self.gpu.serving.lock().unwrap().remove(model);
        match mood {
            Mood::Good => self.gpu.give_back(model),
            Mood::Late => self.free_later(model, 2 * wait),
            Mood::Lie => {}
            Mood::Fail => return Err(DriverError::NotOurs("it will not".to_owned())),
            Mood::Hang => std::future::pending().await,
        }
        Ok(())
    }

    /// The process ends by itself.
    fn die(&self, model: &Model, is_seen: bool, after: Duration) {
        if !self.gpu.serving.lock().unwrap().remove(model) {
            return;
        }
        self.free_later(model, after);
        if is_seen {
            self.dead.send_modify(|dead| {
                dead.insert(Model::clone(model));
            });
        }
    }
}

impl Driver for Liar {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: true, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        MODELS.map(Model::from).to_vec()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.gpu.serves(model).then(|| "http://127.0.0.1:1".parse().unwrap())
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let (mood, wait) = self.mood(90);
            tokio::time::sleep(wait / 2).await;
            match mood {
                Mood::Good | Mood::Late => {
                    let ready = self.gpu.serves(model);
                    Ok(Probed { ready, gone: !ready && !self.gpu.holds(model), ..Probed::default() })
                }
                Mood::Lie => Ok(Probed::default()),
                Mood::Fail => Err(DriverError::Silent { url: String::new(), why: "mood".to_owned() }),
                Mood::Hang => std::future::pending().await,
            }
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async {
            self.dead.send_modify(|dead| {
                dead.remove(model);
            });
            if self.gpu.serves(model) {
                return Ok(());
            }
            let (mood, wait) = self.mood(80);
            tokio::time::sleep(wait).await;
            self.gpu.take(model, if mood == Mood::Fail { SIZE / 2 } else { SIZE });
            tokio::time::sleep(wait).await;
            match mood {
                Mood::Good | Mood::Late => {}
                Mood::Lie | Mood::Fail => return Err(LoadFailure::Exited("exit code 1".to_owned())),
                Mood::Hang => std::future::pending().await,
            }
            self.gpu.serving.lock().unwrap().insert(Model::clone(model));
            Ok(())
        })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async { self.go(model, 75).await.map(|()| Left::Nothing) })
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.go(model, 95))
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(async {
            let _ = self.dead.subscribe().wait_for(|dead| dead.contains(model)).await;
        })
    }
}

/// A slot, its driver, two relays, and the requests in progress.
struct World {
    mux: Arc<Multiplexer>,
    liar: Arc<Liar>,
    driver: Arc<SlotDriver>,
    roster: Arc<Roster>,
    /// The number of changes of its models' settings.
    revision: u16,
    dice: Dice,
    /// The sink of the relay that supports slots.
    told: Arc<Sink>,
    new: RelayKey,
    /// The relay without capabilities: its requests wait here.
    old: RelayKey,
    requests: JoinSet<()>,
    begun: usize,
    ended: usize,
    /// The last generation that was found serving.
    generation: u64,
    visits: HashSet<SlotState>,
}

fn config(ids: &[&str]) -> SlotConfig {
    let models = ids.iter().map(|id| ModelConfig::new(*id, 2)).collect();
    let mut config = SlotConfig { max_held_per_relay: MOST_HELD, ..SlotConfig::new("gpu0", models) };
    let secs = Duration::from_secs;
    config.knobs.load_timeout = secs(30);
    config.knobs.drain_timeout = secs(5);
    config.knobs.hold_budget = secs(60);
    config.knobs.min_residency = secs(1);
    config
}

/// The address represents all of a model's driver settings.
fn settings(ids: &[&str], revision: u16) -> SlotSettings {
    let served = |id: &&str| (Served::new(*id), format!("http://backend:{revision}").parse().unwrap());
    SlotSettings {
        config: config(ids),
        driver: DriverSettings::Static(ids.iter().map(served).collect()),
        devices: Vec::new(),
        backend_names: Default::default(),
        api_key: None,
    }
}

/// Waits for a lease for at most `patience`, and holds it for `work`, or until it is cancelled.
async fn request(arriving: PendingLease, patience: Duration, work: Duration) {
    let Ok(Ok(lease)) = tokio::time::timeout(patience, arriving).await else { return };
    let answered = tokio::select! {
        _ = lease.cancelled() => false,
        () = tokio::time::sleep(work) => true,
    };
    lease.release(answered).await;
}

impl World {
    async fn start(seed: u64) -> Self {
        let gpu = Arc::new(Gpu::default());
        let liar = Arc::new(Liar {
            gpu: Arc::clone(&gpu),
            dice: Mutex::new(Dice(!seed)),
            is_honest: AtomicBool::new(false),
            dead: watch::Sender::default(),
        });
        let of_each = Arc::clone(&liar);
        let build = move |_: &SlotSettings| Ok(Arc::<Liar>::clone(&of_each) as Arc<dyn Driver>);
        let roster = Arc::new(Roster::new(&settings(&MODELS, 1), Box::new(build)).unwrap());
        let driver = Arc::new(SlotDriver::new(Arc::<Roster>::clone(&roster), SlotMemory::new(gpu)));
        let metrics = Arc::new(MultiplexerMetrics::new(&Registry::new()));
        let mux = Arc::new(Multiplexer::start(vec![(config(&MODELS), Arc::clone(&driver))], metrics, seed));
        let told = Arc::new(Sink::default());
        let new = mux.join(Peer::Slots1, Arc::<Sink>::clone(&told));
        let old = mux.join(Peer::Old, Arc::new(Sink::default()));
        let (requests, visits) = (JoinSet::new(), HashSet::new());
        Self {
            mux,
            liar,
            driver,
            roster,
            revision: 1,
            dice: Dice(seed),
            told,
            new,
            old,
            requests,
            begun: 0,
            ended: 0,
            generation: 0,
            visits,
        }
    }

    fn send_request(&mut self, relay: RelayKey, model: &str) {
        let (patience, work) = (self.dice.wait(90_000), self.dice.wait(8_000));
        self.begun += 1;
        self.requests.spawn(request(self.mux.arrive(relay, (model, RequestClass::Normal), now()), patience, work));
    }

    fn order(&self, command: &str, model: &str) {
        let (op_id, mode) = ("1".to_owned(), (command == "unload").then(|| "now".to_owned()));
        let command = Command { op_id, command: command.to_owned(), model: model.to_owned(), slot: None, mode };
        self.mux.handle_command(self.new, &command);
    }

    async fn act(&mut self) {
        let model = self.dice.model();
        match self.dice.below(40) {
            0..=13 => self.send_request(self.old, model),
            14..=18 => self.demand(model),
            19..=22 => {
                if self.told.granted(model).is_some_and(|slots| slots > 0) {
                    self.send_request(self.new, model);
                }
            }
            23 => {
                let (is_seen, after) = (self.dice.below(2) == 0, self.dice.wait(3_000));
                self.liar.die(&model.into(), is_seen, after);
            }
            24 => self.order("unload", model),
            25 => self.order("load", model),
            26 => {
                self.mux.leave(self.old);
                self.old = self.mux.join(Peer::Old, Arc::new(Sink::default()));
            }
            27 => {
                let ids: Vec<_> = MODELS.into_iter().filter(|_| self.dice.below(4) > 0).collect();
                if !ids.is_empty() {
                    self.reconfigure(&ids);
                }
            }
            28 => self.mux.handle_message(self.new),
            _ => pass(self.dice.wait(4_000).as_secs_f64()).await,
        }
    }

    /// Applies a configuration with these models; every second time their settings are new.
    fn reconfigure(&mut self, ids: &[&str]) {
        self.revision += self.dice.below(2) as u16;
        let slot = settings(ids, self.revision);
        let changes = self.roster.reconfigure(&slot).unwrap();
        self.driver.expect_new_models();
        assert!(self.mux.reconfigure(slot.config, &changes.changed));
    }

    fn demand(&mut self, model: &str) {
        use modelrelay_protocol::message::{Demand, ModelDemand};
        let waiting = self.dice.below(3) as u32;
        let models =
            vec![ModelDemand { id: model.to_owned(), waiting, oldest_ms: 100, sum_ms: 100, ..ModelDemand::default() }];
        self.mux.handle_demand(self.new, &Demand { models });
    }

    async fn check(&mut self) {
        let (before, alive) = (tokio::time::Instant::now(), self.begun - self.ended);
        // A lease without a receiver returns behind this one.
        self.mux.reports().await;
        let report = self.mux.reports().await.pop().expect("the slot's task is alive");
        assert_eq!(before.elapsed(), Duration::ZERO, "I6: the slot waits for its driver");
        let held: usize = report.requests.iter().map(|(_, requests)| requests.held).sum();
        let leases: usize = report.requests.iter().map(|(_, requests)| requests.leases).sum();
        // Only requests of the relay without a queue; those of its predecessor are gone.
        assert!(held <= MOST_HELD, "I10: {held} are held");
        self.visits.insert(report.slot.state);
        // An aborted swap leaves a resident that may have died unnoticed.
        let is_ready = report.slot.state == SlotState::Ready;
        let begins = is_ready && report.slot.since_ms == 0 && report.slot.generation != self.generation;
        if is_ready {
            self.generation = report.slot.generation;
        }
        if let Some(resident) = report.slot.resident.as_deref().filter(|_| begins) {
            assert!(self.liar.gpu.holds(&resident.into()), "I9: {resident} is not there");
        }
        while let Some(ended) = self.requests.try_join_next() {
            ended.expect("no request panics");
            self.ended += 1;
        }
        assert!(leases <= alive, "I4: {leases} leases of {alive} requests");
        assert_eq!(*self.liar.gpu.wrong.lock().unwrap(), Vec::<String>::new());
    }

    /// From now on, the driver does what it reports. Then every request ends, and every model can be loaded.
    async fn calm_down(mut self) -> HashSet<SlotState> {
        self.liar.is_honest.store(true, Ordering::Relaxed);
        self.reconfigure(&MODELS);
        for model in MODELS {
            let models = Vec::new();
            self.mux.handle_demand(self.new, &modelrelay_protocol::message::Demand { models });
            self.order("unload", model);
            pass(200.0).await;
        }
        while let Some(ended) = self.requests.join_next().await {
            ended.expect("no request panics");
            self.ended += 1;
        }
        assert_eq!(self.ended, self.begun, "I5");
        for model in MODELS {
            let lease = self.mux.arrive(self.old, (model, RequestClass::Normal), now()).await;
            assert!(!matches!(lease, Err(SlotError::Quarantined)), "{model} stays out of use");
            lease.unwrap_or_else(|error| panic!("{model} cannot be had: {error}")).release(true).await;
        }
        let report = self.mux.reports().await.pop().expect("the slot's task is alive");
        assert!(report.requests.iter().all(|(_, of)| of.leases + of.held == 0), "I4: {:?}", report.requests);
        self.check().await;
        self.visits
    }
}

async fn history(seed: u64) -> HashSet<SlotState> {
    let mut world = World::start(seed).await;
    for _ in 0..OPS {
        world.act().await;
        world.check().await;
    }
    world.calm_down().await
}

#[test]
fn no_load_starts_before_memory_is_freed() {
    let wanted = std::env::var("MODELRELAY_HISTORY_TRANSITIONS")
        .map_or(5_000, |wanted| wanted.parse::<u64>().expect("a number of transitions"));
    let mut visits = HashSet::new();
    for seed in 0..wanted.div_ceil(OPS) {
        let seen = std::panic::catch_unwind(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
            runtime.expect("a runtime").block_on(history(seed))
        });
        visits.extend(seen.unwrap_or_else(|_| panic!("seed {seed}")));
    }
    for state in [SlotState::Draining, SlotState::Evicting, SlotState::Loading, SlotState::Quarantined] {
        assert!(visits.contains(&state), "{state:?} was never seen");
    }
    #[expect(clippy::print_stdout, reason = "the number is the result of this test")]
    {
        println!("{} transitions", wanted.div_ceil(OPS) * OPS);
    }
}
