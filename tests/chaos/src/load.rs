//! Clients that ask without a pause, each with one request at a time, and keep the books.

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
    ask::Ask,
    dice::Dice,
    exchange::{Manner, Outcome, Record, exchange},
    ledger::Ledger,
};

/// By then every request must have ended: far beyond the request timeout of every scenario's relays, and what a busy machine adds to it.
const DEADLINE: Duration = Duration::from_secs(120);

/// Where a killed relay's client comes back to.
const PAUSE_AFTER_BROKEN: Duration = Duration::from_millis(20);

/// A relay as clients see it, also across its deaths.
#[derive(Debug)]
pub struct Target {
    addr: Mutex<SocketAddr>,
    kills: AtomicUsize,
    down: AtomicBool,
    out: AtomicBool,
    key: OnceLock<String>,
}

impl Target {
    /// The relay at this address.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Arc<Self> {
        let (kills, down, out) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { addr: Mutex::new(addr), kills, down, out, key: OnceLock::new() })
    }

    /// It is about to be killed: what breaks until [`Self::is_back`] has its reason.
    pub fn is_killed(&self) {
        self.down.store(true, Ordering::SeqCst);
        self.kills.fetch_add(1, Ordering::SeqCst);
    }

    /// It listens again.
    pub fn is_back(&self) {
        self.down.store(false, Ordering::SeqCst);
    }

    /// Wants this API key from now on.
    pub fn wants(&self, key: &str) {
        let _ = self.key.set(key.to_owned());
    }

    /// Takes it out of the balancing, or puts it back, as a load balancer does by its readiness.
    pub fn balance(&self, into: bool) {
        self.out.store(!into, Ordering::SeqCst);
    }

    /// It is somewhere else now.
    pub fn moved(&self, addr: SocketAddr) {
        *self.addr.lock().unwrap_or_else(PoisonError::into_inner) = addr;
    }

    fn addr(&self) -> SocketAddr {
        *self.addr.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request; a broken connection is excused where the relay was killed meanwhile.
    pub async fn exchange(&self, ask: &Ask, manner: Manner) -> Record {
        let kills = self.kills.load(Ordering::SeqCst);
        let down = self.down.load(Ordering::SeqCst);
        let key = manner.key.clone().or_else(|| self.key.get().cloned());
        let mut record = exchange(ask, self.addr(), Manner { key, ..manner }).await;
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

/// What a client asks next.
pub type Next = dyn Fn(u64, &mut Dice) -> Ask + Send + Sync;

/// How the clients behave.
pub struct Plan {
    /// How many at once.
    pub clients: usize,
    /// How many of 100 requests their clients leave.
    pub leave_percent: u64,
    /// A pause between two requests of a client, at most.
    pub pause: Duration,
    /// What they ask.
    pub next: Box<Next>,
}

impl Plan {
    /// So many clients, [`Ask::mixed`], of which some leave.
    #[must_use]
    pub fn mixed(clients: usize) -> Self {
        Self { leave_percent: 5, ..Self::of(clients, Ask::mixed) }
    }

    /// So many clients that ask this and never leave.
    #[must_use]
    pub fn of(clients: usize, next: impl Fn(u64, &mut Dice) -> Ask + Send + Sync + 'static) -> Self {
        Self { clients, leave_percent: 0, pause: Duration::from_millis(20), next: Box::new(next) }
    }
}

/// Clients at work. They stop when they are told, or are dropped.
pub struct Load {
    ledger: Arc<Ledger>,
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

impl Load {
    /// Sends them off, to all targets in turn.
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
            clients.spawn(client.ask_until(Arc::clone(&stop)));
        }
        Self { ledger, stop, clients }
    }

    /// The books.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Sends nothing more, waits for what was sent, and gives the books.
    ///
    /// # Panics
    /// When a client does.
    pub async fn finish(mut self) -> Arc<Ledger> {
        self.stop.store(true, Ordering::SeqCst);
        while let Some(client) = self.clients.join_next().await {
            client.expect("a client does not panic");
        }
        Arc::clone(&self.ledger)
    }
}

/// A nonce that no other request of this run has.
#[must_use]
pub fn new_nonce() -> u64 {
    static NONCE: AtomicU64 = AtomicU64::new(1);
    NONCE.fetch_add(1, Ordering::SeqCst)
}

#[expect(clippy::disallowed_methods, reason = "the pace of a client, which nothing waits for")]
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
    async fn ask_until(mut self, stop: Arc<AtomicBool>) {
        while !stop.load(Ordering::SeqCst) {
            let Some(target) = self.target() else {
                pause(PAUSE_AFTER_BROKEN).await;
                continue;
            };
            let ask = (self.plan.next)(new_nonce(), &mut self.dice);
            let leaves = self.dice.percent(self.plan.leave_percent);
            let leaves = leaves.then(|| Duration::from_millis(self.dice.between(0..=200)));
            self.ledger.sent();
            let record = target.exchange(&ask, Manner { leaves, ..Manner::patient(DEADLINE) }).await;
            let failed = matches!(record.outcome, Outcome::Failed(_) | Outcome::Broken(_));
            self.ledger.ended(record);
            if failed {
                pause(PAUSE_AFTER_BROKEN).await;
            }
            let longest = u64::try_from(self.plan.pause.as_millis()).unwrap_or(0);
            pause(Duration::from_millis(self.dice.between(0..=longest))).await;
        }
    }

    /// The next that the balancer has.
    fn target(&self) -> Option<Arc<Target>> {
        let all = self.targets.len();
        let first = self.turn.fetch_add(1, Ordering::SeqCst);
        let mut in_turn = (0..all).map(|step| &self.targets[(first + step) % all]);
        in_turn.find(|target| !target.out.load(Ordering::SeqCst)).cloned()
    }
}
