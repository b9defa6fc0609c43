//! The cost of each feature: all of them in turns, round after round, compared with a relay and a worker that have
//! none.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::{Extent, ScaleError, micros_each, other};
use crate::content::MODEL;
use crate::http::send_request;
use crate::load::{Load, Outcome, Until};
use crate::programs::Program;
use crate::systems::{How, Setup, Stack};
use crate::usage::Usage;

const CLIENTS: u32 = 32;
const PACE: Duration = Duration::from_millis(10);
const PACED_CHUNKS: u32 = 50;
const ADMIN: &str = "authorization: Bearer bench-admin-token\r\n";

/// The scrape interval of Prometheus here: fifteen times as often as usual.
const SCRAPE: Duration = Duration::from_secs(1);

/// The feature that is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    /// None.
    Plain,
    /// Each request has an API key.
    Keys,
    /// The metrics of relay and worker are scraped every second.
    Scraped,
    /// The worker has a multiplexer, whose one model is always loaded.
    Multiplexer,
    /// Two relays, each with half of the clients, and the worker linked to both.
    TwoRelays,
    /// A worker played by the benchmark, in the present protocol.
    Played,
    /// The same in the earlier protocol, which has only text.
    Text,
}

impl Feature {
    const ALL: [Self; 7] =
        [Self::Plain, Self::Keys, Self::Scraped, Self::Multiplexer, Self::TwoRelays, Self::Played, Self::Text];
}

/// The cost of a request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Costs {
    /// The feature that was on.
    pub feature: Feature,
    /// The median latency of plain responses, one request at a time; ms.
    pub alone_p50_ms: f64,
    /// Processor time of a request of 32 clients, relays and worker together; µs.
    pub request_micros: f64,
    /// The relays' part of it; µs.
    pub relay_request_micros: f64,
    /// Processor time of an event of a paced stream, relays and worker together; µs.
    pub chunk_micros: f64,
    /// The relays' part of it; µs.
    pub relay_chunk_micros: f64,
}

/// Runs all rounds. Features that are not available are added to `absent`.
pub(super) async fn all(
    setup: &Setup,
    extent: &Extent,
    absent: &mut Vec<String>,
    mut check: impl FnMut(&Outcome) -> Result<(), ScaleError>,
) -> Result<Vec<Costs>, ScaleError> {
    let mut features = Feature::ALL.to_vec();
    let mut rounds: Vec<Costs> = Vec::new();
    for _ in 0..extent.rounds {
        let mut missing = None;
        for feature in &features {
            match Rig::start(*feature, setup).await {
                Ok(rig) => rounds.push(rig.costs(*feature, extent.time(), &mut check).await?),
                Err(ScaleError::Absent(why)) => {
                    absent.push(format!("{feature:?}: {why}"));
                    missing = Some(*feature);
                }
                Err(error) => return Err(other(format!("{feature:?}: {error}"))),
            }
        }
        features.retain(|feature| Some(*feature) != missing);
    }
    Ok(rounds)
}

/// Relay and worker with a feature, and the load that uses it.
struct Rig {
    stack: Stack,
    second: Option<Stack>,
    load: Load,
    /// Scrapes the metrics until it is dropped.
    scrapes: JoinSet<()>,
    /// Files of its programs.
    folder: TempDir,
}

impl Rig {
    async fn start(feature: Feature, setup: &Setup) -> Result<Self, ScaleError> {
        let folder = tempfile::tempdir()?;
        let mut relay = vec![("MODELRELAY_ADMIN_TOKEN", "bench-admin-token".to_owned())];
        match feature {
            Feature::Keys => relay.push(("MODELRELAY_REQUIRE_API_KEYS", "true".to_owned())),
            Feature::TwoRelays => relay.push(("RELAY_COUNT", "2".to_owned())),
            Feature::Plain | Feature::Scraped | Feature::Multiplexer | Feature::Played | Feature::Text => {}
        }
        let stack = Stack::relay(&setup.programs, How { env: &relay, ..How::default() }).await?;
        let load = Load::new(stack.addr, Until::Requests(1));
        let mut rig = Self { stack, second: None, load, scrapes: JoinSet::new(), folder };
        rig.add_worker(feature, setup, &relay).await?;
        if feature == Feature::Keys {
            rig.load.header = key(rig.stack.addr).await?;
        }
        rig.stack.serves(Load { connections: 2, ..rig.load }).await?;
        if feature == Feature::Scraped {
            rig.scrape().await?;
        }
        Ok(rig)
    }

    async fn add_worker(
        &mut self,
        feature: Feature,
        setup: &Setup,
        relay: &[(&str, String)],
    ) -> Result<(), ScaleError> {
        let (programs, backend, addr) = (&setup.programs, setup.backend_addr, self.stack.addr);
        match feature {
            Feature::Played | Feature::Text => {
                let mut args = ["worker", "--relay", &addr.to_string()].map(str::to_owned).to_vec();
                args.extend((feature == Feature::Text).then(|| "--text".to_owned()));
                let bench = std::env::current_exe()?;
                let worker = Program::start("played", &bench, &args, &[], self.stack.folder())?;
                self.stack.workers.push(worker);
            }
            Feature::Multiplexer => {
                let env = multiplexed(&self.folder.path().join("worker.yaml"), backend)?;
                self.stack.add_worker(programs, backend, How { env: &env, ..How::default() })?;
            }
            Feature::TwoRelays => {
                let second = SocketAddr::from(([127, 0, 0, 2], addr.port()));
                let env = [relay, &[("LISTEN_ADDR", second.to_string())]].concat();
                let under = hosts(&self.folder.path().join("hosts"), &[addr, second])?;
                self.second = Some(Stack::relay(programs, How { env: &env, ..How::default() }).await?);
                let env = [("PROXY_URL", format!("dns+http://relays.bench:{}", addr.port()))];
                self.stack.add_worker(programs, backend, How { under: &under, env: &env })?;
                self.load.also = Some(second);
            }
            Feature::Plain | Feature::Keys | Feature::Scraped => {
                self.stack.add_worker(programs, backend, How::default())?;
            }
        }
        Ok(())
    }

    async fn scrape(&mut self) -> Result<(), ScaleError> {
        let mut addrs = vec![self.stack.addr];
        for worker in &mut self.stack.workers {
            addrs.push(worker.printed("probe server listening on http://").await?.parse().map_err(other)?);
        }
        for addr in addrs {
            self.scrapes.spawn(async move {
                let mut times = tokio::time::interval(SCRAPE);
                loop {
                    times.tick().await;
                    // A relay that does not respond is detected by the load.
                    let _ = send_request(addr, "GET", "/metrics", "", b"").await;
                }
            });
        }
        Ok(())
    }

    /// Runs one client, 32 clients, and 32 paced streams.
    async fn costs(
        self,
        feature: Feature,
        time: Duration,
        check: &mut impl FnMut(&Outcome) -> Result<(), ScaleError>,
    ) -> Result<Costs, ScaleError> {
        let load = Load { connections: CLIENTS, until: Until::Elapsed(time), ..self.load };
        check(&Load { until: Until::Requests(20), ..load }.run().await)?;
        let alone = Load { connections: 1, until: Until::Elapsed(time / 2), ..load }.run().await;
        check(&alone)?;
        let before = self.usage()?;
        let plain = load.run().await;
        let between = self.usage()?;
        check(&plain)?;
        let paced = Load { chunks: PACED_CHUNKS, gap: PACE, ..load }.run().await;
        let after = self.usage()?;
        check(&paced)?;
        self.stack.stop().await;
        Ok(Costs {
            feature,
            alone_p50_ms: alone.latency.p50_ms,
            request_micros: micros_each((between.1 - before.1).cpu, plain.right),
            relay_request_micros: micros_each((between.0 - before.0).cpu, plain.right),
            chunk_micros: micros_each((after.1 - between.1).cpu, paced.events),
            relay_chunk_micros: micros_each((after.0 - between.0).cpu, paced.events),
        })
    }

    /// The usage of the relays, and of all programs.
    fn usage(&self) -> Result<(Usage, Usage), ScaleError> {
        let second = self.second.as_ref().map(Stack::usage).transpose()?.unwrap_or_default();
        Ok((self.stack.relay.usage()? + second, self.stack.usage()? + second))
    }
}

/// Creates an API key and returns it as a header. It is kept until the program ends: every request of the load borrows
/// it.
async fn key(relay: SocketAddr) -> Result<&'static str, ScaleError> {
    let (status, body) = send_request(relay, "POST", "/admin/keys", ADMIN, br#"{"name":"bench"}"#).await?;
    let key: serde_json::Value = serde_json::from_slice(&body).map_err(other)?;
    let secret = key["secret"].as_str().ok_or_else(|| other(format!("no API key was created: {status} {key}")))?;
    Ok(Box::leak(format!("authorization: Bearer {secret}\r\n").into_boxed_str()))
}

/// The settings of a worker whose multiplexer has one slot with one model, which is always loaded.
fn multiplexed(file: &Path, backend: SocketAddr) -> Result<Vec<(&'static str, String)>, ScaleError> {
    let model = format!("{{id: {MODEL}, url: \"http://{backend}\", maxConcurrency: 4096}}");
    let text = format!("multiplexer:\n  slots:\n  - id: one\n    driver: static\n    models:\n    - {model}\n");
    std::fs::write(file, text)?;
    let without = ["BACKEND_URL", "MODELS", "MAX_CONCURRENCY"].map(|name| (name, String::new()));
    let config = ("WORKER_CONFIG", file.to_string_lossy().into_owned());
    Ok(without.into_iter().chain([config]).collect())
}

/// The command under which `relays.bench` resolves to these addresses for a program.
fn hosts(file: &Path, addrs: &[SocketAddr]) -> Result<Vec<String>, ScaleError> {
    let lines: String = addrs.iter().map(|addr| format!("{} relays.bench\n", addr.ip())).collect();
    std::fs::write(file, format!("127.0.0.1 localhost\n{lines}"))?;
    let script = format!("mount --bind '{}' /etc/hosts && exec \"$0\" \"$@\"", file.display());
    let mut why = String::new();
    for privilege in [&[][..], &["--user", "--map-root-user"]] {
        let under: Vec<_> = [&["unshare"][..], privilege, &["--mount", "sh", "-c", &script]].concat();
        match Command::new(under[0]).args(&under[1..]).arg("true").output() {
            Ok(output) if output.status.success() => return Ok(under.into_iter().map(str::to_owned).collect()),
            Ok(output) => why = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => why = error.to_string(),
        }
    }
    Err(ScaleError::Absent(format!("a name with two addresses needs a mount namespace: {why}")))
}
