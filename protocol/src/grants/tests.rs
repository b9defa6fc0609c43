use proptest::prelude::*;

use super::*;

mod simulation;

const A: u8 = 1;
const B: u8 = 2;

fn allocator(capacity: u32, links: &[u8], now: Instant) -> SlotAllocator<u8> {
    let mut allocator = SlotAllocator::new(capacity);
    for &link in links {
        allocator.add_link(link, LinkKind::Granted, now);
    }
    allocator
}

fn slots(allocator: &mut SlotAllocator<u8>) -> Vec<(u8, u32)> {
    allocator.changes().into_iter().map(|(link, values)| (link, values.slots)).collect()
}

#[test]
fn single_link_gets_full_capacity() {
    let now = Instant::now();
    let mut allocator = allocator(4, &[A], now);
    let values = GrantValues { slots: 4, others: 0, capacity: 4, links: 1 };
    assert_eq!(allocator.changes(), [(A, values)]);
    for _ in 0..4 {
        assert_eq!(allocator.on_request(A, now), Admission::Run);
    }
    assert_eq!(allocator.on_request(A, now), Admission::AtCapacity);
    // Nothing changed for the only link.
    assert_eq!(allocator.changes(), []);
}

#[test]
fn free_slots_without_demand_are_offered_to_all() {
    let now = Instant::now();
    let mut allocator = allocator(3, &[A, B], now);
    assert_eq!(slots(&mut allocator), [(A, 3), (B, 3)]);
    allocator.on_request(A, now);
    let values = GrantValues { slots: 2, others: 1, capacity: 3, links: 2 };
    assert_eq!(allocator.changes(), [(B, values)]);
}

#[test]
fn second_request_for_free_slot_gets_next_slot() {
    let now = Instant::now();
    let mut allocator = allocator(1, &[A, B], now);
    allocator.changes();
    assert_eq!(allocator.on_request(A, now), Admission::Run);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    assert_eq!(slots(&mut allocator), [(B, 0)]);
    allocator.on_finished(A, now);
    // Before A's completion: A has no slot, B has the free one.
    assert_eq!(slots(&mut allocator), [(A, 0), (B, 1)]);
    assert_eq!(allocator.on_request(A, now), Admission::AtCapacity);
    assert_eq!(allocator.on_request(B, now), Admission::Run);
}

#[test]
fn slots_go_to_link_with_fewest() {
    let now = Instant::now();
    let mut allocator = allocator(4, &[A, B], now);
    for _ in 0..4 {
        allocator.on_request(A, now);
    }
    allocator.on_demand(A, 10, now);
    allocator.on_demand(B, 10, now);
    allocator.changes();
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(A, 3), (B, 1)]);
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(A, 2), (B, 2)]);
    // A has one left and B has two, so the next slot is A's again.
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(B, 2)]);
}

#[test]
fn tie_goes_to_link_served_longest_ago() {
    let now = Instant::now();
    let mut allocator = allocator(2, &[A, B], now);
    allocator.on_request(B, now);
    allocator.on_request(A, now);
    allocator.on_demand(A, 10, now);
    allocator.on_demand(B, 10, now);
    for expected in [B, A, B, A] {
        // Both links have one; the third slot goes to one of them.
        allocator.changes();
        allocator.set_capacity(3, now);
        assert_eq!(slots(&mut allocator).iter().find(|(_, slots)| *slots == 2).map(|(link, _)| *link), Some(expected));
        allocator.on_request(expected, now);
        allocator.set_capacity(2, now);
        allocator.on_finished(expected, now);
    }
}

#[test]
fn withdrawn_demand_frees_granted_slot_at_once() {
    let now = Instant::now();
    let mut allocator = allocator(1, &[A, B], now);
    allocator.on_demand(B, 1, now);
    assert_eq!(slots(&mut allocator), [(A, 0), (B, 1)]);
    allocator.on_demand(B, 0, now);
    assert_eq!(slots(&mut allocator), [(A, 1)]);
    assert_eq!(allocator.next_timeout(), None);
}

#[test]
fn leaving_link_finishes_requests_without_new_slots() {
    let now = Instant::now();
    let mut allocator = allocator(4, &[A, B], now);
    for link in [A, A, B, B] {
        allocator.on_request(link, now);
        allocator.on_demand(link, 5, now);
    }
    allocator.on_finished(B, now);
    allocator.on_finished(A, now);
    assert_eq!(allocator.next_timeout(), Some(now + UNUSED_AFTER));
    allocator.changes();
    allocator.on_leaving(A, now);
    assert_eq!(slots(&mut allocator), [(A, 1), (B, 3)]);
    // Its later messages are ignored: a late demand, a ping, a refusal.
    allocator.on_demand(A, 5, now);
    allocator.on_message(A, now);
    assert_eq!(allocator.on_request(A, now), Admission::AtCapacity);
    allocator.on_finished(A, now);
    assert_eq!((allocator.waiting(A), slots(&mut allocator)), (0, vec![(A, 0), (B, 4)]));
}

#[test]
fn held_request_runs_on_leaving_link() {
    let now = Instant::now();
    let mut allocator = SlotAllocator::new(1);
    allocator.add_link(B, LinkKind::Held, now);
    allocator.on_request(B, now);
    allocator.on_request(B, now);
    allocator.on_leaving(B, now);
    allocator.on_finished(B, now);
    assert!(allocator.resume(B, now));
}

#[test]
fn unused_slot_moves_to_other_link_after_second() {
    let start = Instant::now();
    let mut allocator = allocator(1, &[A, B], start);
    allocator.on_demand(A, 3, start);
    allocator.on_demand(B, 3, start);
    assert_eq!(slots(&mut allocator), [(A, 1), (B, 0)]);

    let due = allocator.next_timeout().unwrap();
    assert_eq!(due, start + UNUSED_AFTER);
    allocator.on_timeout(due - Duration::from_millis(1));
    assert_eq!(slots(&mut allocator), []);
    allocator.on_timeout(due);
    assert_eq!(slots(&mut allocator), [(A, 0), (B, 1)]);

    // B does not use it either. No link is treated as waiting, so the slot is shown to both.
    allocator.on_timeout(due + UNUSED_AFTER);
    assert_eq!(slots(&mut allocator), [(A, 1)]);
    assert_eq!(allocator.next_timeout(), None);
    assert_eq!((allocator.waiting(B), allocator.awaited(B)), (3, 0));

    allocator.on_message(B, due + UNUSED_AFTER);
    assert_eq!(slots(&mut allocator), [(A, 0)]);
    assert_eq!(allocator.awaited(B), 3);
    assert_eq!(allocator.on_request(B, due + UNUSED_AFTER), Admission::Run);
}

#[test]
fn lower_capacity_revokes_grants_but_not_requests() {
    let now = Instant::now();
    let mut allocator = allocator(3, &[A, B], now);
    allocator.on_request(A, now);
    allocator.on_request(A, now);
    allocator.on_demand(B, 5, now);
    allocator.changes();
    allocator.set_capacity(1, now);
    assert_eq!(slots(&mut allocator), [(A, 2), (B, 0)]);
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(A, 1), (B, 0)]);
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(A, 0), (B, 1)]);
    allocator.set_capacity(0, now);
    assert_eq!(slots(&mut allocator), [(A, 0), (B, 0)]);
}

#[test]
fn slots_of_lost_link_go_to_others() {
    let now = Instant::now();
    let mut allocator = allocator(2, &[A, B], now);
    allocator.on_request(A, now);
    allocator.on_request(A, now);
    allocator.on_demand(B, 1, now);
    allocator.changes();
    allocator.remove_link(A, now);
    let values = GrantValues { slots: 2, others: 0, capacity: 2, links: 1 };
    assert_eq!(allocator.changes(), [(B, values)]);
    allocator.on_finished(A, now);
    assert_eq!(allocator.on_request(A, now), Admission::AtCapacity);
    assert_eq!(allocator.running(), 0);
}

#[test]
fn held_requests_of_old_relay_alternate_with_others() {
    let now = Instant::now();
    let mut allocator = allocator(1, &[A], now);
    allocator.add_link(B, LinkKind::Held, now);
    assert_eq!(allocator.on_request(B, now), Admission::Run);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    allocator.on_demand(A, 1, now);
    assert!(!allocator.resume(B, now));
    allocator.on_finished(B, now);
    // A was never served.
    assert!(!allocator.resume(B, now));
    assert_eq!(slots(&mut allocator), [(A, 1)]);
    assert_eq!(allocator.on_request(A, now), Admission::Run);
    allocator.on_held_cancelled(B, now);
    allocator.on_finished(A, now);
    assert!(allocator.resume(B, now));
    assert!(!allocator.resume(B, now));
    assert_eq!(allocator.running(), 1);
}

#[test]
fn held_request_is_not_overtaken_on_its_link() {
    let now = Instant::now();
    let mut allocator = SlotAllocator::new(1);
    allocator.add_link(B, LinkKind::Held, now);
    assert_eq!(allocator.on_request(B, now), Admission::Run);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    allocator.on_finished(B, now);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    assert!(allocator.resume(B, now));
}

#[test]
fn resumed_request_is_running_and_updates_served_order() {
    let now = Instant::now();
    let mut allocator = allocator(2, &[B], now);
    allocator.add_link(A, LinkKind::Held, now);
    for _ in 0..2 {
        assert_eq!(allocator.on_request(B, now), Admission::Run);
    }
    for _ in 0..2 {
        assert_eq!(allocator.on_request(A, now), Admission::AtCapacity);
    }
    allocator.on_finished(B, now);
    assert!(allocator.resume(A, now));
    assert_eq!((allocator.waiting(A), allocator.running()), (1, 2));
    // Each has one running request, and A's began after B's ended: the next free slot is B's.
    allocator.on_demand(B, 1, now);
    allocator.set_capacity(3, now);
    assert!(!allocator.resume(A, now));
    assert_eq!(allocator.on_request(B, now), Admission::Run);
}

#[test]
fn cancelled_held_request_leaves_slot_to_others() {
    let now = Instant::now();
    let mut allocator = allocator(1, &[A], now);
    allocator.add_link(B, LinkKind::Held, now);
    assert_eq!(allocator.on_request(A, now), Admission::Run);
    assert_eq!(allocator.on_request(B, now), Admission::AtCapacity);
    allocator.on_demand(A, 1, now);
    allocator.on_finished(A, now);
    assert_eq!(slots(&mut allocator), [(A, 0)]);
    // A request that a relay with a queue of its own cancelled was never held here.
    allocator.on_held_cancelled(A, now);
    assert_eq!((allocator.waiting(A), allocator.waiting(B)), (1, 1));
    allocator.on_held_cancelled(B, now);
    assert_eq!(allocator.waiting(B), 0);
    assert_eq!(slots(&mut allocator), [(A, 1)]);
}

#[test]
fn next_message_is_awaited_only_after_unused_slot() {
    let mut now = Instant::now();
    let mut allocator = allocator(1, &[A, B], now);
    assert_eq!(allocator.on_request(B, now), Admission::Run);
    allocator.on_demand(A, 1, now);
    allocator.on_finished(B, now);
    assert!(!allocator.is_listening());
    now = allocator.next_timeout().unwrap();
    allocator.on_timeout(now);
    assert!(allocator.is_listening());
    assert_eq!((allocator.waiting(A), allocator.awaited(A)), (1, 0));
    allocator.on_message(A, now);
    assert!(!allocator.is_listening());
    assert_eq!(allocator.awaited(A), 1);
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
        let mut allocator: SlotAllocator<u8> = SlotAllocator::new(capacity);
        let mut reported: BTreeMap<u8, GrantValues> = BTreeMap::new();
        for step in steps {
            let running_before = allocator.running();
            match step {
                Step::Add(link, held) => {
                    let kind = if held { LinkKind::Held } else { LinkKind::Granted };
                    allocator.add_link(link, kind, now);
                    reported.remove(&link);
                }
                Step::Remove(link) => { allocator.remove_link(link, now); reported.remove(&link); }
                Step::Request(link) => {
                    // A link that uses its handed slots as last reported is never refused.
                    let own = allocator.links.get(&link).is_some_and(|state| state.kind == LinkKind::Granted && !state.handed.is_empty());
                    let admission = allocator.on_request(link, now);
                    prop_assert!(!own || admission == Admission::Run);
                    prop_assert!(admission == Admission::AtCapacity || allocator.running() == running_before + 1);
                }
                Step::Resume(link) => { allocator.resume(link, now); }
                Step::HeldCancelled(link) => allocator.on_held_cancelled(link, now),
                Step::Finished(link) => allocator.on_finished(link, now),
                Step::Demand(link, waiting) => allocator.on_demand(link, waiting, now),
                Step::Leaving(link) => allocator.on_leaving(link, now),
                Step::Message(link) => allocator.on_message(link, now),
                Step::Capacity(capacity) => allocator.set_capacity(capacity, now),
                Step::Wait(millis) => {
                    now += Duration::from_millis(millis);
                    allocator.on_timeout(now);
                }
            }
            reported.extend(allocator.changes());

            prop_assert!(allocator.running() <= allocator.capacity().max(running_before));
            let claimed: u32 = allocator.links.values().map(Link::held_and_running).sum();
            prop_assert!(claimed <= allocator.capacity().max(allocator.running()));
            let waits = allocator.links.values().any(Link::wants_more);
            prop_assert!(!waits || allocator.unclaimed() == 0, "a slot idles while a link waits");
            prop_assert!(allocator.next_timeout().is_none_or(|due| due > now && due <= now + UNUSED_AFTER));
            for (link, state) in &allocator.links {
                prop_assert!(state.handed.len() <= state.waiting as usize);
                if state.kind == LinkKind::Granted {
                    let values = reported[link];
                    prop_assert_eq!(values.slots, state.held_and_running() + allocator.unclaimed());
                    prop_assert_eq!(values.others, allocator.running() - state.running);
                    prop_assert_eq!(values.links as usize, allocator.links.len());
                }
            }
        }
    }
}
