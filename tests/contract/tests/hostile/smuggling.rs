//! Requests that two consecutive programs could parse differently, for example as two requests: the relay is compared
//! with nginx and haproxy, which get the same bytes.
//!
//! The rule: everything that the relay forwards, the others forward too, request for request and byte for byte. The
//! relay may respond to more by itself than they do, and it may reject.

mod cases;
mod recorder;

use std::collections::BTreeMap;

use modelrelay_harness::relay::Relay;

use cases::{CASES, Case, Reaction};
use recorder::{Door, ForwardedRequest, Oracle, Talk, record_worker, talk};

/// The complete result of one case with one program.
#[derive(Debug)]
struct Outcome {
    talk: Talk,
    forwarded: Vec<ForwardedRequest>,
}

/// Sends every case to one program, all at once, each over its own connection.
async fn run(door: &Door) -> Vec<Talk> {
    let talks: Vec<_> =
        CASES.iter().enumerate().map(|(number, case)| tokio::spawn(talk(door.clone(), case.bytes(number)))).collect();
    let mut ended = Vec::new();
    for talk in talks {
        ended.push(talk.await.expect("no conversation panics"));
    }
    ended
}

fn outcomes(talks: Vec<Talk>, mut forwarded: BTreeMap<usize, Vec<ForwardedRequest>>) -> Vec<Outcome> {
    let outcome = |(number, talk)| Outcome { talk, forwarded: forwarded.remove(&number).unwrap_or_default() };
    talks.into_iter().enumerate().map(outcome).collect()
}

async fn relay_outcomes() -> Vec<Outcome> {
    let relay = Relay::start().await;
    let recorded = record_worker(relay.worker(&["m"], 1000).await);
    let talks = run(&Door::Tcp(relay.addr())).await;
    let forwarded = recorded.take();
    assert_eq!(relay.get("/livez").await.status, 200);
    outcomes(talks, forwarded)
}

async fn oracle_outcomes(name: &str) -> Option<Vec<Outcome>> {
    let oracle = Oracle::start(name).await?;
    let talks = run(oracle.door()).await;
    Some(outcomes(talks, oracle.recorded.take()))
}

/// True if everything in `few` is in `many`, in that order.
fn is_among(few: &[ForwardedRequest], many: &[ForwardedRequest]) -> bool {
    let mut many = many.iter();
    few.iter().all(|one| many.any(|other| other == one))
}

/// Returns the faults in the relay's outcome of one case.
fn judge(case: &Case, relay: &Outcome, oracles: &[(&str, &Outcome)]) -> Vec<String> {
    let mut faults = Vec::new();
    let verdict = Reaction::of(relay.talk.status, relay.talk.closed, &relay.forwarded);
    if verdict != case.relay {
        faults.push(format!("expected {:?}, got {verdict:?}", case.relay));
    }
    for (name, oracle) in oracles {
        let unlike = !is_among(&relay.forwarded, &oracle.forwarded);
        if unlike && !case.stricter.contains(name) {
            faults.push(format!("{name} passed on {:?}, the relay {:?}", oracle.forwarded, relay.forwarded));
        }
        // A stricter program rejects the bytes; it never parses them as something else.
        if case.stricter.contains(name) && !oracle.forwarded.is_empty() && unlike {
            faults.push(format!("{name} is not stricter but parses a different request: {:?}", oracle.forwarded));
        }
    }
    faults
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_parsed_like_nginx_and_haproxy() {
    let (relay, nginx, haproxy) = tokio::join!(relay_outcomes(), oracle_outcomes("nginx"), oracle_outcomes("haproxy"));
    let oracles: Vec<_> =
        [("nginx", nginx), ("haproxy", haproxy)].into_iter().filter_map(|(name, of)| Some((name, of?))).collect();
    let mut faults = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let references: Vec<_> = oracles.iter().map(|(name, all)| (*name, &all[number])).collect();
        let shown = |outcome: &Outcome| {
            format!("{:?}", Reaction::of(outcome.talk.status, outcome.talk.closed, &outcome.forwarded))
        };
        let others: Vec<_> = references.iter().map(|(name, outcome)| format!("{name} {}", shown(outcome))).collect();
        eprintln!("{}: relay {}, {}", case.name, shown(&relay[number]), others.join(", "));
        faults.extend(
            judge(case, &relay[number], &references).into_iter().map(|fault| format!("{}: {fault}", case.name)),
        );
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
