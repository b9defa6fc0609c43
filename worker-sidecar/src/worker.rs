//! The whole worker: what its parts share, and how they are started and ended.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use modelrelay_protocol::secret::Secret;
use tokio::sync::{Notify, watch};

use crate::backend::Backend;
use crate::capacity::Capacity;
use crate::catalogue::Catalogue;
use crate::cli::Args;
use crate::config::{self, Live, SecretSource, SettingError, Settings};
use crate::demo::{self, DemoArgs};
use crate::metrics::Metrics;
use crate::net::Trust;
use crate::relay_link::{Link, LinkId};
use crate::shutdown::{self, Cause, Drain, DrainState, Order};
use crate::{probe, relays, telemetry};

/// Between two looks for a secret that is not there, or not good.
const SECRET_INTERVAL: Duration = Duration::from_secs(1);

/// More threads than this only wake one another.
const MAX_THREADS: usize = 4;

/// What all parts share.
#[derive(Debug)]
pub struct Worker {
    /// As they were at the start.
    pub settings: Settings,
    /// The part of them that a reload changes.
    pub live: ArcSwap<Live>,
    /// The backend in force.
    pub backend: ArcSwap<Backend>,
    /// Who is trusted as a relay.
    pub trust: Arc<Trust>,
    /// 128 random bits: names this process to relays.
    pub instance_id: String,
    /// Live links.
    pub links: Links,
    /// Slots.
    pub capacity: Arc<Capacity>,
    /// Models.
    pub catalogue: Catalogue,
    /// Whether work is taken.
    pub drain: Drain,
    /// True while no link lives and none is dialled.
    pub unlinked: watch::Sender<bool>,
    /// How many relays there are, as they say.
    pub relay_count: watch::Sender<u32>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// When the process began.
    pub started: Instant,
    /// The newest secret that could be read.
    newest_secret: watch::Sender<Option<Secret>>,
    /// `worker.yaml` was applied.
    reloaded: Notify,
    secret_error: Mutex<Option<String>>,
    config_error: Mutex<Option<String>>,
}

/// The live links.
#[derive(Debug)]
pub struct Links {
    map: Mutex<BTreeMap<LinkId, Arc<Link>>>,
    changed: watch::Sender<()>,
    /// Held while a link is registered, by those who must know of one another.
    registering: tokio::sync::Mutex<()>,
}

/// Runs the worker until a signal. Errors of the settings end it with one line and exit code 1.
pub fn run(args: &Args) -> ExitCode {
    let settings = match Settings::load(args) {
        Ok(settings) => settings,
        Err(error) => return fail(&error),
    };
    telemetry::init(&settings.log_filter, settings.log_format);
    run_to_end(serve(args, settings))
}

/// Runs the demo backend until a signal.
pub fn run_demo(args: &Args, demo: DemoArgs) -> ExitCode {
    match config::log_settings(args) {
        Ok((filter, format)) => telemetry::init(&filter, format),
        Err(error) => return fail(&error),
    }
    run_to_end(async {
        let listen = demo.listen.to_string();
        demo::run(demo).await.map_err(|error| SettingError::new("--listen", listen, error.to_string()))
    })
}

fn run_to_end(work: impl Future<Output = Result<(), SettingError>>) -> ExitCode {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&SettingError::hidden("runtime", error.to_string())),
    };
    match runtime.block_on(work) {
        Ok(()) => {
            // What is left are tasks with nothing to finish.
            runtime.shutdown_background();
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

#[allow(clippy::print_stderr)]
fn fail(error: &SettingError) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}

async fn serve(args: &Args, settings: Settings) -> Result<(), SettingError> {
    let signals = tokio::spawn(shutdown::first_signal());
    let listener = probe::bind(settings.probe).await?;
    let worker = Arc::new(Worker::new(settings)?);
    tokio::spawn(probe::serve(listener, Arc::clone(&worker)));
    tokio::spawn(Arc::clone(&worker.capacity).run());
    let catalogue = Arc::clone(&worker);
    tokio::spawn(async move { catalogue.catalogue.run(&catalogue).await });
    tokio::spawn(relays::run(Arc::clone(&worker)));
    tokio::spawn(undo_drain(Arc::clone(&worker)));
    let secret = Arc::clone(&worker);
    tokio::spawn(async move { secret.watch_secret().await });
    if let Some(path) = args.config.clone() {
        let (apply, refuse) = (Arc::clone(&worker), Arc::clone(&worker));
        let args = args.clone();
        tokio::spawn(async move {
            config::watch(args, path, |settings| apply.apply(settings), |error| refuse.refuse(error)).await;
        });
    }
    match signals.await {
        Ok(Ok(signal)) => worker.stop(signal).await,
        Ok(Err(error)) => return Err(SettingError::hidden("signals", error.to_string())),
        Err(error) => return Err(SettingError::hidden("signals", error.to_string())),
    }
    Ok(())
}

/// A `/drain` is over when the backend for whose end it was asked has gone and come back.
async fn undo_drain(worker: Arc<Worker>) {
    let mut drain = worker.drain.subscribe();
    let mut healthy = worker.catalogue.healthy();
    let mut unlinked = worker.unlinked.subscribe();
    loop {
        let _ = drain.wait_for(DrainState::is_undoable).await;
        let _ = healthy.wait_for(|healthy| !healthy).await;
        let _ = healthy.wait_for(|healthy| *healthy).await;
        // Links of the drain that still end must not be mistaken for new ones.
        let _ = unlinked.wait_for(|unlinked| *unlinked).await;
        if worker.drain.is_undoable() {
            tracing::info!("the backend is back; the drain is undone");
        }
        worker.drain.undo();
        // A stronger drain is for good.
        let _ = drain.wait_for(|state| *state == DrainState::Serving).await;
    }
}

impl Worker {
    /// A worker that does nothing yet.
    pub fn new(settings: Settings) -> Result<Self, SettingError> {
        let trust = Arc::new(Trust::new(settings.relay_ca_file.clone()));
        trust.check().map_err(|error| {
            let path = settings.relay_ca_file.clone().unwrap_or_default();
            SettingError::new("RELAY_CA_FILE", path.display().to_string(), error.to_string())
        })?;
        let metrics = Arc::new(Metrics::new());
        let live = settings.live.clone();
        Ok(Self {
            backend: ArcSwap::from_pointee(Backend::new(live.backend.clone(), Arc::new(Trust::new(None)))),
            capacity: Capacity::new(live.max_concurrency),
            live: ArcSwap::from_pointee(live),
            trust,
            instance_id: instance_id()?,
            links: Links::default(),
            catalogue: Catalogue::new(Arc::clone(&metrics)),
            drain: Drain::default(),
            unlinked: watch::channel(false).0,
            relay_count: watch::channel(1).0,
            metrics,
            started: Instant::now(),
            newest_secret: watch::channel(None).0,
            reloaded: Notify::new(),
            secret_error: Mutex::new(None),
            config_error: Mutex::new(None),
            settings,
        })
    }

    /// The secret to dial with: read again each time, the last good one while its file is not. Waits for the first one.
    pub async fn secret(&self) -> Secret {
        loop {
            if let Some(secret) = self.secret_now() {
                return secret;
            }
            tokio::time::sleep(SECRET_INTERVAL).await;
        }
    }

    /// Waits until there is another secret than one that a relay refused.
    pub async fn other_secret(&self, refused: &Secret) {
        loop {
            tokio::time::sleep(SECRET_INTERVAL).await;
            if self.live.load().secret.read().is_ok_and(|secret| secret != *refused) {
                return;
            }
        }
    }

    /// The newest secret, whose changes can be waited for.
    pub fn newest_secret(&self) -> watch::Receiver<Option<Secret>> {
        self.newest_secret.subscribe()
    }

    /// Looks for another secret in its file each second. One that stands in the settings changes only with them. Never
    /// returns.
    async fn watch_secret(&self) {
        loop {
            let is_file = matches!(self.live.load().secret, SecretSource::File(_));
            if is_file {
                tokio::time::sleep(SECRET_INTERVAL).await;
            } else {
                self.reloaded.notified().await;
            }
            self.secret_now();
        }
    }

    /// Why there is no secret to dial with, or only an old one.
    pub fn secret_error(&self) -> Option<String> {
        lock(&self.secret_error).clone()
    }

    /// The same complaint is a warning once.
    fn secret_now(&self) -> Option<Secret> {
        let read = self.live.load().secret.read();
        let had_one = self.newest_secret.borrow().is_some();
        let error = read.as_ref().err().map(ToString::to_string);
        let told = std::mem::replace(&mut *lock(&self.secret_error), error.clone());
        match (read, error) {
            (Ok(secret), _) => {
                if told.is_some() {
                    tracing::info!("the worker secret is there");
                }
                self.newest_secret.send_if_modified(|newest| {
                    let is_new = newest.as_ref() != Some(&secret);
                    *newest = Some(secret);
                    is_new
                });
            }
            (Err(_), error) if error == told => {}
            (Err(error), _) if had_one => tracing::warn!(%error, "dialling with the last good secret"),
            (Err(error), _) => tracing::warn!(%error, "there is no worker secret yet; waiting for it"),
        }
        self.newest_secret.borrow().clone()
    }

    /// A link has registered with these models.
    pub fn attach(&self, link: &Arc<Link>, models: &[String]) {
        self.catalogue.attach(models, |changed| {
            self.links.insert(link);
            if let Some(models) = changed {
                link.announce(models, self.capacity.load());
            }
        });
        self.capacity.join(link);
        self.metrics.connected.with_label_values(&[&*link.relay]).inc();
    }

    /// A link has ended: its requests with it, at once.
    pub fn detach(&self, link: &Arc<Link>) {
        let aborted = link.cancel_all();
        if aborted > 0 {
            tracing::warn!(relay = %link.relay, aborted, "requests ended with their link");
        }
        self.capacity.leave(link.id);
        self.links.remove(link.id);
        let gauge = self.metrics.connected.with_label_values(&[&*link.relay]);
        gauge.dec();
        if gauge.get() <= 0 {
            self.metrics.forget_relay(&link.relay);
        }
    }

    /// How many relays a relay says there are.
    pub fn set_relay_count(&self, count: u32) {
        self.relay_count.send_if_modified(|now| std::mem::replace(now, count.max(1)) != count.max(1));
    }

    /// Takes no more work.
    pub fn begin_drain(&self, cause: Cause, timeout: Duration) -> Order {
        let order = self.drain.begin(cause, timeout, Instant::now());
        let running = self.links.unanswered();
        tracing::info!(cause = cause.as_str(), running, "graceful shutdown");
        order
    }

    /// An admin's order: finish, and stay away until restarted.
    pub fn drain_by_admin(&self, timeout: Option<Duration>) {
        self.begin_drain(Cause::Admin, timeout.unwrap_or(self.settings.shutdown_timeout));
    }

    /// Why the file's newest content is not in force.
    pub fn config_error(&self) -> Option<String> {
        lock(&self.config_error).clone()
    }

    async fn stop(&self, signal: &str) {
        tracing::info!(signal, "signal received");
        let order = self.begin_drain(Cause::Signal, self.settings.shutdown_timeout);
        let mut unlinked = self.unlinked.subscribe();
        let idle = unlinked.wait_for(|unlinked| *unlinked);
        if tokio::time::timeout_at(order.deadline.into(), idle).await.is_ok() {
            return tracing::info!("graceful shutdown complete");
        }
        let links = self.links.all();
        let severed: usize = links.iter().map(|link| link.cancel_all()).sum();
        tracing::warn!(severed, "drain timeout reached");
        for link in &links {
            link.close(1000, "graceful shutdown timed out");
        }
        // Long enough for the close frames, too short to matter.
        let mut unlinked = self.unlinked.subscribe();
        let _ = tokio::time::timeout(Duration::from_millis(500), unlinked.wait_for(|unlinked| *unlinked)).await;
    }

    fn apply(&self, settings: Settings) {
        let (old, new) = (self.live.load_full(), settings.live.clone());
        let rest = Settings { live: self.settings.live.clone(), ..settings };
        if rest != self.settings {
            tracing::warn!("worker.yaml changed settings that need a restart; they stay as they were");
        }
        lock(&self.config_error).take();
        self.live.store(Arc::new(new.clone()));
        self.reloaded.notify_one();
        if new.max_concurrency != old.max_concurrency {
            self.capacity.set(new.max_concurrency);
        }
        if new.backend != old.backend {
            self.backend.store(Arc::new(Backend::new(new.backend.clone(), Arc::new(Trust::new(None)))));
        }
        if new.backend.url != old.backend.url || new.backend.engine != old.backend.engine {
            self.catalogue.reset(&self.links, self.capacity.load());
        } else if new.backend != old.backend || new.models != old.models {
            self.catalogue.look_again();
        }
        tracing::info!("worker.yaml applied");
    }

    fn refuse(&self, error: &SettingError) {
        tracing::error!(%error, "worker.yaml cannot be used; the last good settings stay in force");
        *lock(&self.config_error) = Some(error.to_string());
    }
}

impl Default for Links {
    fn default() -> Self {
        Self { map: Mutex::default(), changed: watch::channel(()).0, registering: tokio::sync::Mutex::default() }
    }
}

impl Links {
    /// All of them.
    pub fn all(&self) -> Vec<Arc<Link>> {
        lock(&self.map).values().map(Arc::clone).collect()
    }

    /// One of them.
    pub fn find(&self, id: LinkId) -> Option<Arc<Link>> {
        lock(&self.map).get(&id).map(Arc::clone)
    }

    /// Waits until no other link is being registered.
    pub async fn register_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.registering.lock().await
    }

    /// The relays that need no other link than they have: not those where a link only finishes what it has, nor the one of
    /// `older`, whose place another is about to take.
    pub fn relay_ids_beside(&self, older: Option<&Link>) -> Vec<String> {
        let links = lock(&self.map);
        let stays = |link: &&Arc<Link>| !link.has_successor() && older.is_none_or(|older| older.id != link.id);
        links.values().filter(stays).filter_map(|link| link.relay_id.clone()).collect()
    }

    /// Requests that have not been answered to their last byte.
    pub fn unanswered(&self) -> usize {
        self.all().iter().map(|link| link.unanswered()).sum()
    }

    /// Waits until no link leads to that relay.
    pub async fn wait_without(&self, relay_id: &str) {
        let mut changed = self.changed.subscribe();
        let leads_there = || lock(&self.map).values().any(|link| link.relay_id.as_deref() == Some(relay_id));
        let _ = changed.wait_for(|()| !leads_there()).await;
    }

    fn insert(&self, link: &Arc<Link>) {
        lock(&self.map).insert(link.id, Arc::clone(link));
        self.changed.send_replace(());
    }

    fn remove(&self, id: LinkId) {
        lock(&self.map).remove(&id);
        self.changed.send_replace(());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn instance_id() -> Result<String, SettingError> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| SettingError::hidden("instance_id", format!("no randomness: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(relay_id: &str) -> Arc<Link> {
        Link::new("test".into(), Some(relay_id.to_owned()), true, 1, Secret::new("secret"))
    }

    #[test]
    fn a_relay_where_a_link_only_finishes_needs_another() {
        let links = Links::default();
        let (one, two) = (link("one"), link("two"));
        links.insert(&one);
        links.insert(&two);
        assert_eq!(links.relay_ids_beside(None), ["one", "two"]);
        assert_eq!(links.relay_ids_beside(Some(&one)), ["two"]);
        one.succeed();
        assert_eq!(links.relay_ids_beside(None), ["two"]);
        let newer = link("one");
        links.insert(&newer);
        assert_eq!(links.relay_ids_beside(None), ["two", "one"]);
    }
}
