//! Polls the state of every relay: `GET /admin/state` at the Pod's own address.
//!
//! One loop serves all Providers. A Provider is polled every 5 s; every second while the operator scales one of its
//! pools, or while it has pools and serves no model yet; and a few times per second for a short while after its
//! configuration or its Pods changed, so that `Programmed` follows at once. A Provider without a relay Pod costs
//! nothing.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, future};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use modelrelay_protocol::config_hash::secret_of_file;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use tokio::time::Instant;

use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::{Provider, WorkerPool};
use crate::manifests::secrets::ADMIN_TOKEN;
use crate::net::intake::Intake;
use crate::relays::state::{Expectation, RelaySnapshot};
use crate::resources::names::{self, ObjectKey, TLS_ENV};
use crate::spec::sharing;

mod state;
#[cfg(test)]
mod tests;
mod tls;

use state::RelayState;

const INTERVAL: Duration = Duration::from_secs(5);
const BRISK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval while a confirmation is expected: a kubelet delivers a changed Secret within 0.2 to 0.8 s.
const CLOSE_INTERVAL: Duration = Duration::from_millis(200);
/// After this time the relay is considered unhealthy rather than late, and is polled at the usual interval.
const CLOSE_FOR: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(2);
/// A relay's state has some 700 bytes per worker and 30 per model of it. With a multiplexer of two slots and eight
/// models, and long names, aliases and failures in both, it has 5,000: a thousand of those workers are 5 MB, and ten
/// thousand plain workers are 7 MB and more. A Pod whose response is larger is not a relay.
const MAX_STATE_BYTES: usize = 8 << 20;
/// In the units of [`Intake`]: a thousand of those workers have some 30 objects and 200 other values each, which is
/// 440,000.
const MAX_STATE_COST: u32 = 600_000;
/// The number of large responses that are read at once. Anyone may label a Pod as a relay's, and a slow Pod is waited
/// for no longer than [`TIMEOUT`].
const READ_AT_ONCE: usize = 4;
/// The limits of all responses that the process reads. The costliest response, some 60 MB when parsed, is parsed alone.
static INTAKE: Intake = Intake::new(MAX_STATE_BYTES, MAX_STATE_COST, READ_AT_ONCE, 1);
/// A user's own token may change at any time; a rejected one is read again at once, so this is only a precaution.
const TOKEN_LIVES: Duration = Duration::from_secs(3600);

/// Polls indefinitely; it ends when it is dropped.
pub async fn run(ctx: Arc<Context>, caches: Caches) {
    let client = match client() {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(%error, "failed to create an HTTP client; relays will not be polled");
            return future::pending().await;
        }
    };
    caches.ready().await;
    let mut schedule = Schedule::default();
    let mut polls = FuturesUnordered::new();
    let mut expectations = ctx.relays.expectations();
    loop {
        let relays = Relays::of(&caches);
        schedule.keep_only(&relays, &ctx, &caches);
        for (key, pods) in relays.by_provider {
            let entry = schedule.entry(&key);
            if entry.is_running || entry.due > Instant::now() {
                continue;
            }
            entry.is_running = true;
            polls.push(poll_relays(&ctx, &caches, &client, key, pods, entry.token.clone()));
        }
        tokio::select! {
            Some(result) = polls.next(), if !polls.is_empty() => record_poll(&ctx, &caches, &mut schedule, result),
            Ok(()) = expectations.changed() => schedule.advance_polls(&ctx),
            () = tokio::time::sleep_until(schedule.next_due()) => {}
        }
    }
}

fn client() -> reqwest::Result<reqwest::Client> {
    client_builder().build()
}

fn client_builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        // Pods are reached directly, whatever proxy the operator itself uses.
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(TIMEOUT)
        .pool_idle_timeout(Duration::from_secs(30))
}

/// The relay Pods of each Provider.
#[derive(Default)]
struct Relays {
    by_provider: HashMap<ObjectKey, Vec<RelayPod>>,
}

#[derive(Clone, Debug)]
struct RelayPod {
    name: String,
    address: Option<IpAddr>,
    is_leaving: bool,
    /// As its Pod was created: while a Provider changes to TLS, it has both kinds.
    speaks_tls: bool,
}

impl Relays {
    fn of(caches: &Caches) -> Self {
        let mut relays = Self::default();
        for pod in caches.relay_pods.state() {
            let Some(provider) = pod.labels().get(names::PROVIDER_LABEL) else { continue };
            let key = (pod.namespace().unwrap_or_default(), provider.clone());
            // Relays of a Provider that is now served by another one's, or of a predecessor of its name. That one's
            // report applies.
            if shared_relay(caches, &key).is_some() {
                continue;
            }
            relays.by_provider.entry(key).or_default().push(RelayPod::of(&pod));
        }
        relays
    }
}

impl RelayPod {
    fn of(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let ended = matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"));
        Self {
            name: pod.name_any(),
            address: status.and_then(|status| status.pod_ip.as_ref()).and_then(|ip| ip.parse().ok()),
            is_leaving: ended || pod.metadata.deletion_timestamp.is_some(),
            speaks_tls: speaks_tls(pod),
        }
    }
}

fn speaks_tls(pod: &Pod) -> bool {
    let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let relay = containers.find(|container| container.name == names::RELAY_CONTAINER);
    relay.is_some_and(|relay| relay.env.iter().flatten().any(|variable| variable.name == TLS_ENV))
}

/// The times at which Providers are polled.
#[derive(Default)]
struct Schedule {
    entries: HashMap<ObjectKey, ScheduledPoll>,
}

struct ScheduledPoll {
    due: Instant,
    is_running: bool,
    token: Option<Token>,
    /// The other Providers that the relays served at the last poll.
    sharers: Vec<ObjectKey>,
    /// The last expectation, and the time since which it applies.
    expected: Option<(Expectation, Instant)>,
}

#[derive(Clone)]
struct Token {
    header: HeaderValue,
    /// The client for relays that use TLS; `None` if the Provider has no certificate.
    tls: Option<Result<reqwest::Client, String>>,
    read_at: Instant,
}

impl Schedule {
    fn entry(&mut self, key: &ObjectKey) -> &mut ScheduledPoll {
        let new = || ScheduledPoll {
            due: Instant::now(),
            is_running: false,
            token: None,
            sharers: Vec::new(),
            expected: None,
        };
        self.entries.entry(key.clone()).or_insert_with(new)
    }

    /// Drops Providers without relay Pods. Those that still exist are known to have no workers and no requests.
    fn keep_only(&mut self, relays: &Relays, ctx: &Context, caches: &Caches) {
        let gone: Vec<ObjectKey> =
            self.entries.keys().filter(|key| !relays.by_provider.contains_key(*key)).cloned().collect();
        for key in gone {
            let sharers = self.entries.remove(&key).map(|entry| entry.sharers).unwrap_or_default();
            let is_served = serving_relay(caches, &key).is_some_and(|relay| relays.by_provider.contains_key(&relay));
            for key in Some(key).filter(|_| !is_served).into_iter().chain(sharers) {
                without_relays(ctx, caches, &key);
            }
        }
    }

    /// Makes a poll due at once if something new is expected or a new report is awaited.
    fn advance_polls(&mut self, ctx: &Context) {
        for (key, entry) in &mut self.entries {
            if std::iter::once(key).chain(&entry.sharers).any(|key| ctx.relays.is_wanted(&key.0, &key.1)) {
                entry.due = Instant::now();
            }
            let expected = ctx.relays.expected(&key.0, &key.1);
            if expected.as_ref() != entry.expected.as_ref().map(|(expectation, _)| expectation) {
                entry.expected = expected.map(|expectation| (expectation, Instant::now()));
                entry.due = Instant::now();
            }
        }
    }

    /// Returns when the next poll is due. A poll takes at most twice [`TIMEOUT`], and its end wakes the loop, so only
    /// the others are considered. The upper bound also finds new Pods.
    fn next_due(&self) -> Instant {
        let soonest = self.entries.values().filter(|entry| !entry.is_running).map(|entry| entry.due).min();
        let at_latest = Instant::now() + BRISK_INTERVAL;
        soonest.map_or(at_latest, |soonest| soonest.min(at_latest))
    }
}

/// The result of a poll.
struct PollResult {
    key: ObjectKey,
    /// Of the relays' owner, and of each other Provider that they serve.
    snapshots: Vec<(ObjectKey, RelaySnapshot)>,
    token: Option<Token>,
}

fn poll_relays(
    ctx: &Arc<Context>,
    caches: &Caches,
    client: &reqwest::Client,
    key: ObjectKey,
    pods: Vec<RelayPod>,
    token: Option<Token>,
) -> impl Future<Output = PollResult> + use<> {
    let (ctx, client) = (ctx.clone(), client.clone());
    let provider = caches.providers.get(&ObjectRef::new(&key.1).within(&key.0));
    let mut sharers = provider.as_deref().map(|owner| caches.sharers(owner)).unwrap_or_default();
    sharers.retain(|sharer| !caches.is_at_own_relay(sharer));
    let mut served = vec![(key.clone(), key.1.clone())];
    served.extend(sharers.iter().map(|sharer| (sharing::key(sharer), sharing::name_at_relay(sharer))));
    async move {
        let token = match (token.filter(|token| token.read_at.elapsed() < TOKEN_LIVES), provider) {
            (Some(token), _) => Ok(token),
            (None, Some(provider)) => read_token(&ctx, &provider).await,
            (None, None) => Err("the Provider no longer exists".to_owned()),
        };
        let queries = pods.into_iter().map(|pod| query(&ctx, &client, pod, token.as_ref()));
        let answers = future::join_all(queries).await;
        // The token or the certificate changed. The next poll reads them again.
        let refused = answers.iter().any(|answer| matches!(answer.answer, Err(Unanswered::Refused(_))));
        let snapshots = served.into_iter().map(|(key, name)| (key, snapshot(&name, &answers))).collect();
        PollResult { key, snapshots, token: token.ok().filter(|_| !refused) }
    }
}

fn record_poll(ctx: &Context, caches: &Caches, schedule: &mut Schedule, result: PollResult) {
    let PollResult { key, snapshots, token } = result;
    // It refers to another Provider since this poll began.
    if shared_relay(caches, &key).is_some() {
        schedule.entries.remove(&key);
        if serving_relay(caches, &key).is_none() {
            without_relays(ctx, caches, &key);
        }
        return;
    }
    let entry = schedule.entry(&key);
    let is_close = entry.expected.as_ref().is_some_and(|(expected, since)| {
        let confirmed = snapshots.first().is_some_and(|(_, own)| own.all_run(&expected.pods, &expected.hash));
        since.elapsed() < CLOSE_FOR && !confirmed
    });
    let of = |(key, snapshot): &(ObjectKey, RelaySnapshot)| interval(&caches.pools_of(&key.0, &key.1), snapshot);
    let usual = snapshots.iter().map(of).min().unwrap_or(INTERVAL);
    entry.is_running = false;
    entry.token = token;
    entry.due = Instant::now() + if is_close { CLOSE_INTERVAL } else { usual };
    let sharers = snapshots.iter().skip(1).map(|(key, _)| key.clone()).collect();
    let before = std::mem::replace(&mut entry.sharers, sharers);
    for left in before.iter().filter(|before| !entry.sharers.contains(before)) {
        without_relays(ctx, caches, left);
    }
    for (key, snapshot) in snapshots {
        keep(ctx, caches, &key, snapshot);
    }
}

/// Returns the Provider whose relay serves this one, if it refers to another and has left its own relay.
fn shared_relay(caches: &Caches, key: &ObjectKey) -> Option<ObjectKey> {
    let provider = caches.providers.get(&ObjectRef::new(&key.1).within(&key.0))?;
    let is_shared = provider.spec.relay_ref.is_some() && !caches.is_at_own_relay(&provider);
    is_shared.then(|| sharing::relay_key(&provider))
}

/// Returns the Provider that this one refers to, if its relay serves this one.
fn serving_relay(caches: &Caches, key: &ObjectKey) -> Option<ObjectKey> {
    let relay = shared_relay(caches, key)?;
    let owner = caches.providers.get(&ObjectRef::new(&relay.1).within(&relay.0))?;
    caches.sharers(&owner).iter().any(|sharer| sharing::key(sharer) == *key).then_some(relay)
}

/// Records that no relay serves a Provider: it has no workers and no requests.
fn without_relays(ctx: &Context, caches: &Caches, key: &ObjectKey) {
    if caches.providers.get(&ObjectRef::new(&key.1).within(&key.0)).is_none() {
        ctx.relays.forget(&key.0, &key.1);
    } else {
        keep(ctx, caches, key, RelaySnapshot::default());
    }
}

/// Returns the interval until the next poll of a Provider of which no confirmation is expected. Its first workers are
/// polled for more often, because users wait for them.
fn interval(pools: &[Arc<WorkerPool>], snapshot: &RelaySnapshot) -> Duration {
    let scales = pools.iter().any(|pool| pool.spec.scaling.is_some());
    let awaits_workers = !pools.is_empty() && snapshot.is_complete() && snapshot.serves_nothing();
    if scales || awaits_workers { BRISK_INTERVAL } else { INTERVAL }
}

/// Stores a snapshot, and notifies the Provider if it is new. Snapshots of a busy Provider always are, so its pools are
/// not notified: the ticker checks them every second.
fn keep(ctx: &Context, caches: &Caches, key: &ObjectKey, snapshot: RelaySnapshot) {
    if ctx.relays.keep(&key.0, &key.1, snapshot) {
        caches.triggers.provider_reported(&key.0, &key.1);
    }
}

async fn read_token(ctx: &Context, provider: &Provider) -> Result<Token, String> {
    let generated = || (names::admin_secret(&provider.name_any()), ADMIN_TOKEN.to_owned());
    let reference = &provider.spec.relay.admin_token_secret_ref;
    let (name, key) = reference.as_ref().map_or_else(generated, |own| (own.name.clone(), own.key.clone()));
    let api: Api<Secret> = Api::namespaced(ctx.client.clone(), &provider.namespace().unwrap_or_default());
    let secret = api.get_opt(&name).await.map_err(|error| format!("failed to read the admin token: {error}"))?;
    let bytes = secret.and_then(|secret| secret.data?.remove(&key));
    let text = bytes.and_then(|bytes| String::from_utf8(bytes.0).ok());
    let text = text.ok_or_else(|| format!("no admin token in Secret {name}, key {key}"))?;
    let mut header = HeaderValue::try_from(format!("Bearer {}", secret_of_file(&text)))
        .map_err(|_| format!("the admin token in Secret {name}, key {key}, must be a single line"))?;
    header.set_sensitive(true);
    Ok(Token { header, tls: tls::client(ctx, provider).await, read_at: Instant::now() })
}

/// A Pod and its response.
struct Answer {
    pod: RelayPod,
    answer: Result<RelayState, Unanswered>,
}

/// The reason that there is no response, as a human-readable line.
enum Unanswered {
    /// The relay rejects the token, or its certificate is not trusted.
    Refused(String),
    /// Any other reason.
    Silent(String),
}

async fn query(ctx: &Context, client: &reqwest::Client, pod: RelayPod, token: Result<&Token, &String>) -> Answer {
    let answer = match (pod.address, token) {
        (None, _) => Err(Unanswered::Silent("no address yet".to_owned())),
        (Some(_), Err(why)) => Err(Unanswered::Silent(why.clone())),
        (Some(address), Ok(token)) => {
            let port = u16::try_from(names::ADMIN_PORT).unwrap_or_default();
            let address = SocketAddr::new(address, port);
            let (code, answer) = match (pod.speaks_tls, &token.tls) {
                (false, _) => request(client, &format!("http://{address}"), token).await,
                (true, Some(Ok(client))) => request(client, &format!("https://{address}"), token).await,
                (true, Some(Err(why))) => (0, Err(Unanswered::Refused(why.clone()))),
                (true, None) => (0, Err(Unanswered::Refused("it still uses TLS".to_owned()))),
            };
            ctx.metrics.relay_polled(code);
            answer
        }
    };
    Answer { pod, answer }
}

async fn request(client: &reqwest::Client, base: &str, token: &Token) -> (u16, Result<RelayState, Unanswered>) {
    let url = format!("{base}/admin/state");
    let sent = client.get(url).header(AUTHORIZATION, token.header.clone()).send().await;
    let response = match sent {
        Ok(response) => response,
        // Without the URL: a Pod's address changes with every attempt to start it, and messages should not.
        Err(error) if error.is_timeout() => return (0, Err(Unanswered::Silent("request timed out".to_owned()))),
        Err(error) => return (0, Err(unreached(&error))),
    };
    let code = response.status().as_u16();
    let answer = match code {
        200 => body(response).await.map_err(Unanswered::Silent),
        401 | 403 => Err(Unanswered::Refused(format!("admin token rejected (HTTP {code})"))),
        _ => Err(Unanswered::Silent(format!("unexpected response HTTP {code}"))),
    };
    (code, answer)
}

/// Classifies a failed connection. A certificate error needs a user's action and is described; addresses and numbers of
/// system errors are not.
fn unreached(error: &reqwest::Error) -> Unanswered {
    let mut cause = error.source();
    while let Some(error) = cause {
        // A connection error contains the TLS error but does not return it as its source.
        let inside = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
        let tls = inside.and_then(|inside| inside.downcast_ref()).or_else(|| error.downcast_ref());
        if let Some(why @ rustls::Error::InvalidCertificate(_)) = tls {
            return Unanswered::Refused(format!("certificate rejected: {why}"));
        }
        cause = inside.map_or_else(|| error.source(), |inside| Some(inside));
    }
    Unanswered::Silent("connection failed".to_owned())
}

async fn body(response: reqwest::Response) -> Result<RelayState, String> {
    let read = INTAKE.read(reqwest::Body::from(response));
    let late = |_| "timed out reading the response".to_owned();
    let read = tokio::time::timeout(TIMEOUT, read).await.map_err(late)?;
    let read = read.map_err(|why| format!("response {why}"))?;
    serde_json::from_slice(&read.bytes).map_err(|error| format!("invalid response: {error}"))
}

/// Sums over relays; each worker is included once, however many relays it is connected to.
fn snapshot(provider: &str, answers: &[Answer]) -> RelaySnapshot {
    let mut snapshot = RelaySnapshot::default();
    let mut staying: HashSet<String> = HashSet::new();
    for Answer { pod, answer } in answers {
        match answer {
            Ok(state) => {
                snapshot.relays.insert(pod.name.clone(), Ok(state.report()));
                state.add_to(provider, &pod.name, &mut snapshot, &mut staying);
            }
            // A leaving Pod need not respond any more.
            Err(_) if pod.is_leaving => {}
            Err(Unanswered::Refused(why) | Unanswered::Silent(why)) => {
                if pod.address.is_none() {
                    snapshot.unreached.insert(pod.name.clone());
                }
                snapshot.relays.insert(pod.name.clone(), Err(why.clone()));
            }
        }
    }
    for (instance, worker) in &mut snapshot.workers {
        worker.draining = !staying.contains(instance);
    }
    if !snapshot.is_complete() {
        // The sums of the others would look like a loss.
        snapshot.usage = None;
    }
    snapshot
}
