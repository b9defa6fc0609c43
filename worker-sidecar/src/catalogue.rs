//! Which models are advertised: none until the backend is healthy, then the configured ones or what it lists.
//!
//! The first connection that fails withdraws all of them, before the failure itself is said. From then on the backend is
//! probed each second until it is back. A healthy backend is asked for its models every 30 s where they are not fixed, and
//! otherwise left alone.
//!
//! Locks: this one is taken before a link's, never after.

mod health;

pub use health::{Listed, TIMEOUT, look};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use modelrelay_protocol::limits::MAX_MODELS_PER_WORKER;
use modelrelay_protocol::names::is_model_name;
use tokio::sync::{Notify, watch};

use crate::config::Models;
use crate::metrics::Metrics;
use crate::relay_link::LinkId;
use crate::worker::{Links, Worker};
use health::{Health, Listing};

/// Between probes of a backend that is down, or that must be seen to go down.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Between looks for models at a backend that has not listed any yet.
const FIRST_LIST_INTERVAL: Duration = Duration::from_secs(2);

/// Between looks after that.
const LIST_INTERVAL: Duration = Duration::from_secs(30);

/// What is known of the backend and its models.
#[derive(Debug)]
pub struct Catalogue {
    state: Mutex<State>,
    wake: Notify,
    healthy: watch::Sender<bool>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct State {
    healthy: bool,
    /// What a healthy backend serves.
    models: Vec<String>,
    /// Links whose relay asked, and is answered even when nothing changed.
    asked: Vec<LinkId>,
    /// Said once, not each second.
    complaint: Option<String>,
    /// Whether it was ever known what a healthy backend serves.
    served: bool,
}

impl State {
    fn advertised(&self) -> &[String] {
        if self.healthy { &self.models } else { &[] }
    }
}

impl Catalogue {
    /// Nothing is known yet.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let state = Mutex::new(State::default());
        Self { state, wake: Notify::new(), healthy: watch::channel(false).0, metrics }
    }

    /// What relays are told now.
    pub fn advertised(&self) -> Vec<String> {
        self.lock().advertised().to_vec()
    }

    /// Why the backend could never serve; nothing once it could, whatever became of it since. One that is healthy and lists
    /// no model can: no time adds one, but only somebody who pulls it.
    pub fn never_served(&self) -> Option<String> {
        let state = self.lock();
        let why = || state.complaint.clone().unwrap_or_else(|| "the backend was not asked yet".to_owned());
        (!state.served).then(why)
    }

    /// Whether the backend answers, now and at each change.
    pub fn healthy(&self) -> watch::Receiver<bool> {
        self.healthy.subscribe()
    }

    /// Runs `attach`, which makes a link known that registered with these models, and says to it what changed meanwhile.
    pub fn attach(&self, registered: &[String], attach: impl FnOnce(Option<&[String]>)) {
        let state = self.lock();
        let changed = (state.advertised() != registered).then(|| state.advertised());
        attach(changed);
    }

    /// A connection to the backend failed: it gets no more requests.
    pub fn handle_unreachable(&self, links: &Links, load: u32) {
        let withdrawn = self.change(links, load, |state| state.healthy = false);
        if withdrawn {
            tracing::warn!("the backend cannot be reached; its models are withdrawn until it is back");
        }
        self.wake.notify_one();
    }

    /// Something hints that what is known has changed: the backend broke a connection, or its settings did. What is
    /// advertised stays until the look is done.
    pub fn look_again(&self) {
        self.wake.notify_one();
    }

    /// A relay asks for the models anew, and is answered.
    pub fn refresh(&self, link: LinkId) {
        self.lock().asked.push(link);
        self.wake.notify_one();
    }

    /// The backend is another one, of which nothing is known.
    pub fn reset(&self, links: &Links, load: u32) {
        self.change(links, load, |state| {
            state.healthy = false;
            state.models.clear();
        });
        self.wake.notify_one();
    }

    /// Keeps what is known up to date. Never returns.
    pub async fn run(&self, worker: &Worker) {
        let mut drain = worker.drain.subscribe();
        loop {
            self.look(worker).await;
            let pause = self.pause(&worker.live.load().models, worker.drain.is_undoable());
            let sleep = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                () = self.wake.notified() => {}
                Ok(()) = drain.changed() => {}
            }
        }
    }

    fn pause(&self, models: &Models, undoable: bool) -> Option<Duration> {
        let state = self.lock();
        match models {
            _ if !state.healthy || undoable => Some(PROBE_INTERVAL),
            Models::Fixed(_) => None,
            Models::Ask if state.models.is_empty() => Some(FIRST_LIST_INTERVAL),
            Models::Ask => Some(LIST_INTERVAL),
        }
    }

    async fn look(&self, worker: &Worker) {
        let backend = worker.backend.load_full();
        let models = worker.live.load().models.clone();
        let (was_healthy, undoable) = (self.lock().healthy, worker.drain.is_undoable());
        let health = health::probe(&backend).await;
        let listing = match (&models, &health) {
            (Models::Ask, Health::Alive) => Some(health::list(&backend).await),
            (Models::Ask, Health::NotReady(_) | Health::Silent(_) | Health::Gone(_)) | (Models::Fixed(_), _) => None,
        };
        if !Arc::ptr_eq(&backend, &worker.backend.load_full()) {
            // Reloaded meanwhile; the next look is about the new one.
            self.wake.notify_one();
            return;
        }
        let load = worker.capacity.load();
        let changed = self.change(&worker.links, load, |state| {
            state.healthy = is_healthy(&health, was_healthy && state.healthy, undoable);
            match (&models, listing.as_ref()) {
                (Models::Fixed(fixed), _) => state.models.clone_from(fixed),
                (Models::Ask, Some(Listing::Models(listed))) => state.models = bounded(listed),
                (Models::Ask, Some(Listing::Failed(_)) | None) => return,
            }
            state.served |= state.healthy;
        });
        self.complain(&health, listing.as_ref());
        let asked = std::mem::take(&mut self.lock().asked);
        if !changed {
            let advertised = self.advertised();
            for link in asked.into_iter().filter_map(|id| worker.links.find(id)) {
                link.announce(&advertised, load);
            }
        }
    }

    /// Changes what is known and tells every link what differs. Gives whether anything does.
    fn change(&self, links: &Links, load: u32, change: impl FnOnce(&mut State)) -> bool {
        let mut state = self.lock();
        let before = state.advertised().to_vec();
        change(&mut state);
        self.metrics.backend_up.set(i64::from(state.healthy));
        self.healthy.send_if_modified(|healthy| std::mem::replace(healthy, state.healthy) != state.healthy);
        if state.advertised() == before {
            return false;
        }
        tracing::info!(models = state.advertised().len(), "advertised models changed");
        for link in links.all() {
            link.announce(state.advertised(), load);
        }
        true
    }

    fn complain(&self, health: &Health, listing: Option<&Listing>) {
        if let Some(listing) = listing {
            self.metrics.refreshed(if matches!(listing, Listing::Models(_)) { "ok" } else { "error" });
        }
        let complaint = match (health, listing) {
            (Health::NotReady(why) | Health::Silent(why) | Health::Gone(why), _) => {
                Some(format!("the backend is not ready: {why}"))
            }
            (Health::Alive, Some(Listing::Failed(why))) => Some(format!("the backend does not list its models: {why}")),
            (Health::Alive, Some(Listing::Models(_)) | None) => None,
        };
        let mut state = self.lock();
        if complaint == state.complaint {
            return;
        }
        match &complaint {
            Some(text) => tracing::warn!("{text}"),
            None => tracing::info!("the backend is healthy"),
        }
        state.complaint = complaint;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a backend counts as healthy after a look. Only a refused connection withdraws what was advertised; in a drain that
/// waits for the backend's end, one that says it is not ready is on its way down, and one that says nothing may be busy with
/// the last requests.
fn is_healthy(found: &Health, before: bool, drained: bool) -> bool {
    match found {
        Health::Alive => true,
        Health::NotReady(_) => before && !drained,
        Health::Silent(_) => before,
        Health::Gone(_) => false,
    }
}

/// What a relay would cut is not sent at all.
fn bounded(listed: &[String]) -> Vec<String> {
    let mut models: Vec<String> = Vec::new();
    for model in listed.iter().map(|model| model.trim()) {
        let usable = is_model_name(model);
        if usable && models.len() < MAX_MODELS_PER_WORKER && !models.iter().any(|known| known == model) {
            models.push(model.to_owned());
        }
    }
    models
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(catalogue: &Catalogue, models: &[&str]) {
        let models: Vec<String> = models.iter().map(|&m| m.to_owned()).collect();
        catalogue.change(&Links::default(), 0, |state| {
            state.healthy = true;
            state.models = models;
        });
    }

    #[test]
    fn nothing_is_advertised_until_the_backend_is_healthy_nor_after_it_is_gone() {
        let catalogue = Catalogue::new(Arc::new(Metrics::new()));
        catalogue.lock().models = vec!["m".to_owned()];
        assert!(catalogue.advertised().is_empty());
        healthy(&catalogue, &["m"]);
        assert_eq!(catalogue.advertised(), ["m"]);
        catalogue.handle_unreachable(&Links::default(), 0);
        assert!(catalogue.advertised().is_empty() && !*catalogue.healthy().borrow());
    }

    #[test]
    fn a_healthy_backend_with_fixed_models_is_left_alone() {
        let catalogue = Catalogue::new(Arc::new(Metrics::new()));
        let fixed = Models::Fixed(vec!["m".to_owned()]);
        assert_eq!(catalogue.pause(&fixed, false), Some(PROBE_INTERVAL));
        healthy(&catalogue, &["m"]);
        assert_eq!(catalogue.pause(&fixed, false), None);
        assert_eq!(catalogue.pause(&fixed, true), Some(PROBE_INTERVAL));
        assert_eq!(catalogue.pause(&Models::Ask, false), Some(LIST_INTERVAL));
        healthy(&catalogue, &[]);
        assert_eq!(catalogue.pause(&Models::Ask, false), Some(FIRST_LIST_INTERVAL));
    }

    #[test]
    fn a_busy_backend_is_neither_withdrawn_nor_taken_for_one_that_went_down() {
        let silent = || Health::Silent("5 s".to_owned());
        assert!(is_healthy(&silent(), true, false) && is_healthy(&silent(), true, true));
        assert!(!is_healthy(&silent(), false, false));
        let not_ready = || Health::NotReady("503".to_owned());
        assert!(is_healthy(&not_ready(), true, false) && !is_healthy(&not_ready(), true, true));
        assert!(
            !is_healthy(&Health::Gone("refused".to_owned()), true, false) && is_healthy(&Health::Alive, false, true)
        );
    }

    #[test]
    fn a_link_that_registered_with_old_models_is_told() {
        let catalogue = Catalogue::new(Arc::new(Metrics::new()));
        healthy(&catalogue, &["m"]);
        let mut told = None;
        catalogue.attach(&[], |changed| told = changed.map(<[String]>::to_vec));
        assert_eq!(told, Some(vec!["m".to_owned()]));
        catalogue.attach(&["m".to_owned()], |changed| told = changed.map(<[String]>::to_vec));
        assert_eq!(told, None);
    }

    #[test]
    fn a_backends_list_is_cleaned_and_bounded() {
        let listed: Vec<String> = [" a ", "a", "", "b"].iter().map(|&m| m.to_owned()).collect();
        assert_eq!(bounded(&listed), ["a", "b"]);
        let many: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
        assert_eq!(bounded(&many).len(), MAX_MODELS_PER_WORKER);
    }
}
