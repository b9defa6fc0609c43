//! The driver `process` and a killed server: the clients' view, and what is left of the server.

use modelrelay_backends::engines::VLLM_START;
use modelrelay_backends::server::until;
use modelrelay_backends::worker_program;
use modelrelay_harness::TEST_TIMEOUT;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::wait_for_model;
use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::driver::launch::Launch;
use modelrelay_multiplexer::driver::process::{Process, ProcessModel};
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::{Driver, Probed};
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::Left;
use url::Url;

use crate::engine::{Engine, text_of, worker};
use crate::vllm::engine;

pub(crate) async fn process_dies_restarts_and_stops(command: Vec<String>) {
    let launch = Launch { command, ..Launch::default() };
    let model = Model::from(modelrelay_backends::engines::VLLM_MODEL);
    let served = ProcessModel { served: Served::new(model.clone()), launch, url: None };
    let driver = Process::new(vec![served], worker_program());

    let server = engine(load(&driver, &model).await);
    let first = Group::of(&server.url);
    clients_of_a_killed_server_get_errors(&server, &first).await;
    tokio::time::timeout(TEST_TIMEOUT, driver.ended(&model)).await.expect("the driver notices the end");
    until("no process of the server is left", async || first.is_empty()).await;
    assert_eq!(driver.probe(&model).await, Ok(Probed::gone()));

    let server = engine(load(&driver, &model).await);
    let second = Group::of(&server.url);
    assert!(second.processes().len() > 1, "the engine has processes of its own");
    text_of(&server.fetch(server.completion_request("/v1/completions", 5, false)).await);
    assert_eq!(driver.evict(&model).await, Ok(Left::Nothing));
    assert!(second.is_empty(), "{:?} are left", second.processes());
}

async fn load(driver: &Process, model: &Model) -> Url {
    let loaded = tokio::time::timeout(VLLM_START, driver.load(model, LoadKind::Cold)).await;
    loaded.expect("a load in time").unwrap_or_else(|failure| panic!("{failure}"));
    driver.url(model).expect("a loaded model has an address")
}

/// A stream ends with an error and without its end. A request without a first byte gets an error, after the relay has
/// searched for another worker.
async fn clients_of_a_killed_server_get_errors(server: &Engine, group: &Group) {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "3").start().await;
    let worker = worker(&relay, server, &server.url).await;
    wait_for_model(&relay, server.model).await;
    let mut stream = relay.send(server.completion_request("/v1/chat/completions", server.endless, true)).await;
    stream.read_until("data: ").await;
    let waiting = relay.begin(server.completion_request("/v1/chat/completions", server.endless, false));
    server.until_running(2).await;
    group.kill().await;
    let stream = stream.read_to_end().await;
    let text = stream.text();
    assert!(
        stream.error_frame().is_some() && text.contains(r#""code":"backend_reset""#) && !text.contains("[DONE]"),
        "{text}"
    );
    let waiting = waiting.reply().await.with_status(502).json();
    assert_eq!(waiting["error"]["code"], "backend_unreachable", "{waiting}");
    until("the worker withdraws the model", async || worker.probe("/healthz").await.json()["backend_up"] == false)
        .await;
}

/// The process group of a server.
struct Group(u32);

impl Group {
    /// Returns the group of the process that listens at this address, which its command line contains.
    fn of(url: &Url) -> Self {
        let port = format!("--port {}", url.port().expect("the URL has a port"));
        let [leader, ..] = modelrelay_backends::server::processes_with(&port)[..] else {
            panic!("no process has {port}")
        };
        Self(group_of(leader).expect("it runs"))
    }

    fn processes(&self) -> Vec<u32> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        processes.filter(|process| group_of(*process) == Some(self.0)).collect()
    }

    fn is_empty(&self) -> bool {
        self.processes().is_empty()
    }

    async fn kill(&self) {
        let group = format!("-{}", self.0);
        let killed = tokio::process::Command::new("kill").args(["-KILL", "--", &group]).status().await;
        assert!(killed.is_ok_and(|killed| killed.success()), "group {group} can be killed");
    }
}

/// Returns the process group of a running process.
fn group_of(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let is_over = matches!(fields.next(), Some("Z" | "X"));
    let group = fields.nth(1)?.parse().ok()?;
    (!is_over).then_some(group)
}
