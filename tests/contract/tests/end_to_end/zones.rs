//! One address over several zones: two relays in one of them, and workers in all.

use std::collections::BTreeMap;

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::WorkerProcess;
use serde_json::json;

use crate::support::{Load, eventually};

const CHAT: &str = "/v1/chat/completions";

/// The workers of one zone, and the network between them and the relays.
struct Zone {
    name: &'static str,
    network: Balancer,
    backend: FakeBackend,
    _worker: WorkerProcess,
}

impl Zone {
    async fn start(relays: &[&Relay], name: &'static str, cluster: &str, slots: u32) -> Self {
        let (network, backend) = (Balancer::start(relays).await, FakeBackend::start().await);
        let worker = WorkerProcess::builder().relay(network.url()).backend(backend.url()).concurrency(slots);
        let worker = worker.env("WORKER_SECRET", WORKER_SECRET).env("WORKER_NAME", name);
        let worker = worker.env("ZONE", name).env("CLUSTER", cluster).start().await;
        Self { name, network, backend, _worker: worker }
    }

    /// Responds to each request with the zone's name.
    fn answers(&self) {
        let name = self.name;
        self.backend.answer_with(move |_, _| Answer::json(200, &json!({"zone": name})));
    }

    /// The number of requests so far.
    fn reached(&self) -> usize {
        self.backend.request_count(CHAT)
    }

    fn cut_off(&self, relays: &[&Relay]) {
        relays.iter().for_each(|relay| self.network.remove(relay));
        self.network.cut();
    }

    fn bring_back(&self, relays: &[&Relay]) {
        relays.iter().for_each(|relay| self.network.add(relay));
    }
}

/// Three clusters and two homes, of which the relays are in the first.
const ZONES: [(&str, &str); 5] = [
    ("west-1", "cluster-west"),
    ("west-2", "cluster-west"),
    ("east-1", "cluster-east"),
    ("attic", "home-ada"),
    ("cellar", "home-ben"),
];

async fn relay(count: &str) -> Relay {
    let relay = Relay::builder().env("ZONE", "west-1").env("CLUSTER", "cluster-west");
    relay.env("RELAY_COUNT", count).env("SPILL_REQUESTS", "1000").start().await
}

/// Starts all zones. Requests to them are held.
async fn zones(relays: &[&Relay], slots: u32) -> Vec<Zone> {
    let mut zones = Vec::new();
    for (zone, cluster) in ZONES {
        zones.push(Zone::start(relays, zone, cluster, slots).await);
    }
    for relay in relays {
        relay.wait_for_serving(ZONES.len()).await;
    }
    zones
}

fn chat() -> Request {
    Request::post(CHAT, &json!({"model": "m"}))
}

#[tokio::test]
async fn requests_stay_in_zone_with_room() {
    let relay = relay("1").await;
    let zones = zones(&[&relay], 4).await;
    zones.iter().for_each(Zone::answers);
    for _ in 0..20 {
        let reply = relay.fetch(chat()).await.with_status(200);
        assert_eq!(reply.json()["zone"], "west-1");
    }
    let of_zone = |family: &str, number: usize| {
        let (zone, cluster) = ZONES[number];
        format!("modelrelay_zone_{family}{{cluster=\"{cluster}\",provider=\"local\",zone=\"{zone}\"}}")
    };
    let sent = relay.metric(&of_zone("requests_total", 0)).await;
    assert!((sent - 20.0).abs() < 0.1, "{sent}");
    for (number, zone) in zones.iter().enumerate() {
        let workers = relay.metric(&of_zone("workers", number)).await;
        assert!((workers - 1.0).abs() < 0.1, "{workers} in {}", zone.name);
    }
}

#[tokio::test]
async fn zone_and_cluster_are_shown_everywhere() {
    let relay = relay("1").await;
    let _zones = zones(&[&relay], 1).await;
    let shown: BTreeMap<_, _> = relay
        .workers()
        .await
        .into_iter()
        .map(|worker| (worker["zone"].to_string(), worker["cluster"].to_string()))
        .collect();
    let expected = ZONES.map(|(zone, cluster)| (format!("\"{zone}\""), format!("\"{cluster}\"")));
    assert_eq!(shown, BTreeMap::from(expected));
    let state = relay.admin_json("/admin/state").await;
    assert_eq!([&state["zone"], &state["cluster"]], ["west-1", "cluster-west"]);
    for name in ["workers", "status"] {
        let text = relay.output_of(&[name]).await;
        assert!(text.contains("CLUSTER") && text.contains("home-ada") && text.contains("attic"), "{name}: {text}");
    }
}

#[tokio::test]
async fn full_zones_spill_to_next_ones_at_once() {
    let relay = relay("1").await;
    let zones = zones(&[&relay], 1).await;
    let mut pending = Vec::new();
    for number in 1..=ZONES.len() {
        pending.push(relay.begin(chat()));
        let reached = async || {
            let counts: Vec<_> = zones.iter().map(Zone::reached).collect();
            counts.iter().sum::<usize>() == number && counts[..number.min(2)].iter().all(|count| *count == 1)
        };
        eventually("the nearest free worker gets it", &relay, reached).await;
    }
    pending.push(relay.begin(chat()));
    relay.wait_for_queue_depth("local", 1).await;
}

#[tokio::test]
async fn relay_without_zone_ignores_those_of_workers() {
    let relay = Relay::start().await;
    let zones = [
        Zone::start(&[&relay], "west-1", "cluster-west", 4).await,
        Zone::start(&[&relay], "attic", "home-ada", 4).await,
    ];
    zones.iter().for_each(Zone::answers);
    relay.wait_for_serving(2).await;
    for _ in 0..10 {
        let _ = relay.fetch(chat()).await.with_status(200);
    }
    assert_eq!(zones.map(|zone| zone.reached()), [5, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn zone_cut_off_and_back_loses_no_request() {
    let (one, two) = tokio::join!(relay("2"), relay("2"));
    let relays = [&one, &two];
    let zones = zones(&relays, 4).await;
    zones.iter().for_each(Zone::answers);
    let mut load = Load::start(&one, 6);
    load.add(&two, 6);
    load.serves_everyone(5).await;
    for round in 0..2 {
        for zone in [&zones[0], &zones[3]] {
            zone.cut_off(&relays);
            for relay in relays {
                relay.wait_for_serving(ZONES.len() - 1).await;
            }
            let before = zone.reached();
            load.serves_everyone(5).await;
            assert_eq!(zone.reached(), before, "{} is cut off in round {round}", zone.name);
            zone.bring_back(&relays);
            for relay in relays {
                relay.wait_for_serving(ZONES.len()).await;
            }
        }
        let before = zones[0].reached();
        load.serves_everyone(5).await;
        assert!(zones[0].reached() > before, "the near zone is used again");
    }
    load.end().await;
}
