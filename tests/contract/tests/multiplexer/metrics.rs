//! A scrape of a worker with slots contains the documented names, and everything that the dashboard and the alerts
//! about slots query.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_relay::Ack;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::wait_for_model;
use serde_json::{Value, json};

use crate::fleet::chat;
use crate::rig::{self, LONG, Rig, Slot, worker_with};

const PREFIX: &str = "modelrelay_worker_";

/// The labels of each metric.
const LABELS: [(&str, &[&str]); 17] = [
    ("slot_state", &["slot", "state"]),
    ("resident_info", &["model", "slot"]),
    ("swaps_total", &["from", "reason", "result", "to"]),
    ("swap_phase_seconds", &["phase"]),
    ("swap_cost_ema_seconds", &["model"]),
    ("hold_seconds", &["model"]),
    ("waiting", &["model"]),
    ("leases", &["model"]),
    ("severed_total", &[]),
    ("swaps_aborted_total", &[]),
    ("linger_hits_total", &[]),
    ("linger_misses_total", &[]),
    ("coalesced_total", &[]),
    ("load_failures_total", &["model"]),
    ("memory_not_freed_total", &[]),
    ("residency_seconds", &["model"]),
    ("gpu_time_share", &["activity", "slot"]),
];

/// A label, the comparison operator, and the value.
type Matcher = (String, String, String);

/// The labels of each series of a scrape, by name.
type Scrape = BTreeMap<String, Vec<BTreeMap<String, String>>>;

/// Returns a scrape of a worker that has loaded a model, unloaded it for another, failed to load that, and returned to
/// the first.
async fn scrape() -> Scrape {
    let relay = Relay::start().await;
    let backend = FakeBackend::with_models(&["a", "broken"]).await;
    backend.answer_with(|_, _| Answer::json(200, &json!({})));
    let loaded = tempfile::tempdir().expect("a temporary folder");
    let file = loaded.path().join("a").display().to_string();
    let models = json!([
        {"id": "a", "url": backend.url(), "load": ["/bin/touch", file], "evict": ["/bin/rm", file], "alive": ["/usr/bin/test", "-e", file]},
        {"id": "broken", "url": backend.url(), "load": ["/bin/false"], "evict": ["/bin/true"], "alive": ["/bin/false"]},
    ]);
    let slots = json!([{"id": "gpu0", "driver": "hooks", "models": models}]);
    let yaml = json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": slots}}).to_string();
    let (_config, builder) = worker_with(&yaml);
    let url = format!("http://{}", relay.addr());
    let worker = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;
    wait_for_model(&relay, "broken").await;
    for (model, status) in [("a", 200), ("broken", 503), ("a", 200)] {
        relay.fetch(chat(model)).await.with_status(status);
    }
    // Requests are held only for relays that do not support slots.
    let mut held = Rig::start(&Ack::old(), &Slot::default()).await;
    let request = held.link.send_request(&rig::chat("a"));
    assert_eq!(held.link.reply_within(LONG, &request).await.expect("a response").status, 200);
    let held = held.worker.probe("/metrics").await.body;
    let held: Vec<_> = held.lines().filter(|line| line.contains("_hold_seconds")).collect();
    let text = format!("{}\n{}", worker.probe("/metrics").await.body, held.join("\n"));
    let mut scrape = Scrape::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let series = line.rsplit_once(' ').expect("a value").0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        scrape.entry(name.to_owned()).or_default().push(matchers(labels).into_iter().map(|(k, _, v)| (k, v)).collect());
    }
    scrape
}

/// Parses the matchers between braces: no value here contains a quote or a comma.
fn matchers(labels: &str) -> Vec<Matcher> {
    let pairs = labels.trim_end_matches('}').split(',').filter(|pair| !pair.is_empty());
    let part = |pair: &str| {
        let at = pair.find(['=', '!'])?;
        let (label, rest) = pair.split_at(at);
        let quote = rest.find('"')?;
        let value = rest[quote..].trim_matches('"');
        Some((label.to_owned(), rest[..quote].to_owned(), value.to_owned()))
    };
    pairs.map(|pair| part(pair).unwrap_or_else(|| panic!("not a label: {pair}"))).collect()
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all queries of the dashboard and the alerts about slots.
fn queries() -> Vec<String> {
    let board: Value = serde_json::from_str(&read("charts/modelrelay/files/dashboards/slots.json")).expect("JSON");
    let panels = board["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut queries: Vec<String> = targets.map(|target| target["expr"].as_str().expect("a query").to_owned()).collect();
    let rules = read("charts/modelrelay/files/rules/modelrelay.yaml");
    let group =
        rules.split("- name: ").find(|group| group.starts_with("modelrelay-slots")).expect("the group of slots");
    // Every line of an expression, without the human-readable texts.
    queries.extend(group.lines().filter(|line| line.contains(PREFIX) && !line.contains('#')).map(str::to_owned));
    queries
}

/// Returns each use of a metric: its name and its matchers.
fn metric_uses() -> Vec<(String, Vec<Matcher>)> {
    let mut uses = Vec::new();
    for query in queries() {
        // The names of recorded series contain colons.
        for (at, _) in query.match_indices(PREFIX).filter(|(at, _)| !query[..*at].ends_with(':')) {
            let rest = &query[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let selector = rest[end..].strip_prefix('{').and_then(|inner| inner.split('}').next()).unwrap_or_default();
            uses.push((rest[..end].to_owned(), matchers(selector)));
        }
    }
    uses
}

#[tokio::test]
async fn documented_and_queried_metrics_are_in_real_scrape() {
    let scrape = scrape().await;
    let manual = read("docs/multiplexer/worker.md");
    let names = manual.split("Metrics, all with").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("a list");
    let documented: BTreeSet<_> = names.split('`').skip(3).step_by(2).collect();
    let known: BTreeSet<_> = LABELS.iter().map(|(name, _)| *name).collect();
    assert_eq!(documented, known, "the manual lists others than this test");

    for (name, labels) in LABELS {
        let series = [name.to_owned(), format!("{name}_count")].map(|name| scrape.get(&format!("{PREFIX}{name}")));
        let found = series.into_iter().flatten().next().unwrap_or_else(|| panic!("{name} is not there: {scrape:#?}"));
        let its: Vec<_> = found[0].keys().map(String::as_str).collect();
        assert_eq!(its, labels, "the labels of {name}");
    }
    let activities: BTreeSet<_> =
        scrape["modelrelay_worker_gpu_time_share"].iter().map(|it| &*it["activity"]).collect();
    assert_eq!(activities, BTreeSet::from(["idle", "serving", "swapping"]));

    let uses = metric_uses();
    assert!(uses.len() > 30, "found too few queries: {uses:?}");
    // Prometheus adds the labels of the target.
    let added = ["namespace", "pod", "job"];
    for (name, matchers) in uses {
        let found = scrape.get(&name).unwrap_or_else(|| panic!("{name} is queried but is in no scrape"));
        for (label, how, value) in matchers.into_iter().filter(|(label, ..)| !added.contains(&&**label)) {
            let fits = |series: &BTreeMap<String, String>| match &*how {
                "=" => series.get(&label) == Some(&value),
                "=~" => value
                    .split('|')
                    .all(|one| found.iter().any(|series| series.get(&label).is_some_and(|it| it == one))),
                _ => panic!("{how} in a query for {name}"),
            };
            assert!(found.iter().any(fits), "{name} is queried with {label}{how}{value}: {found:?}");
        }
    }
}
