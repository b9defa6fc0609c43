//! Clients that wait for each response before their next request, alternating between two models.

use std::time::Duration;

use super::fleet::Fleet;
use crate::dispatch::RequestKey;

const CLIENTS: u64 = 8;
const PAUSE: Duration = Duration::from_millis(10);
const STEP: Duration = Duration::from_millis(2);

pub(super) struct Crowd(Vec<Client>);

struct Client {
    number: usize,
    relay: usize,
    answers: usize,
    pending: Option<RequestKey>,
    /// The time of its next request.
    until: Duration,
}

impl Crowd {
    /// Creates clients of all relays, which start within some milliseconds, in any order.
    pub(super) fn new(relays: usize, seed: u64) -> Self {
        let chance = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let client = |number: u64| {
            let until = Duration::from_millis((chance >> (5 * number + 3)) % 12);
            let number = number as usize;
            Client { number, relay: number % relays, answers: 0, pending: None, until }
        };
        Self((0..CLIENTS).map(client).collect())
    }

    /// Runs the clients for this time.
    pub(super) fn submit_due(&mut self, fleet: &mut Fleet, time: Duration) {
        let until = fleet.now + time;
        while fleet.now < until {
            self.0.iter_mut().for_each(|client| client.act(fleet));
            fleet.run(STEP);
        }
    }
}

impl Client {
    fn act(&mut self, fleet: &mut Fleet) {
        if let Some(pending) = self.pending
            && !fleet.waits(self.relay, pending)
        {
            (self.pending, self.until) = (None, fleet.now + PAUSE);
            self.answers += 1;
        }
        if self.pending.is_none() && fleet.now >= self.until {
            // Neither in step with each other nor in strict alternation.
            let model = (self.number / 2 + self.answers / (1 + self.number % 3)) % 2;
            self.pending = Some(fleet.submit(self.relay, model));
        }
    }
}
