//! The time to the first token with client, relay and worker on machines of their own: in three network namespaces,
//! with a cable between each two. The backend runs next to the worker.

use std::net::SocketAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::namespaces::{Namespaces, Place};
use super::{Extent, ScaleError};
use crate::load::Outcome;
use crate::programs::Program;
use crate::samples::median;
use crate::systems::{How, Setup, Stack};

/// Fixed, because no other program is in these networks.
const BACKEND_PORT: u16 = 8000;
const RELAY_PORT: u16 = 8080;

/// The same as in `make bench`: 32 streams of half a second, an event every 10 ms.
const STREAMS: [&str; 6] = ["--connections", "32", "--chunks", "50", "--gap-ms", "10"];

/// Twenty tokens a second, for ten seconds.
const READERS: [&str; 6] = ["--requests", "1", "--chunks", "200", "--gap-ms", "50"];

/// The part of the open streams that all read at that speed: client, relay, worker and backend share this machine.
const LOADED_PART: u32 = 5;

/// The measurements of one way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Way {
    /// True if relay and worker were in between.
    pub is_relayed: bool,
    /// The median latency of plain responses to one client, ms: the median of the rounds.
    pub alone_p50_ms: f64,
    /// The median time to the first event, ms.
    pub first_p50_ms: f64,
    /// The 99th percentile of the same, ms.
    pub first_p99_ms: f64,
    /// First events of all rounds.
    pub first_events: u64,
    /// The number of them that came after 35 to 50 ms.
    pub stalls: u64,
}

/// Many streams at reading speed: the point at which the arithmetic of capacity is checked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Loaded {
    /// Streams at once.
    pub streams: u32,
    /// Their tokens a second, all together.
    pub tokens_a_second: f64,
    /// The processor time of the relay, in cores.
    pub relay_cores: f64,
}

/// Measures direct and relayed in turns, then many streams through the relay. The client is a program of its own,
/// because it is in a network of its own.
pub(super) async fn measure(
    setup: &Setup,
    extent: &Extent,
    mut check: impl FnMut(&Outcome) -> Result<(), ScaleError>,
) -> Result<(Vec<Way>, Loaded), ScaleError> {
    let namespaces = Namespaces::new().map_err(ScaleError::Absent)?;
    let folder = tempfile::tempdir()?;
    // Stopped before the networks are deleted.
    let (_backend, mut stack) = start(setup, &namespaces, folder.path()).await?;
    let client = Client { under: namespaces.under(Place::Client), seconds: extent.seconds.to_string() };
    let direct = format!("{}:{BACKEND_PORT}", Namespaces::address(Place::Client, Place::Worker));
    let relayed = format!("{}:{RELAY_PORT}", Namespaces::address(Place::Client, Place::Relay));
    for worker in &mut stack.workers {
        worker.printed("registered").await?;
    }
    let mut rounds = [Rounds::default(), Rounds::default()];
    for to in [&direct, &relayed] {
        check(&client.run_load(to, &["--connections", "32", "--requests", "20"]).await?)?;
    }
    for _ in 0..extent.rounds {
        for (to, rounds) in [&direct, &relayed].into_iter().zip(&mut rounds) {
            let alone = client.run_load(to, &["--seconds", &client.seconds]).await?;
            check(&alone)?;
            let paced = client.run_load(to, &[&STREAMS[..], &["--seconds", &client.seconds]].concat()).await?;
            check(&paced)?;
            rounds.0.push((alone, paced));
        }
    }
    let [direct, way] = rounds.map(|rounds| rounds.way());
    let streams = extent.streams.div_ceil(LOADED_PART);
    let before = stack.relay.usage()?;
    let count = streams.to_string();
    let loaded = client.run_load(&relayed, &[&["--connections", &count][..], &READERS].concat()).await?;
    let used = stack.relay.usage()? - before;
    check(&loaded)?;
    let loaded = Loaded {
        streams,
        tokens_a_second: loaded.events as f64 / loaded.seconds,
        relay_cores: used.cpu.as_secs_f64() / loaded.seconds,
    };
    Ok((vec![direct, Way { is_relayed: true, ..way }], loaded))
}

async fn start(setup: &Setup, namespaces: &Namespaces, folder: &Path) -> Result<(Program, Stack), ScaleError> {
    let beside_worker = namespaces.under(Place::Worker);
    let everywhere = SocketAddr::from(([0, 0, 0, 0], BACKEND_PORT));
    let (bench, listen) = (std::env::current_exe()?, everywhere.to_string());
    let args: Vec<_> = [&beside_worker[1..], &[bench.to_string_lossy().into_owned()]].concat();
    let args = [args, ["backend", "--listen", &listen].map(str::to_owned).to_vec()].concat();
    let mut backend = Program::start("backend", Path::new(&beside_worker[0]), &args, &[], folder)?;
    backend.printed("listening on http://").await?;
    let relay = [("LISTEN_ADDR", SocketAddr::from(([0, 0, 0, 0], RELAY_PORT)).to_string())];
    let under = namespaces.under(Place::Relay);
    let mut stack = Stack::relay(&setup.programs, How { under: &under, env: &relay }).await?;
    let relay = Namespaces::address(Place::Worker, Place::Relay);
    let worker = [("PROXY_URL", format!("http://{relay}:{RELAY_PORT}"))];
    let local = SocketAddr::from(([127, 0, 0, 1], BACKEND_PORT));
    stack.add_worker(&setup.programs, local, How { under: &beside_worker, env: &worker })?;
    Ok((backend, stack))
}

/// The client in its network.
struct Client {
    under: Vec<String>,
    seconds: String,
}

impl Client {
    /// Runs this program's `load`, which prints an [`Outcome`].
    async fn run_load(&self, to: &str, args: &[&str]) -> Result<Outcome, ScaleError> {
        let mut command = Command::new(&self.under[0]);
        command.args(&self.under[1..]).arg(std::env::current_exe()?).args(["load", "--to", to]).args(args);
        let output = command.kill_on_drop(true).output().await?;
        serde_json::from_slice(&output.stdout).map_err(|error| {
            let stderr = String::from_utf8_lossy(&output.stderr);
            ScaleError::Other(format!("the client exited without results ({error}): {}", stderr.trim()))
        })
    }
}

/// For each round, the outcomes of one client alone and of 32 streams.
#[derive(Default)]
struct Rounds(Vec<(Outcome, Outcome)>);

impl Rounds {
    fn way(&self) -> Way {
        let of = |value: fn(&(Outcome, Outcome)) -> f64| median(self.0.iter().map(value)).unwrap_or_default();
        Way {
            is_relayed: false,
            alone_p50_ms: of(|(alone, _)| alone.latency.p50_ms),
            first_p50_ms: of(|(_, paced)| paced.first_event.p50_ms),
            first_p99_ms: of(|(_, paced)| paced.first_event.p99_ms),
            first_events: self.0.iter().map(|(_, paced)| paced.first_event.count).sum(),
            stalls: self.0.iter().map(|(_, paced)| paced.first_event.stalls).sum(),
        }
    }
}
