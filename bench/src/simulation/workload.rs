//! Typical clients of multiplexers: a busy model and a rare one, open arrivals, assistants that alternate between
//! models.

use std::time::Duration;

use super::rng::Rng;
use super::{Job, ModelId, Time};

/// The average duration of a response, in seconds.
const SERVICE: f64 = 3.0;

/// The same for a saturated model.
const SATURATED_SERVICE: f64 = 4.0;

/// The spread of the responses' durations.
const SERVICE_SIGMA: f64 = 0.6;

/// The average pause of an assistant between two turns, in seconds: it reads, or runs a tool.
const THINKING: f64 = 1.0;

const THINKING_SIGMA: f64 = 0.5;

/// Clients that send requests.
pub trait Workload {
    /// Their first requests.
    fn begin(&mut self) -> Vec<(Time, Job)>;
    /// The next requests of a client after a response.
    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)>;
}

/// The kinds of clients that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Eight clients keep model 0 busy without a pause; one request a minute is for model 1.
    Saturated,
    /// A request every two seconds, for either of two models.
    PoissonEven,
    /// A request every 1.4 s, one in twenty for the rare model.
    PoissonRare,
    /// A request every two seconds, for three models: 60, 30, 10 %.
    PoissonThree,
    /// Orchestrators, each with one turn of model 0 and then in parallel two workers of model 1 and one of model 2, of
    /// five turns each.
    Orchestrators(usize),
    /// Assistants with six turns of model 0 and then four of model 1.
    Assistants(usize),
    /// One assistant that alternates between the models.
    Alternating,
}

impl Kind {
    /// All kinds that are compared.
    pub const ALL: [Self; 9] = [
        Self::Saturated,
        Self::PoissonEven,
        Self::PoissonRare,
        Self::PoissonThree,
        Self::Orchestrators(1),
        Self::Orchestrators(2),
        Self::Assistants(2),
        Self::Assistants(4),
        Self::Alternating,
    ];

    /// The name in the table.
    pub fn name(self) -> String {
        match self {
            Self::Saturated => "A saturated by 8 clients, a B request a minute".into(),
            Self::PoissonEven => "Poisson, 50/50".into(),
            Self::PoissonRare => "Poisson, 95/5".into(),
            Self::PoissonThree => "Poisson, 60/30/10".into(),
            Self::Orchestrators(1) => "1 orchestrator: A, then in parallel 2 × B and 1 × C of 5 turns".into(),
            Self::Orchestrators(n) => format!("{n} orchestrators of the same kind"),
            Self::Assistants(n) => format!("{n} assistants, 6 turns A then 4 turns B"),
            Self::Alternating => "1 assistant strictly alternating A, B".into(),
        }
    }

    /// The number of models.
    pub fn models(self) -> usize {
        match self {
            Self::PoissonThree | Self::Orchestrators(_) => 3,
            Self::Saturated | Self::PoissonEven | Self::PoissonRare | Self::Assistants(_) | Self::Alternating => 2,
        }
    }

    /// The model whose longest wait is reported; `None` for all.
    pub fn watched(self) -> Option<ModelId> {
        match self {
            Self::Saturated | Self::PoissonRare => Some(1),
            Self::PoissonEven
            | Self::PoissonThree
            | Self::Orchestrators(_)
            | Self::Assistants(_)
            | Self::Alternating => None,
        }
    }

    /// Its clients.
    pub fn clients(self, seed: u64) -> Box<dyn Workload> {
        let rng = Rng::new(seed);
        match self {
            Self::Saturated => Box::new(Saturated { busy: Busy { rng, models: vec![0; 8] }, rare: 1 }),
            Self::PoissonEven => Box::new(Poisson { rng, every: 2.0, shares: vec![0.5, 0.5] }),
            Self::PoissonRare => Box::new(Poisson { rng, every: 1.4, shares: vec![0.95, 0.05] }),
            Self::PoissonThree => Box::new(Poisson { rng, every: 2.0, shares: vec![0.6, 0.3, 0.1] }),
            Self::Orchestrators(orchestrators) => {
                Box::new(Orchestrators { rng, orchestrators, left: vec![Vec::new(); orchestrators] })
            }
            Self::Assistants(assistants) => {
                let turns = [vec![0; 6], vec![1; 4]].concat();
                Box::new(Assistants { rng, turns, at: vec![0; assistants], thinking: true })
            }
            Self::Alternating => Box::new(Assistants { rng, turns: vec![0, 1], at: vec![0], thinking: false }),
        }
    }
}

/// Clients without a pause, and one request a minute for another model.
#[derive(Debug)]
pub struct Saturated {
    /// The clients.
    pub busy: Busy,
    /// The other model.
    pub rare: ModelId,
}

impl Workload for Saturated {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        let mut jobs = self.busy.begin();
        let phase = Duration::from_secs_f64(self.busy.rng.unit() * 60.0);
        for minute in 0..60 {
            let service = self.busy.rng.lognormal(SERVICE, SERVICE_SIGMA);
            let client = self.busy.models.len();
            jobs.push((phase + Duration::from_secs(60 * minute), Job { client, model: self.rare, service }));
        }
        jobs
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        if answered.model == self.rare { Vec::new() } else { self.busy.after(answered, now) }
    }
}

/// Clients that send their next request as soon as they have a response, each for a model of its own.
#[derive(Clone, Debug)]
pub struct Busy {
    /// The source of their responses' durations.
    pub rng: Rng,
    /// The model of each client.
    pub models: Vec<ModelId>,
}

impl Busy {
    fn job(&mut self, client: usize) -> Job {
        let service = self.rng.lognormal(SATURATED_SERVICE, SERVICE_SIGMA);
        Job { client, model: self.models[client], service }
    }
}

impl Workload for Busy {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        (0..self.models.len()).map(|client| (Duration::ZERO, self.job(client))).collect()
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        vec![(now, self.job(answered.client))]
    }
}

#[derive(Debug)]
struct Poisson {
    rng: Rng,
    every: f64,
    shares: Vec<f64>,
}

impl Workload for Poisson {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        let mut at = Duration::ZERO;
        let mut jobs = Vec::new();
        while at < Duration::from_secs(3600) {
            at += self.rng.exponential(self.every);
            let model = self.rng.weighted(&self.shares);
            jobs.push((at, Job { client: 0, model, service: self.rng.lognormal(SERVICE, SERVICE_SIGMA) }));
        }
        jobs
    }

    fn after(&mut self, _: &Job, _: Time) -> Vec<(Time, Job)> {
        Vec::new()
    }
}

/// Client `3 * n` is the orchestrator `n` or its first worker of model 1, `3 * n + 1` the second, `3 * n + 2` the one
/// of model 2.
#[derive(Debug)]
struct Orchestrators {
    rng: Rng,
    orchestrators: usize,
    /// The remaining turns of each worker, while workers run.
    left: Vec<Vec<u32>>,
}

impl Orchestrators {
    const TURNS: u32 = 5;

    fn job(&mut self, client: usize, model: ModelId) -> Job {
        Job { client, model, service: self.rng.lognormal(SERVICE, SERVICE_SIGMA) }
    }

    fn thought(&mut self, now: Time) -> Time {
        now + self.rng.lognormal(THINKING, THINKING_SIGMA)
    }
}

impl Workload for Orchestrators {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        (0..self.orchestrators).map(|n| (Duration::ZERO, self.job(3 * n, 0))).collect()
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        let (n, worker) = (answered.client / 3, answered.client % 3);
        if answered.model == 0 {
            self.left[n] = vec![Self::TURNS; 3];
            return (0..3).map(|worker| (now, self.job(3 * n + worker, if worker == 2 { 2 } else { 1 }))).collect();
        }
        self.left[n][worker] -= 1;
        let next = if self.left[n][worker] > 0 {
            self.job(answered.client, answered.model)
        } else if self.left[n].iter().all(|left| *left == 0) {
            self.job(3 * n, 0)
        } else {
            return Vec::new();
        };
        vec![(self.thought(now), next)]
    }
}

/// Clients that repeat the same turns.
#[derive(Debug)]
pub struct Assistants {
    /// The source of their responses' durations.
    pub rng: Rng,
    /// The model of each turn.
    pub turns: Vec<ModelId>,
    /// The turn at which each assistant begins, and then is.
    pub at: Vec<usize>,
    /// True if they pause between two turns.
    pub thinking: bool,
}

impl Assistants {
    fn job(&mut self, client: usize) -> Job {
        let model = self.turns[self.at[client] % self.turns.len()];
        Job { client, model, service: self.rng.lognormal(SERVICE, SERVICE_SIGMA) }
    }
}

impl Workload for Assistants {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        (0..self.at.len()).map(|client| (Duration::from_millis(100 * client as u64), self.job(client))).collect()
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        self.at[answered.client] += 1;
        let thinking = if self.thinking { self.rng.lognormal(THINKING, THINKING_SIGMA) } else { Duration::ZERO };
        vec![(now + thinking, self.job(answered.client))]
    }
}

/// Requests that are all known in advance.
#[derive(Clone, Debug)]
pub struct Planned(pub Vec<(Time, Job)>);

impl Workload for Planned {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        self.0.clone()
    }

    fn after(&mut self, _: &Job, _: Time) -> Vec<(Time, Job)> {
        Vec::new()
    }
}
