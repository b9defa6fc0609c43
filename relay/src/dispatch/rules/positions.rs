//! Positions of waiting requests in the queue of their model, which clients and the admin API receive.
//!
//! A position is an estimate: the request is sent at that place if no other request comes, each costs its estimate, and
//! none is promoted.

use std::collections::BTreeMap;

use modelrelay_protocol::queue_position::QueuePosition;

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::Moment;
use crate::dispatch::model::event::{Now, RequestKey};
use crate::dispatch::model::fairness::estimate;
use crate::dispatch::model::models::Group;
use crate::dispatch::model::order::{QueueOrder, Start};
use crate::dispatch::model::request::RequestState;

impl Dispatch {
    /// Returns the position of each waiting request among those for its model, from 1. Sorts the queue.
    pub fn positions(&self) -> BTreeMap<RequestKey, usize> {
        let orders = self.models.iter().map(|group| self.order_of(group, self.clock.now));
        orders.flat_map(QueueOrder::into_positions).collect()
    }

    /// Returns the position of a waiting request. It may be a second old, so that it costs no sorting for each request:
    /// see [`QueueOrder`].
    pub fn queue_position(&mut self, key: RequestKey, now: Now) -> Option<QueuePosition> {
        match self.requests.get(&key)?.state {
            RequestState::Queued { .. } => self.position(key, self.clock.moment(now)),
            RequestState::Running { .. } => None,
        }
    }

    /// Returns the position of a request that waits, or the one that it would have if it did.
    pub(super) fn position(&mut self, key: RequestKey, now: Moment) -> Option<QueuePosition> {
        let request = self.requests.get(&key)?;
        let group = &self.models[request.model];
        let order = match &group.order {
            Some(order) if order.is_fresh(group.queue.len(), now) => order,
            _ => {
                let (model, order) = (request.model, self.order_of(group, now));
                self.models[model].order.insert(order)
            }
        };
        let request = self.requests.get(&key)?;
        Some(order.position(key).unwrap_or_else(|| {
            let (flow, class) = (request.flow, request.class);
            let service = order.end(flow, class).unwrap_or_else(|| self.queue.flows.arrival_service(flow));
            let found = order.position_at(Start { class, service, key });
            // A request that came after the sort waits too; one that is rejected does not.
            let is_waiting = matches!(request.state, RequestState::Queued { place: Some(_), .. });
            let waiting = if is_waiting { found.waiting.max(found.position) } else { found.waiting };
            QueuePosition { waiting, ..found }
        }))
    }

    /// Sorts the waiting requests of a model.
    fn order_of(&self, group: &Group, now: Moment) -> QueueOrder {
        let lanes = group.queue.lanes();
        let waiting = lanes.flat_map(|(_, id, lane)| lane.keys().map(move |key| (id.key.flow, id.key.class, key)));
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_unstable();
        let (mut starts, mut ends) = (Vec::with_capacity(waiting.len()), BTreeMap::new());
        for of_flow in waiting.chunk_by(|(flow, ..), (next, ..)| flow == next) {
            let Some((flow, ..)) = of_flow.first().copied() else { continue };
            let (mut service, weight) = (self.queue.flows.service(flow), self.queue.flows.weight(flow));
            for of_class in of_flow.chunk_by(|(_, class, _), (_, next, _)| class == next) {
                for (_, class, key) in of_class.iter().copied() {
                    starts.push(Start { class, service, key });
                    let cost = self.requests.get(&key).map_or(0, |request| estimate(request.new.bytes));
                    service = service.saturating_add(weight.service(cost));
                }
                ends.extend(of_class.first().map(|(_, class, _)| ((flow, *class), service)));
            }
        }
        QueueOrder::new(starts, ends, now)
    }
}
