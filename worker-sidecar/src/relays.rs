//! Which relays to dial, and one task for each.
//!
//! - A fixed URL: as many links as there are relays (`relay_count`), all dialled at that address; a load balancer
//!   behind it distributes them. Links that a raised count adds are dialled within a second. A dial that reaches an
//!   already linked relay is repeated later.
//! - `dns+http(s)`: every address of the name, resolved every 5 s. An address that disappears is no longer dialled but
//!   keeps its live link; a failed or empty lookup changes nothing.
//!
//! A link whose secret or token has since been replaced keeps serving until a link with the new one has taken its
//! place, and then finishes its requests.
//!
//! While the worker drains it dials no relay; when all links have ended the worker is unlinked, and reports it.

mod establish;
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use modelrelay_multiplexer::net;
use modelrelay_protocol::version::{VERSION, VERSION_PUBLISHED};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Interval;

use crate::link::{self, Backoff, EndKind, Endpoint, Link};
use crate::settings::Credential;
use crate::shutdown::DrainState;
use crate::worker::Worker;
use establish::{Linked, establish};

/// The interval between lookups of a name.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

/// The time within which a fleet moves to a new secret. (The tokens of a fleet are renewed one by one anyway.)
const SPREAD: Duration = Duration::from_secs(10);

/// The time within which the links that a raised number of relays adds are first dialled: a whole fleet learns of it at
/// once.
const ADDED_SPREAD: Duration = Duration::from_secs(1);

/// The most links to one name. More are a mistake.
const MAX_RELAYS: usize = 256;

/// How a link, or the attempt to establish one, ended.
#[derive(Debug)]
struct End {
    /// Its effect on the next dial.
    kind: EndKind,
    /// The human-readable reason.
    reason: String,
    /// The metric label.
    label: &'static str,
    /// The pause that the relay requested.
    retry_after: Option<Duration>,
    /// The id of the already linked relay.
    relay_id: Option<String>,
    /// The credential that was rejected.
    refused: Option<Box<Credential>>,
}

impl End {
    fn new(kind: EndKind, label: &'static str, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into(), label, retry_after: None, relay_id: None, refused: None }
    }

    /// The code that served the link failed.
    fn panicked() -> Self {
        Self::new(EndKind::Failed, "panicked", "internal error while serving the link")
    }
}

/// Identifies one task: the n-th link to a fixed URL, or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DialKey {
    Nth(usize),
    Addr(SocketAddr),
}

/// Keeps links to all relays until the worker drains, and again when that is undone. Never returns.
pub async fn run(worker: Arc<Worker>) {
    let mut drain = worker.drain.subscribe();
    loop {
        // The sender lives in `worker`.
        let _ = drain.wait_for(|state| *state == DrainState::Serving).await;
        worker.unlinked.send_replace(false);
        Dialling::new(&worker).run().await;
        worker.unlinked.send_replace(true);
    }
}

struct Dialling<'a> {
    worker: &'a Arc<Worker>,
    /// The running tasks, and whether each is still wanted.
    wanted: BTreeMap<DialKey, watch::Sender<bool>>,
    tasks: JoinSet<DialKey>,
    addresses: BTreeSet<SocketAddr>,
    /// True if the failure was logged; it is not logged again every 5 s.
    lookup_failed: bool,
}

impl<'a> Dialling<'a> {
    fn new(worker: &'a Arc<Worker>) -> Self {
        Self {
            worker,
            wanted: BTreeMap::new(),
            tasks: JoinSet::new(),
            addresses: BTreeSet::new(),
            lookup_failed: false,
        }
    }

    async fn run(mut self) {
        let mut drain = self.worker.drain.subscribe();
        let mut count = self.worker.relay_count.subscribe();
        let every_address = self.worker.live.load().relay.every_address;
        let mut lookups = tokio::time::interval(LOOKUP_INTERVAL);
        lookups.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        if !every_address {
            self.want_count(*count.borrow_and_update(), Duration::ZERO);
        }
        loop {
            tokio::select! {
                () = draining(&mut drain) => break,
                Ok(()) = count.changed(), if !every_address => {
                    let number = *count.borrow_and_update();
                    self.want_count(number, ADDED_SPREAD);
                }
                found = look_up(self.worker, &mut lookups), if every_address => self.handle_lookup(found),
                Some(Ok(key)) = self.tasks.join_next() => self.handle_ended(key),
            }
        }
        // Each ends by itself when its link is finished.
        while self.tasks.join_next().await.is_some() {}
    }

    fn want_count(&mut self, number: u32, within: Duration) {
        let number = usize::try_from(number).unwrap_or(MAX_RELAYS).clamp(1, MAX_RELAYS);
        self.want(&(0..number).map(DialKey::Nth).collect(), within);
    }

    fn handle_lookup(&mut self, found: io::Result<BTreeSet<SocketAddr>>) {
        let name = self.worker.live.load().relay.host.clone();
        match found {
            Ok(found) if found.is_empty() => {}
            Ok(found) => {
                self.lookup_failed = false;
                if found != self.addresses {
                    tracing::info!(name, addresses = found.len(), "relay addresses changed");
                    self.addresses = found;
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.lookup_failed, true) {
                    tracing::warn!(name, %error, known = self.addresses.len(), "cannot resolve the relay's name");
                }
            }
        }
        let keys = self.addresses.iter().copied().map(DialKey::Addr).collect();
        self.want(&keys, Duration::ZERO);
    }

    /// Starts the missing tasks; new ones are first dialled `within` this time.
    fn want(&mut self, keys: &BTreeSet<DialKey>, within: Duration) {
        for (key, wanted) in &self.wanted {
            wanted.send_if_modified(|now| std::mem::replace(now, keys.contains(key)) != keys.contains(key));
        }
        for key in keys {
            self.start(*key, within);
        }
    }

    fn start(&mut self, key: DialKey, within: Duration) {
        if self.wanted.contains_key(&key) {
            return;
        }
        let (sender, wanted) = watch::channel(true);
        self.wanted.insert(key, sender);
        let addr = match key {
            DialKey::Nth(_) => None,
            DialKey::Addr(addr) => Some(addr),
        };
        let worker = Arc::clone(self.worker);
        let first = within.mul_f64(link::random());
        self.tasks.spawn(async move {
            keep_linked(&worker, addr, wanted, first).await;
            key
        });
    }

    fn handle_ended(&mut self, key: DialKey) {
        // It is wanted again at the instant at which it ended.
        if self.wanted.remove(&key).is_some_and(|wanted| *wanted.borrow()) {
            self.start(key, Duration::ZERO);
        }
    }
}

/// Dials one endpoint, `first` from now, serves the link, and dials again, until it is no longer wanted or the worker
/// drains.
async fn keep_linked(
    worker: &Arc<Worker>,
    addr: Option<SocketAddr>,
    mut wanted: watch::Receiver<bool>,
    first: Duration,
) {
    if !is_wanted_after(tokio::time::sleep(first), worker, &mut wanted).await {
        return;
    }
    let mut backoff = Backoff::default();
    let mut version = VERSION;
    let mut logged = None;
    // Links that were replaced, until they end.
    let mut leaving: Vec<ServedLink> = Vec::new();
    loop {
        let endpoint = endpoint(worker, addr);
        let end = serve(worker, &endpoint, version, &wanted, &mut leaving).await;
        worker.metrics.reconnects(end.label);
        log_end(&endpoint, &end, &mut logged);
        let mut kind = end.kind;
        if kind == EndKind::OtherVersion {
            // The published relay rejects the current version; a relay that rejects both versions is retried with the
            // usual back-off.
            kind = if version == VERSION { EndKind::OtherVersion } else { EndKind::Failed };
            version = if version == VERSION { VERSION_PUBLISHED } else { VERSION };
        }
        let relays = *worker.relay_count.borrow();
        let pause = backoff.next_pause(kind, relays, link::random()).max(end.retry_after.unwrap_or_default());
        let rest = async {
            match (&end.relay_id, addr) {
                // This very relay is behind the address: another dial is useless while its link lives.
                (Some(relay_id), Some(_)) if kind == EndKind::Duplicate => {
                    worker.links.wait_without(relay_id).await;
                    tokio::time::sleep(pause.min(Duration::from_secs(1))).await;
                }
                _ => match &end.refused {
                    // A rejected credential is not retried quickly, but another one need not wait.
                    Some(refused) => drop(tokio::time::timeout(pause, worker.other_credential(refused)).await),
                    None => tokio::time::sleep(pause).await,
                },
            }
        };
        if !is_wanted_after(rest, worker, &mut wanted).await {
            break;
        }
    }
    for mut session in leaving {
        let _ = (&mut session.0).await;
    }
}

/// Returns the endpoint of the next dial: worker.yaml may have another address by now.
fn endpoint(worker: &Worker, addr: Option<SocketAddr>) -> Endpoint {
    Endpoint { url: worker.live.load().relay.clone(), addr }
}

/// True if a dial is still wanted after `rest`; otherwise `rest` is cut short.
async fn is_wanted_after(rest: impl Future<Output = ()>, worker: &Worker, wanted: &mut watch::Receiver<bool>) -> bool {
    let mut drain = worker.drain.subscribe();
    tokio::select! {
        () = rest => *wanted.borrow() && !worker.drain.is_draining(),
        () = unwanted(wanted) => false,
        () = draining(&mut drain) => false,
    }
}

/// Establishes a link and serves it, and then each link that replaces it, until one ends.
async fn serve(
    worker: &Arc<Worker>,
    endpoint: &Endpoint,
    version: &str,
    wanted: &watch::Receiver<bool>,
    leaving: &mut Vec<ServedLink>,
) -> End {
    let mut linked = match link_up(worker, endpoint, version, None).await {
        Ok(linked) => linked,
        Err(end) => return end,
    };
    loop {
        let link = Arc::clone(linked.link());
        let mut session = ServedLink(tokio::spawn(linked.serve()));
        let mut moving = Move::new(worker, wanted.clone());
        linked = loop {
            tokio::select! {
                biased;
                () = moving.due(&link) => {}
                // A panic is a bug of the worker and ends this link, not the dialling of this relay.
                end = &mut session.0 => return end.unwrap_or_else(|_| End::panicked()),
            }
            // Not abandoned if the older link ends in the meantime: the relay may have accepted the newer one already.
            let endpoint = self::endpoint(worker, endpoint.addr);
            match link_up(worker, &endpoint, version, Some(&link)).await {
                Ok(newer) => break newer,
                Err(end) => moving.handle_failed(&endpoint, &end),
            }
        };
        tracing::info!(relay = %link.relay, "link replaced by one with the new {}", link.credential.noun());
        leaving.retain(|session| !session.0.is_finished());
        leaving.push(session);
    }
}

/// A link that is being served; dropping this aborts it.
struct ServedLink(JoinHandle<End>);

impl Drop for ServedLink {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn link_up(
    worker: &Arc<Worker>,
    endpoint: &Endpoint,
    version: &str,
    older: Option<&Link>,
) -> Result<Linked, End> {
    let linked = AssertUnwindSafe(establish(worker, endpoint, version, older)).catch_unwind();
    linked.await.unwrap_or_else(|_| Err(End::panicked()))
}

/// Decides when to establish the link that replaces another: once there is a secret or token other than the older
/// link's. While the relay does not accept the new one, the older link keeps serving.
struct Move<'a> {
    worker: &'a Worker,
    credential: watch::Receiver<Option<Credential>>,
    wanted: watch::Receiver<bool>,
    backoff: Backoff,
    logged: Option<(EndKind, &'static str)>,
    pause: Duration,
}

impl<'a> Move<'a> {
    fn new(worker: &'a Worker, wanted: watch::Receiver<bool>) -> Self {
        Self {
            worker,
            credential: worker.newest_credential(),
            wanted,
            backoff: Backoff::default(),
            logged: None,
            pause: spread(link::random()),
        }
    }

    /// Waits until a successor of `link` is to be dialled.
    async fn due(&mut self, link: &Link) {
        let is_other = |newest: &Option<Credential>| newest.as_ref().is_some_and(|newest| *newest != link.credential);
        loop {
            // The sender lives in `worker`.
            let _ = self.credential.wait_for(is_other).await;
            // A still newer credential restarts the wait.
            if tokio::time::timeout(self.pause, self.credential.changed()).await.is_err() {
                break;
            }
            self.pause = spread(link::random());
        }
        // An address that is no longer listed is not dialled, even if its link still serves.
        let _ = self.wanted.wait_for(|wanted| *wanted).await;
    }

    /// The relay was not reached, or rejected the link.
    fn handle_failed(&mut self, endpoint: &Endpoint, end: &End) {
        self.worker.metrics.reconnects(end.label);
        log_end(endpoint, end, &mut self.logged);
        let relays = *self.worker.relay_count.borrow();
        let pause = self.backoff.next_pause(end.kind, relays, link::random());
        self.pause = pause.max(end.retry_after.unwrap_or_default());
    }
}

/// Returns the delay before a worker moves to a new secret: the secret reaches a whole fleet at once, but the fleet
/// must not reach its relays at once.
fn spread(random: f64) -> Duration {
    SPREAD.mul_f64(random)
}

/// Waits for the next tick and resolves the name. A lookup may take long, so callers wait for a drain in parallel.
async fn look_up(worker: &Worker, lookups: &mut Interval) -> io::Result<BTreeSet<SocketAddr>> {
    lookups.tick().await;
    let relay = worker.live.load().relay.clone();
    let found = net::look_up(&relay.host, relay.port).await?;
    Ok(found.into_iter().take(MAX_RELAYS).collect())
}

/// Waits for a drain; its sender outlives all receivers.
async fn draining(drain: &mut watch::Receiver<DrainState>) {
    let _ = drain.wait_for(|state| *state != DrainState::Serving).await;
}

async fn unwanted(wanted: &mut watch::Receiver<bool>) {
    let _ = wanted.wait_for(|wanted| !wanted).await;
}

/// Logs the first of equal failures as a warning; further ones would bury everything else.
fn log_end(endpoint: &Endpoint, end: &End, logged: &mut Option<(EndKind, &'static str)>) {
    let (relay, reason) = (endpoint.name(), &end.reason);
    let this = (end.kind, end.label);
    let again = logged.replace(this) == Some(this);
    match end.kind {
        EndKind::Linked if end.label == "closed" => tracing::info!(%relay, reason, "link closed"),
        EndKind::Linked => tracing::warn!(%relay, reason, "link lost"),
        EndKind::Refused if !again => {
            let question = end.refused.as_ref().map_or("", |refused| refused.question());
            tracing::warn!(%relay, reason, "worker authentication failed; {question}");
        }
        EndKind::Failed if end.label == "draining" => tracing::debug!(%relay, reason, "not linked"),
        EndKind::Failed if !again => tracing::warn!(%relay, reason, "cannot link to the relay; trying again"),
        EndKind::Refused | EndKind::Failed => tracing::debug!(%relay, reason, "still disconnected"),
        EndKind::Duplicate | EndKind::OtherVersion => tracing::debug!(%relay, reason, "retrying later"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fleet_rotates_secret_spread_over_ten_seconds() {
        let pauses = [0.0, 0.25, 1.0].map(|random| spread(random).as_secs_f64());
        assert_eq!(pauses, [0.0, 2.5, 10.0]);
    }
}
