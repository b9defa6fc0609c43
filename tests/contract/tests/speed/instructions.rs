//! The number of instructions that relay and worker execute for a request, and for a token of a stream.
//!
//! Computed as the difference between a run and one with more of the same, so that start and end are excluded. Each
//! token is sent when the previous one has arrived: no two are handled together, however busy the machine is.

use std::{net::SocketAddr, path::Path, time::Duration};

use modelrelay_harness::{
    cannot_run,
    client::{Connection, Request},
    fake_backend::{Answer, FakeBackend, sse},
    instructions::Instructions,
    poll_for,
    process::{Process, Spawn},
};
use serde_json::{Value, json};

/// The timeout for a start and an end under valgrind, on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// The factor over the baseline that is considered a regression; compilers and libraries differ by less.
const TOLERANCE: f64 = 1.15;

const SECRET: &str = "secret-of-the-counted-worker";
const REQUESTS: u64 = 200;
const TOKENS: u64 = 300;

/// The instructions of each program.
#[derive(Clone, Copy, Debug)]
struct Counted {
    relay: u64,
    worker: u64,
}

/// The instructions per unit in each program.
#[derive(Clone, Copy, Debug)]
struct Each {
    relay: f64,
    worker: f64,
}

impl Counted {
    fn each(self, more: Self, count: u64) -> Each {
        let each = |less: u64, more: u64| more.saturating_sub(less) as f64 / count as f64;
        Each { relay: each(self.relay, more.relay), worker: each(self.worker, more.worker) }
    }
}

/// Both programs, counted.
struct Rig {
    backend: FakeBackend,
    relay: Process,
    worker: Process,
    addr: SocketAddr,
    counts: [Instructions; 2],
    _folder: tempfile::TempDir,
}

impl Rig {
    async fn start() -> Option<Self> {
        let counts = [Instructions::new()?, Instructions::new()?];
        let folder = tempfile::tempdir().expect("a temporary folder");
        let backend = FakeBackend::start().await;
        let relay = Spawn::program("modelrelay-relay").env("LISTEN_ADDR", "127.0.0.1:0").env("WORKER_SECRET", SECRET);
        let relay = counts[0].of(relay).working_dir(folder.path()).start();
        let addr = printed(&relay, "listening on http://").await;
        let worker = Spawn::program("modelrelay-worker")
            .env("PROXY_URL", format!("http://{addr}"))
            .env("WORKER_SECRET", SECRET)
            .env("MODELS", "m")
            .env("BACKEND_URL", backend.url())
            .env("PROBE_ADDR", "127.0.0.1:0");
        let worker = counts[1].of(worker).working_dir(folder.path()).start();
        printed(&worker, "registered").await;
        let addr = addr.parse().expect("an address");
        Some(Self { backend, relay, worker, addr, counts, _folder: folder })
    }

    /// Does this amount of work, ends both programs, and returns the counts.
    async fn work(mut self, requests: u64, tokens: u64) -> Counted {
        let mut client = Connection::open(self.addr, self.relay.log()).await;
        self.requests(&mut client, requests).await;
        self.stream(&mut client, tokens).await;
        for process in [&mut self.worker, &mut self.relay] {
            process.terminate().await;
            assert!(process.wait_exit_within(TEST_TIMEOUT).await.success(), "{}", process.log().dump());
        }
        Counted { relay: self.counts[0].count(), worker: self.counts[1].count() }
    }

    async fn requests(&mut self, client: &mut Connection, count: u64) {
        let answer = Answer::new(200, &[("content-type", "application/json")], &vec![b'7'; 345]);
        for _ in 0..count {
            let request = client.send(chat(false));
            let (response, ()) = tokio::join!(request, async { self.backend.call().await.answer(&answer).await });
            let reply = response.read_to_end().await;
            assert!(reply.status == 200 && reply.body.len() == 345, "{} {}", reply.status, reply.text());
        }
    }

    async fn stream(&mut self, client: &mut Connection, tokens: u64) {
        let request = client.send(chat(true));
        let answered = async {
            let mut call = self.backend.call().await;
            call.read_body().await;
            call.start_stream().await;
            call
        };
        let (mut response, mut call) = tokio::join!(request, answered);
        for number in 0..tokens {
            let token = sse(&format!("{{\"choices\":[{{\"delta\":{{\"content\":\"{number:0>180}\"}}}}]}}"));
            call.chunk(&token).await;
            assert_eq!(response.read_at_least(token.len()).await, token, "token {number}");
        }
        call.end_stream().await;
        assert!(response.read_to_end().await.is_complete());
    }
}

fn chat(stream: bool) -> Request {
    let prompt = "p".repeat(270);
    Request::post(
        "/v1/chat/completions",
        &json!({"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]}),
    )
}

/// Returns what follows `mark` in the program's output, once it is printed.
async fn printed(process: &Process, mark: &str) -> String {
    let after = || process.log().lines().iter().find_map(|line| Some(line.split_once(mark)?.1.to_owned()));
    let rest = poll_for(TEST_TIMEOUT, async || after()).await;
    let rest = rest.unwrap_or_else(|| panic!("{mark:?} was not printed\n{}", process.log().dump()));
    rest.split(' ').next().unwrap_or_default().to_owned()
}

/// Returns the baseline in the repository.
fn baseline() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/baseline.json");
    let text = std::fs::read_to_string(&path).expect("the baseline is in the repository");
    serde_json::from_str(&text).expect("the baseline is JSON")
}

#[tokio::test]
async fn request_and_token_stay_within_instruction_baseline() {
    if !cfg!(target_arch = "x86_64") {
        return cannot_run("the baseline of instructions is of x86_64");
    }
    let Some(rig) = Rig::start().await else { return };
    let least = rig.work(REQUESTS, TOKENS).await;
    let more_requests = Rig::start().await.expect("valgrind is installed").work(2 * REQUESTS, TOKENS).await;
    let more_tokens = Rig::start().await.expect("valgrind is installed").work(REQUESTS, 2 * TOKENS).await;
    let request = least.each(more_requests, REQUESTS);
    let token = least.each(more_tokens, TOKENS);
    let measured = json!({
        "relay": {"request": request.relay.round(), "token": token.relay.round()},
        "worker": {"request": request.worker.round(), "token": token.worker.round()},
    });
    eprintln!("{measured}");
    let baseline = baseline();
    for (program, unit) in [("relay", "request"), ("relay", "token"), ("worker", "request"), ("worker", "token")] {
        let number = |of: &Value| of[program][unit].as_f64().expect("a number of instructions");
        let (now, before) = (number(&measured), number(&baseline));
        assert!(
            now <= before * TOLERANCE,
            "a {unit} takes {now} instructions of the {program}, {before} in bench/baseline.json; all: {measured}"
        );
        // A count of nothing would always pass.
        assert!(
            now >= before / 2.0,
            "a {unit} takes {now} instructions of the {program}: write them into bench/baseline.json"
        );
    }
}
