//! Clients that send requests continuously, one at a time each, and record the results.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::task::JoinSet;

use crate::{
    dice::Dice,
    exchange::{Manner, Outcome, Record, exchange},
    ledger::Ledger,
    request::RequestSpec,
};

/// The deadline of every request: far beyond the request timeout of every scenario's relays, and the delays of a busy
/// machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// The pause of a killed relay's client before its next request.
const PAUSE_AFTER_BROKEN: Duration = Duration::from_millis(20);

/// A relay as clients see it, across restarts.
#[derive(Debug)]
pub struct Target {
    addr: Mutex<SocketAddr>,
    kills: AtomicUsize,
    down: AtomicBool,
    out: AtomicBool,
    key: OnceLock<String>,
}

impl Target {
    /// Creates the target for the relay at this address.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Arc<Self> {
        let (kills, down, out) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { addr: Mutex::new(addr), kills, down, out, key: OnceLock::new() })
    }

    /// Records that it is about to be killed: connections that break until [`Self::is_back`] are excused.
    pub fn is_killed(&self) {
        self.down.store(true, Ordering::SeqCst);
        self.kills.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that it listens again.
    pub fn is_back(&self) {
        self.down.store(false, Ordering::SeqCst);
    }

    /// Sets the API key to present from now on.
    pub fn wants(&self, key: &str) {
        let _ = self.key.set(key.to_owned());
    }

    /// Removes it from the balancing, or adds it again, as a load balancer does by its readiness.
    pub fn balance(&self, into: bool) {
        self.out.store(!into, Ordering::SeqCst);
    }

    /// Sets its new address.
    pub fn moved(&self, addr: SocketAddr) {
        *self.addr.lock().unwrap_or_else(PoisonError::into_inner) = addr;
    }

    fn addr(&self) -> SocketAddr {
        *self.addr.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request; a broken connection is excused if the relay was killed meanwhile.
    pub async fn exchange(&self, spec: &RequestSpec, manner: Manner) -> Record {
        let kills = self.kills.load(Ordering::SeqCst);
        let down = self.down.load(Ordering::SeqCst);
        let key = manner.key.clone().or_else(|| self.key.get().cloned());
        let mut record = exchange(spec, self.addr(), Manner { key, ..manner }).await;
        let killed = down || self.kills.load(Ordering::SeqCst) != kills;
        let broken = match &record.outcome {
            Outcome::Broken(_) => true,
            Outcome::Failed(reason) => reason == "JSON body cut",
            Outcome::Answered | Outcome::Cancelled | Outcome::Lost(_) => false,
        };
        if killed && broken {
            record.outcome = Outcome::Failed("relay gone".to_owned());
        }
        record
    }
}

/// Returns a client's next request.
pub type Next = dyn Fn(u64, &mut Dice) -> RequestSpec + Send + Sync;

/// The clients' behaviour.
pub struct Plan {
    /// The number of clients.
    pub clients: usize,
    /// The percentage of requests that their clients abandon.
    pub leave_percent: u64,
    /// The longest pause between two requests of a client.
    pub pause: Duration,
    /// The requests.
    pub next: Box<Next>,
}

impl Plan {
    /// This number of clients with [`RequestSpec::mixed`] requests, some of which are abandoned.
    #[must_use]
    pub fn mixed(clients: usize) -> Self {
        Self { leave_percent: 5, ..Self::of(clients, RequestSpec::mixed) }
    }

    /// The same with turns of a few conversations.
    #[must_use]
    pub fn of_conversations(clients: usize) -> Self {
        Self { leave_percent: 5, ..Self::of(clients, RequestSpec::of_conversations) }
    }

    /// This number of clients with these requests, none of which is abandoned.
    #[must_use]
    pub fn of(clients: usize, next: impl Fn(u64, &mut Dice) -> RequestSpec + Send + Sync + 'static) -> Self {
        Self { clients, leave_percent: 0, pause: Duration::from_millis(20), next: Box::new(next) }
    }
}

/// Running clients. They stop with [`Self::finish`], or when dropped.
pub struct Load {
    ledger: Arc<Ledger>,
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

impl Load {
    /// Starts the clients, which use all targets in turn.
    #[must_use]
    pub fn start(plan: Plan, targets: &[Arc<Target>], dice: &mut Dice) -> Self {
        let (ledger, stop) = (Arc::new(Ledger::default()), Arc::new(AtomicBool::new(false)));
        let (plan, turn) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)));
        let mut clients = JoinSet::new();
        for _ in 0..plan.clients {
            let client = Client {
                plan: Arc::clone(&plan),
                ledger: Arc::clone(&ledger),
                targets: targets.to_vec(),
                turn: Arc::clone(&turn),
                dice: Dice::of(dice.throw()),
            };
            clients.spawn(client.send_until(Arc::clone(&stop)));
        }
        Self { ledger, stop, clients }
    }

    /// Returns the ledger.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Sends nothing more, waits for pending requests, and returns the ledger.
    ///
    /// # Panics
    /// If a client panics.
    pub async fn finish(mut self) -> Arc<Ledger> {
        self.stop.store(true, Ordering::SeqCst);
        while let Some(client) = self.clients.join_next().await {
            client.expect("a client does not panic");
        }
        Arc::clone(&self.ledger)
    }
}

/// Returns a nonce that no other request of this run has.
#[must_use]
pub fn new_nonce() -> u64 {
    static NONCE: AtomicU64 = AtomicU64::new(1);
    NONCE.fetch_add(1, Ordering::SeqCst)
}

#[expect(clippy::disallowed_methods, reason = "the pace of a client")]
async fn pause(duration: Duration) {
    tokio::time::sleep(duration).await;
}

struct Client {
    plan: Arc<Plan>,
    ledger: Arc<Ledger>,
    targets: Vec<Arc<Target>>,
    turn: Arc<AtomicUsize>,
    dice: Dice,
}

impl Client {
    async fn send_until(mut self, stop: Arc<AtomicBool>) {
        while !stop.load(Ordering::SeqCst) {
            let Some(target) = self.target() else {
                pause(PAUSE_AFTER_BROKEN).await;
                continue;
            };
            let spec = (self.plan.next)(new_nonce(), &mut self.dice);
            let leaves = self.dice.percent(self.plan.leave_percent);
            let leaves = leaves.then(|| Duration::from_millis(self.dice.between(0..=200)));
            self.ledger.sent();
            let record = target.exchange(&spec, Manner { leaves, ..Manner::patient(DEADLINE) }).await;
            let failed = matches!(record.outcome, Outcome::Failed(_) | Outcome::Broken(_));
            self.ledger.ended(record);
            if failed {
                pause(PAUSE_AFTER_BROKEN).await;
            }
            let longest = u64::try_from(self.plan.pause.as_millis()).unwrap_or(0);
            pause(Duration::from_millis(self.dice.between(0..=longest))).await;
        }
    }

    /// Returns the next target in the balancing.
    fn target(&self) -> Option<Arc<Target>> {
        let all = self.targets.len();
        let first = self.turn.fetch_add(1, Ordering::SeqCst);
        let mut in_turn = (0..all).map(|step| &self.targets[(first + step) % all]);
        in_turn.find(|target| !target.out.load(Ordering::SeqCst)).cloned()
    }
}
