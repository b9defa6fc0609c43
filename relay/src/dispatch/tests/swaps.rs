//! Several relays and several multiplexers together: relays are cores, and a worker divides each model that it holds as
//! the real one does, and swaps by a plain rule of its own. Messages between them take time. Whichever worker is
//! assigned a load, every request is served, a model is loaded once however many requests need it, and a fleet with a
//! place for each model stops swapping.

mod crowd;
mod fleet;
mod node;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use self::crowd::Crowd;
use self::fleet::Fleet;
use self::node::{MODELS, Node};

#[derive(Clone, Debug)]
enum Op {
    Submit { relay: usize, model: usize },
    Cancel { relay: usize, request: usize },
    Break { link: usize },
    Pass { millis: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let some = 0..64_usize;
    prop_oneof![
        12 => (some.clone(), 0..MODELS.len()).prop_map(|(relay, model)| Op::Submit { relay, model }),
        2 => (some.clone(), some.clone()).prop_map(|(relay, request)| Op::Cancel { relay, request }),
        1 => some.prop_map(|link| Op::Break { link }),
        8 => prop::sample::select(vec![1, 5, 60, 400, 1_500]).prop_map(|millis| Op::Pass { millis }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_request_is_served_despite_competing_models(
        relays in 1..4_usize,
        nodes in 1..5_usize,
        broken in prop::option::of((0..4_usize, 0..MODELS.len())),
        seed: u64,
        ops in vec(op(), 10..120),
    ) {
        let mut fleet = Fleet::new(relays, nodes, seed);
        // One worker may be unable to load a model that two others can: links break one at a time.
        if let Some((node, model)) = broken.filter(|_| nodes > 2) {
            fleet.nodes[node % nodes].broken = Some(model);
        }
        for op in ops {
            match op {
                Op::Submit { relay, model } => drop(fleet.submit(relay % relays, model)),
                Op::Cancel { relay, request } => fleet.cancel(relay % relays, request),
                Op::Break { link } => fleet.rejoin(link % (relays * nodes)),
                Op::Pass { millis } => fleet.run(Duration::from_millis(millis)),
            }
        }
        let patience = fleet.now + Duration::from_secs(60);
        while fleet.waiting() > 0 {
            fleet.run(Duration::from_millis(100));
            prop_assert!(fleet.now < patience, "{} requests starve", fleet.waiting());
        }
    }
}

#[test]
fn model_demanded_by_many_relays_loads_once() {
    for seed in 0..50 {
        let mut fleet = Fleet::new(3, 4, seed);
        for request in 0..60 {
            fleet.submit(request % 3, 0);
            fleet.run(Duration::from_millis(5));
        }
        fleet.run(Duration::from_secs(5));
        assert_eq!((fleet.waiting(), fleet.loads()), (0, 1), "seed {seed}");
    }
}

#[test]
fn fleet_with_slot_per_model_stops_loading() {
    for seed in 0..20 {
        let mut fleet = Fleet::new(2, MODELS.len(), seed);
        for turn in 0..400_usize {
            if turn == 200 {
                fleet.nodes.iter_mut().for_each(|node: &mut Node| node.loads = 0);
            }
            fleet.submit(turn % 2, turn * 7 % 5 % MODELS.len());
            fleet.run(Duration::from_millis(50));
        }
        assert_eq!(fleet.loads(), 0, "seed {seed}: models go back and forth");
    }
}

/// Each meets the requests in a different order, and chooses before it can learn of the other's choice.
#[test]
fn relays_with_different_choices_agree_before_next_swap() {
    let mut once_more = 0;
    for seed in 0..60 {
        let mut fleet = Fleet::new(2, 2, seed);
        let mut crowd = Crowd::new(2, seed);
        crowd.submit_due(&mut fleet, Duration::from_secs(2));
        let first = fleet.loads();
        crowd.submit_due(&mut fleet, Duration::from_secs(2));
        assert_eq!(fleet.loads(), first, "seed {seed}: models go back and forth");
        assert!(first <= 3, "seed {seed}: {first} loads of two models by two workers");
        once_more += u32::from(first > 2);
    }
    assert!(once_more > 0, "they never chose differently");
}
