use proptest::prelude::*;

use super::*;

mod simulation;

const A: u8 = 1;
const B: u8 = 2;

fn divider(capacity: u32, links: &[u8], now: Instant) -> Divider<u8> {
    let mut divider = Divider::new(capacity);
    for &link in links {
        divider.add_link(link, LinkKind::Granted, now);
    }
    divider
}

fn slots(divider: &mut Divider<u8>) -> Vec<(u8, u32)> {
    divider.changes().into_iter().map(|(link, values)| (link, values.slots)).collect()
}

#[test]
fn single_link_gets_full_capacity() {
    let now = Instant::now();
    let mut divider = divider(4, &[A], now);
    let values = GrantValues { slots: 4, others: 0, capacity: 4, links: 1 };
    assert_eq!(divider.changes(), [(A, values)]);
    for _ in 0..4 {
        assert_eq!(divider.on_request(A, now), Admission::Run);
    }
    assert_eq!(divider.on_request(A, now), Admission::AtCapacity);
    // Nothing changed for the only link.
    assert_eq!(divider.changes(), []);
}

#[test]
fn free_slots_without_demand_are_offered_to_all() {
    let now = Instant::now();
    let mut divider = divider(3, &[A, B], now);
    assert_eq!(slots(&mut divider), [(A, 3), (B, 3)]);
    divider.on_request(A, now);
    let values = GrantValues { slots: 2, others: 1, capacity: 3, links: 2 };
    assert_eq!(divider.changes(), [(B, values)]);
}

#[test]
fn second_request_for_free_slot_gets_next_slot() {
    let now = Instant::now();
    let mut divider = divider(1, &[A, B], now);
    divider.changes();
    assert_eq!(divider.on_request(A, now), Admission::Run);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    assert_eq!(slots(&mut divider), [(B, 0)]);
    divider.on_finished(A, now);
    // Before A's completion: A has no slot, B has the free one.
    assert_eq!(slots(&mut divider), [(A, 0), (B, 1)]);
    assert_eq!(divider.on_request(A, now), Admission::AtCapacity);
    assert_eq!(divider.on_request(B, now), Admission::Run);
}

#[test]
fn slots_go_to_link_with_fewest() {
    let now = Instant::now();
    let mut divider = divider(4, &[A, B], now);
    for _ in 0..4 {
        divider.on_request(A, now);
    }
    divider.on_demand(A, 10, now);
    divider.on_demand(B, 10, now);
    divider.changes();
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(A, 3), (B, 1)]);
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(A, 2), (B, 2)]);
    // A has one left and B has two, so the next slot is A's again.
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(B, 2)]);
}

#[test]
fn tie_goes_to_link_served_longest_ago() {
    let now = Instant::now();
    let mut divider = divider(2, &[A, B], now);
    divider.on_request(B, now);
    divider.on_request(A, now);
    divider.on_demand(A, 10, now);
    divider.on_demand(B, 10, now);
    for expected in [B, A, B, A] {
        // Both links have one; the third slot goes to one of them.
        divider.changes();
        divider.set_capacity(3, now);
        assert_eq!(slots(&mut divider).iter().find(|(_, slots)| *slots == 2).map(|(link, _)| *link), Some(expected));
        divider.on_request(expected, now);
        divider.set_capacity(2, now);
        divider.on_finished(expected, now);
    }
}

#[test]
fn withdrawn_demand_frees_granted_slot_at_once() {
    let now = Instant::now();
    let mut divider = divider(1, &[A, B], now);
    divider.on_demand(B, 1, now);
    assert_eq!(slots(&mut divider), [(A, 0), (B, 1)]);
    divider.on_demand(B, 0, now);
    assert_eq!(slots(&mut divider), [(A, 1)]);
    assert_eq!(divider.next_timeout(), None);
}

#[test]
fn leaving_link_finishes_requests_without_new_slots() {
    let now = Instant::now();
    let mut divider = divider(4, &[A, B], now);
    for link in [A, A, B, B] {
        divider.on_request(link, now);
        divider.on_demand(link, 5, now);
    }
    divider.on_finished(B, now);
    divider.on_finished(A, now);
    assert_eq!(divider.next_timeout(), Some(now + UNUSED_AFTER));
    divider.changes();
    divider.on_leaving(A, now);
    assert_eq!(slots(&mut divider), [(A, 1), (B, 3)]);
    // Its later messages are ignored: a late demand, a ping, a refusal.
    divider.on_demand(A, 5, now);
    divider.on_message(A, now);
    assert_eq!(divider.on_request(A, now), Admission::AtCapacity);
    divider.on_finished(A, now);
    assert_eq!((divider.waiting(A), slots(&mut divider)), (0, vec![(A, 0), (B, 4)]));
}

#[test]
fn held_request_runs_on_leaving_link() {
    let now = Instant::now();
    let mut divider = Divider::new(1);
    divider.add_link(B, LinkKind::Held, now);
    divider.on_request(B, now);
    divider.on_request(B, now);
    divider.on_leaving(B, now);
    divider.on_finished(B, now);
    assert!(divider.resume(B, now));
}

#[test]
fn unused_slot_moves_to_other_link_after_second() {
    let start = Instant::now();
    let mut divider = divider(1, &[A, B], start);
    divider.on_demand(A, 3, start);
    divider.on_demand(B, 3, start);
    assert_eq!(slots(&mut divider), [(A, 1), (B, 0)]);

    let due = divider.next_timeout().unwrap();
    assert_eq!(due, start + UNUSED_AFTER);
    divider.on_timeout(due - Duration::from_millis(1));
    assert_eq!(slots(&mut divider), []);
    divider.on_timeout(due);
    assert_eq!(slots(&mut divider), [(A, 0), (B, 1)]);

    // B does not use it either. No link is treated as waiting, so the slot is shown to both.
    divider.on_timeout(due + UNUSED_AFTER);
    assert_eq!(slots(&mut divider), [(A, 1)]);
    assert_eq!(divider.next_timeout(), None);
    assert_eq!((divider.waiting(B), divider.awaited(B)), (3, 0));

    divider.on_message(B, due + UNUSED_AFTER);
    assert_eq!(slots(&mut divider), [(A, 0)]);
    assert_eq!(divider.awaited(B), 3);
    assert_eq!(divider.on_request(B, due + UNUSED_AFTER), Admission::Run);
}

#[test]
fn lower_capacity_revokes_grants_but_not_requests() {
    let now = Instant::now();
    let mut divider = divider(3, &[A, B], now);
    divider.on_request(A, now);
    divider.on_request(A, now);
    divider.on_demand(B, 5, now);
    divider.changes();
    divider.set_capacity(1, now);
    assert_eq!(slots(&mut divider), [(A, 2), (B, 0)]);
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(A, 1), (B, 0)]);
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(A, 0), (B, 1)]);
    divider.set_capacity(0, now);
    assert_eq!(slots(&mut divider), [(A, 0), (B, 0)]);
}

#[test]
fn slots_of_lost_link_go_to_others() {
    let now = Instant::now();
    let mut divider = divider(2, &[A, B], now);
    divider.on_request(A, now);
    divider.on_request(A, now);
    divider.on_demand(B, 1, now);
    divider.changes();
    divider.remove_link(A, now);
    let values = GrantValues { slots: 2, others: 0, capacity: 2, links: 1 };
    assert_eq!(divider.changes(), [(B, values)]);
    divider.on_finished(A, now);
    assert_eq!(divider.on_request(A, now), Admission::AtCapacity);
    assert_eq!(divider.running(), 0);
}

#[test]
fn held_requests_of_old_relay_alternate_with_others() {
    let now = Instant::now();
    let mut divider = divider(1, &[A], now);
    divider.add_link(B, LinkKind::Held, now);
    assert_eq!(divider.on_request(B, now), Admission::Run);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    divider.on_demand(A, 1, now);
    assert!(!divider.resume(B, now));
    divider.on_finished(B, now);
    // A was never served.
    assert!(!divider.resume(B, now));
    assert_eq!(slots(&mut divider), [(A, 1)]);
    assert_eq!(divider.on_request(A, now), Admission::Run);
    divider.on_held_cancelled(B, now);
    divider.on_finished(A, now);
    assert!(divider.resume(B, now));
    assert!(!divider.resume(B, now));
    assert_eq!(divider.running(), 1);
}

#[test]
fn held_request_is_not_overtaken_on_its_link() {
    let now = Instant::now();
    let mut divider = Divider::new(1);
    divider.add_link(B, LinkKind::Held, now);
    assert_eq!(divider.on_request(B, now), Admission::Run);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    divider.on_finished(B, now);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    assert!(divider.resume(B, now));
}

#[test]
fn resumed_request_is_running_and_updates_served_order() {
    let now = Instant::now();
    let mut divider = divider(2, &[B], now);
    divider.add_link(A, LinkKind::Held, now);
    for _ in 0..2 {
        assert_eq!(divider.on_request(B, now), Admission::Run);
    }
    for _ in 0..2 {
        assert_eq!(divider.on_request(A, now), Admission::AtCapacity);
    }
    divider.on_finished(B, now);
    assert!(divider.resume(A, now));
    assert_eq!((divider.waiting(A), divider.running()), (1, 2));
    // Each has one running request, and A's began after B's ended: the next free slot is B's.
    divider.on_demand(B, 1, now);
    divider.set_capacity(3, now);
    assert!(!divider.resume(A, now));
    assert_eq!(divider.on_request(B, now), Admission::Run);
}

#[test]
fn cancelled_held_request_leaves_slot_to_others() {
    let now = Instant::now();
    let mut divider = divider(1, &[A], now);
    divider.add_link(B, LinkKind::Held, now);
    assert_eq!(divider.on_request(A, now), Admission::Run);
    assert_eq!(divider.on_request(B, now), Admission::AtCapacity);
    divider.on_demand(A, 1, now);
    divider.on_finished(A, now);
    assert_eq!(slots(&mut divider), [(A, 0)]);
    // A request that a relay with a queue of its own cancelled was never held here.
    divider.on_held_cancelled(A, now);
    assert_eq!((divider.waiting(A), divider.waiting(B)), (1, 1));
    divider.on_held_cancelled(B, now);
    assert_eq!(divider.waiting(B), 0);
    assert_eq!(slots(&mut divider), [(A, 1)]);
}

#[test]
fn next_message_is_awaited_only_after_unused_slot() {
    let mut now = Instant::now();
    let mut divider = divider(1, &[A, B], now);
    assert_eq!(divider.on_request(B, now), Admission::Run);
    divider.on_demand(A, 1, now);
    divider.on_finished(B, now);
    assert!(!divider.is_listening());
    now = divider.next_timeout().unwrap();
    divider.on_timeout(now);
    assert!(divider.is_listening());
    assert_eq!((divider.waiting(A), divider.awaited(A)), (1, 0));
    divider.on_message(A, now);
    assert!(!divider.is_listening());
    assert_eq!(divider.awaited(A), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Add(u8, bool),
    Remove(u8),
    Request(u8),
    Resume(u8),
    HeldCancelled(u8),
    Finished(u8),
    Demand(u8, u32),
    Leaving(u8),
    Message(u8),
    Capacity(u32),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let link = 0_u8..4;
    prop_oneof![
        1 => (link.clone(), any::<bool>()).prop_map(|(link, held)| Step::Add(link, held)),
        1 => link.clone().prop_map(Step::Remove),
        6 => link.clone().prop_map(Step::Request),
        3 => link.clone().prop_map(Step::Resume),
        1 => link.clone().prop_map(Step::HeldCancelled),
        5 => link.clone().prop_map(Step::Finished),
        4 => (link.clone(), prop_oneof![0_u32..8, any::<u32>()]).prop_map(|(link, waiting)| Step::Demand(link, waiting)),
        1 => link.clone().prop_map(Step::Leaving),
        1 => link.prop_map(Step::Message),
        1 => (0_u32..7).prop_map(Step::Capacity),
        2 => (0_u64..1_500).prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn every_history_fills_capacity_without_exceeding_it(
        capacity in 0_u32..6,
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut now = Instant::now();
        let mut divider: Divider<u8> = Divider::new(capacity);
        let mut told: BTreeMap<u8, GrantValues> = BTreeMap::new();
        for step in steps {
            let running_before = divider.running();
            match step {
                Step::Add(link, held) => {
                    let kind = if held { LinkKind::Held } else { LinkKind::Granted };
                    divider.add_link(link, kind, now);
                    told.remove(&link);
                }
                Step::Remove(link) => { divider.remove_link(link, now); told.remove(&link); }
                Step::Request(link) => {
                    // A link that uses its handed slots as last reported is never refused.
                    let own = divider.links.get(&link).is_some_and(|state| state.kind == LinkKind::Granted && !state.handed.is_empty());
                    let admission = divider.on_request(link, now);
                    prop_assert!(!own || admission == Admission::Run);
                    prop_assert!(admission == Admission::AtCapacity || divider.running() == running_before + 1);
                }
                Step::Resume(link) => { divider.resume(link, now); }
                Step::HeldCancelled(link) => divider.on_held_cancelled(link, now),
                Step::Finished(link) => divider.on_finished(link, now),
                Step::Demand(link, waiting) => divider.on_demand(link, waiting, now),
                Step::Leaving(link) => divider.on_leaving(link, now),
                Step::Message(link) => divider.on_message(link, now),
                Step::Capacity(capacity) => divider.set_capacity(capacity, now),
                Step::Wait(millis) => {
                    now += Duration::from_millis(millis);
                    divider.on_timeout(now);
                }
            }
            told.extend(divider.changes());

            prop_assert!(divider.running() <= divider.capacity().max(running_before));
            let claimed: u32 = divider.links.values().map(Link::held_and_running).sum();
            prop_assert!(claimed <= divider.capacity().max(divider.running()));
            let waits = divider.links.values().any(Link::wants_more);
            prop_assert!(!waits || divider.unclaimed() == 0, "a slot idles while a link waits");
            prop_assert!(divider.next_timeout().is_none_or(|due| due > now && due <= now + UNUSED_AFTER));
            for (link, state) in &divider.links {
                prop_assert!(state.handed.len() <= state.waiting as usize);
                if state.kind == LinkKind::Granted {
                    let values = told[link];
                    prop_assert_eq!(values.slots, state.held_and_running() + divider.unclaimed());
                    prop_assert_eq!(values.others, divider.running() - state.running);
                    prop_assert_eq!(values.links as usize, divider.links.len());
                }
            }
        }
    }
}
