//! One worker and several relays in simulated time, with messages in transit between them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

const LATENCY: Duration = Duration::from_millis(1);
const DEMAND_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival { relay: usize },
    DemandDue { relay: usize },
    RequestRead { relay: usize, arrived: Instant },
    DemandRead { relay: usize, waiting: u32 },
    Served { relay: usize },
    GrantRead { relay: usize, slots: u32, links: u32 },
    CompletionRead { relay: usize },
    RefusalRead { relay: usize, arrived: Instant },
    Timeout,
}

/// A relay that obeys `grant`: its queue, its unanswered requests, its last demand.
#[derive(Default)]
struct Relay {
    queue: VecDeque<Instant>,
    slots: u32,
    links: u32,
    unanswered: u32,
    stated: u32,
    stated_at: Option<Instant>,
    began: Vec<Instant>,
    waits: Vec<Duration>,
    refusals: u32,
}

struct Simulation {
    now: Instant,
    start: Instant,
    service: Duration,
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    seq: u64,
    allocator: SlotAllocator<usize>,
    relays: Vec<Relay>,
    order: Vec<usize>,
    busy: Duration,
}

impl Simulation {
    fn new(capacity: u32, relays: usize, service: Duration) -> Self {
        let start = Instant::now();
        let mut allocator = SlotAllocator::new(capacity);
        (0..relays).for_each(|relay| allocator.add_link(relay, LinkKind::Granted, start));
        let mut simulation = Self {
            now: start,
            start,
            service,
            events: BinaryHeap::new(),
            seq: 0,
            allocator,
            relays: (0..relays).map(|_| Relay::default()).collect(),
            order: Vec::new(),
            busy: Duration::ZERO,
        };
        simulation.send_changes();
        simulation
    }

    fn arrivals(&mut self, relay: usize, count: u32, every: Duration) {
        for at in 0..count {
            self.at(every * at, Event::Arrival { relay });
        }
    }

    fn at(&mut self, after: Duration, event: Event) {
        self.seq += 1;
        self.events.push(Reverse((self.now + after, self.seq, event)));
    }

    fn run(&mut self, time: Duration) {
        while let Some(&Reverse((at, _, event))) = self.events.peek()
            && at <= self.start + time
        {
            self.events.pop();
            self.now = at;
            self.handle(event);
            assert!(self.allocator.running() <= self.allocator.capacity());
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Arrival { relay } => self.relays[relay].queue.push_back(now),
            Event::GrantRead { relay, slots, links } => {
                (self.relays[relay].slots, self.relays[relay].links) = (slots, links);
            }
            Event::CompletionRead { relay } => self.relays[relay].unanswered -= 1,
            Event::RefusalRead { relay, arrived } => {
                self.relays[relay].unanswered -= 1;
                self.relays[relay].refusals += 1;
                self.relays[relay].queue.push_front(arrived);
            }
            Event::DemandDue { .. } => {}
            Event::RequestRead { relay, arrived } => return self.request_read(relay, arrived),
            Event::DemandRead { relay, waiting } => {
                self.allocator.on_demand(relay, waiting, now);
                return self.send_changes();
            }
            Event::Served { relay } => {
                self.allocator.on_finished(relay, now);
                self.send_changes();
                return self.at(LATENCY, Event::CompletionRead { relay });
            }
            Event::Timeout => {
                self.allocator.on_timeout(now);
                return self.send_changes();
            }
        }
        (0..self.relays.len()).for_each(|relay| self.relay_acts(relay));
    }

    fn request_read(&mut self, relay: usize, arrived: Instant) {
        match self.allocator.on_request(relay, self.now) {
            Admission::Run => {
                self.order.push(relay);
                self.busy += self.service;
                self.relays[relay].began.push(self.now);
                self.relays[relay].waits.push(self.now - arrived);
                self.at(self.service, Event::Served { relay });
                self.send_changes();
            }
            Admission::AtCapacity => {
                self.send_changes();
                self.at(LATENCY, Event::RefusalRead { relay, arrived });
            }
        }
    }

    fn send_changes(&mut self) {
        for (relay, values) in self.allocator.changes() {
            self.at(LATENCY, Event::GrantRead { relay, slots: values.slots, links: values.links });
        }
        if let Some(due) = self.allocator.next_timeout() {
            self.at(due - self.now, Event::Timeout);
        }
    }

    fn relay_acts(&mut self, at: usize) {
        let relay = &mut self.relays[at];
        let mut sent = Vec::new();
        while relay.unanswered < relay.slots
            && let Some(arrived) = relay.queue.pop_front()
        {
            relay.unanswered += 1;
            sent.push(Event::RequestRead { relay: at, arrived });
        }
        let waiting = relay.queue.len() as u32;
        let due = relay.stated_at.map(|stated| stated + DEMAND_INTERVAL).filter(|&due| due > self.now);
        if waiting != relay.stated && relay.links > 1 {
            if let Some(due) = due {
                self.at(due - self.now, Event::DemandDue { relay: at });
            } else {
                (relay.stated, relay.stated_at) = (waiting, Some(self.now));
                sent.push(Event::DemandRead { relay: at, waiting });
            }
        }
        sent.into_iter().for_each(|event| self.at(LATENCY, event));
    }
}

const SERVICE: Duration = Duration::from_millis(200);

#[test]
fn two_busy_relays_share_one_slot_in_turn() {
    let mut simulation = Simulation::new(1, 2, SERVICE);
    simulation.arrivals(0, 200, Duration::ZERO);
    simulation.arrivals(1, 200, Duration::ZERO);
    simulation.run(Duration::from_secs(20));
    let order = &simulation.order;
    assert!(order.len() > 90, "only {} served", order.len());
    assert!(order.windows(2).skip(1).all(|pair| pair[0] != pair[1]), "{order:?}");
    // Only the round trip between a completion and the next request is lost.
    assert!(simulation.busy.as_secs_f64() > 0.97 * 20.0);
    assert!(simulation.relays.iter().map(|relay| relay.refusals).sum::<u32>() <= 1);
}

#[test]
fn trickle_waits_at_most_two_service_times() {
    for capacity in [1, 2, 5] {
        let mut simulation = Simulation::new(capacity, 2, SERVICE);
        simulation.arrivals(0, 1_000, Duration::ZERO);
        simulation.arrivals(1, 20, Duration::from_millis(1_730));
        simulation.run(Duration::from_secs(36));
        let waits = &simulation.relays[1].waits;
        assert_eq!(waits.len(), 20);
        let longest = waits.iter().max().unwrap();
        assert!(*longest <= 2 * SERVICE, "waited {longest:?} with capacity {capacity}");
        assert!(simulation.busy.as_secs_f64() > 0.97 * 36.0 * f64::from(capacity));
    }
}

#[test]
fn single_busy_relay_gets_full_capacity() {
    let mut simulation = Simulation::new(4, 3, SERVICE);
    simulation.arrivals(2, 1_000, Duration::ZERO);
    simulation.run(Duration::from_secs(10));
    assert!(simulation.order.len() >= 4 * 48);
    assert_eq!(simulation.relays[2].refusals, 0);
}

#[test]
fn five_busy_relays_get_equal_shares() {
    for capacity in [1, 3, 7] {
        let mut simulation = Simulation::new(capacity, 5, SERVICE);
        (0..5).for_each(|relay| simulation.arrivals(relay, 5_000, Duration::ZERO));
        simulation.run(Duration::from_secs(60));
        let served: Vec<usize> = simulation.relays.iter().map(|relay| relay.began.len()).collect();
        let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
        assert!(*most as f64 <= 1.1 * *least as f64 + 2.0, "{served:?} with capacity {capacity}");
    }
}

#[test]
fn relay_with_unused_slots_costs_one_second() {
    let mut simulation = Simulation::new(1, 2, SERVICE);
    // Relay 1 stated demand and fell silent, before relay 0 has anything to send.
    simulation.at(Duration::ZERO, Event::DemandRead { relay: 1, waiting: 5 });
    simulation.at(Duration::from_millis(10), Event::Arrival { relay: 0 });
    simulation.run(Duration::from_secs(5));
    let wait = simulation.relays[0].waits[0];
    assert!(wait <= UNUSED_AFTER + Duration::from_millis(20), "{wait:?}");
}

proptest! {
    /// With any arrivals, every request is served, and no slot is idle for longer than the messages and one second of
    /// silence.
    #[test]
    fn every_request_is_served(
        capacity in 1_u32..5,
        relays in 1_usize..5,
        arrivals in prop::collection::vec((0_usize..5, 0_u64..3_000), 1..80),
    ) {
        let mut simulation = Simulation::new(capacity, relays, SERVICE);
        let count = arrivals.len();
        for (relay, millis) in arrivals {
            simulation.at(Duration::from_millis(millis), Event::Arrival { relay: relay % relays });
        }
        simulation.run(Duration::from_secs(120));
        prop_assert_eq!(simulation.order.len(), count);
        prop_assert_eq!(simulation.allocator.running(), 0);
        // Work is conserved: all arrivals by 3 s, then only round trips and at most a few silences.
        let last = simulation.relays.iter().flat_map(|relay| relay.began.iter()).max().unwrap();
        let work = (SERVICE + 4 * LATENCY + DEMAND_INTERVAL) * (count as u32).div_ceil(capacity);
        prop_assert!(*last - simulation.start <= Duration::from_secs(3) + work + 2 * UNUSED_AFTER);
    }
}
