//! The worker's slots, divided among its links.
//!
//! The rule itself is [`modelrelay_protocol::grants::SlotAllocator`]; this module has the lock around it, the guards
//! that free a slot when its holder is dropped, and the grants that are sent with each change.
//!
//! Locks: this one is acquired before a link's, never after. It is never held over an await.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use modelrelay_protocol::grant_step;
use modelrelay_protocol::grants::{Admission, GrantValues, LinkKind, SlotAllocator};
use modelrelay_protocol::message::{Grant, WorkerToRelay, encode};
use modelrelay_protocol::outbox::Latest;
use tokio::sync::{Notify, oneshot};

use super::{Link, LinkId};

/// The worker's concurrency slots.
#[derive(Debug)]
pub struct Capacity {
    inner: Mutex<CapacityState>,
    /// The number of running requests, readable without the lock.
    load: AtomicU32,
    next_ticket: AtomicU64,
    timer: Notify,
}

#[derive(Debug)]
struct CapacityState {
    allocator: SlotAllocator<LinkId>,
    links: HashMap<LinkId, Arc<Link>>,
    /// Requests of relays that do not support `at_capacity`, in arrival order.
    held: HashMap<LinkId, VecDeque<(u64, oneshot::Sender<Slot>)>>,
}

/// One running request's slot; dropping it frees the slot and notifies the relays.
#[derive(Debug)]
pub struct Slot(Option<(Arc<Capacity>, LinkId)>);

/// The queue position of a request whose relay does not support `at_capacity`; dropping it leaves the queue.
#[derive(Debug)]
pub struct Held {
    capacity: Arc<Capacity>,
    link: LinkId,
    ticket: u64,
    slot: oneshot::Receiver<Slot>,
}

/// The admission of a request that has just arrived.
#[derive(Debug)]
pub enum CapacityAdmission {
    /// It runs.
    Run(Slot),
    /// It runs when a slot becomes free.
    Held(Held),
    /// The relay must requeue it.
    AtCapacity,
}

impl Capacity {
    /// Creates the capacity for `slots` concurrent requests.
    pub fn new(slots: u32) -> Arc<Self> {
        grant_step!("starts", 0, capacity = slots);
        let inner = CapacityState { allocator: SlotAllocator::new(slots), links: HashMap::new(), held: HashMap::new() };
        Arc::new(Self {
            inner: Mutex::new(inner),
            load: AtomicU32::new(0),
            next_ticket: AtomicU64::new(0),
            timer: Notify::new(),
        })
    }

    /// The number of running requests, over all links.
    pub fn load(&self) -> u32 {
        self.load.load(Ordering::Relaxed)
    }

    /// The number of requests that wait for a slot at the relay behind `link`, or here if the relay does not support
    /// grants.
    pub fn waiting(&self, link: LinkId) -> u32 {
        self.lock().allocator.waiting(link)
    }

    /// Sets the number of requests that may run from now on.
    pub fn set(self: &Arc<Self>, slots: u32) {
        grant_step!("capacity", 0, capacity = slots);
        self.change(|inner| inner.allocator.set_capacity(slots, Instant::now()));
    }

    /// A link has registered.
    pub fn join(self: &Arc<Self>, link: &Arc<Link>) {
        let kind = if link.core1 { LinkKind::Granted } else { LinkKind::Held };
        grant_step!("joins", link.id.0, core1 = link.core1);
        self.change(|inner| {
            inner.links.insert(link.id, Arc::clone(link));
            inner.allocator.add_link(link.id, kind, Instant::now());
        });
    }

    /// A link is gone, and its requests with it.
    pub fn leave(self: &Arc<Self>, link: LinkId) {
        grant_step!("leaves", link.0);
        let gone = self.change(|inner| {
            inner.allocator.remove_link(link, Instant::now());
            (inner.links.remove(&link), inner.held.remove(&link))
        });
        drop(gone);
    }

    /// A request arrived on `link`.
    pub fn handle_request(self: &Arc<Self>, link: &Link) -> CapacityAdmission {
        self.change(|inner| match inner.allocator.on_request(link.id, Instant::now()) {
            Admission::Run => CapacityAdmission::Run(Slot(Some((Arc::clone(self), link.id)))),
            Admission::AtCapacity if link.core1 => CapacityAdmission::AtCapacity,
            Admission::AtCapacity => {
                let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
                let (sender, slot) = oneshot::channel();
                inner.held.entry(link.id).or_default().push_back((ticket, sender));
                CapacityAdmission::Held(Held { capacity: Arc::clone(self), link: link.id, ticket, slot })
            }
        })
    }

    /// `waiting` requests wait at the relay for this worker.
    pub fn handle_demand(self: &Arc<Self>, link: LinkId, waiting: u32) {
        grant_step!("demand", link.0, waiting = waiting);
        self.change(|inner| inner.allocator.on_demand(link, waiting, Instant::now()));
    }

    /// The relay sends no more requests over `link`, which finishes what it has.
    pub fn handle_leaving(self: &Arc<Self>, link: LinkId) {
        grant_step!("leaving", link.0);
        self.change(|inner| inner.allocator.on_leaving(link, Instant::now()));
    }

    /// Any other message arrived on `link`.
    pub fn handle_message(self: &Arc<Self>, link: LinkId) {
        grant_step!(if self.lock().allocator.is_listening() => "hears", link.0);
        self.change(|inner| inner.allocator.on_message(link, Instant::now()));
    }

    /// Passes unused slots on when their time is over. Sleeps without a timer while no slot is handed out. Never
    /// returns.
    pub async fn run(self: Arc<Self>) {
        loop {
            let due = self.lock().allocator.next_timeout();
            match due {
                None => self.timer.notified().await,
                Some(due) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(due.into()) => {
                            grant_step!("timeout", 0);
                            self.change(|inner| inner.allocator.on_timeout(Instant::now()));
                        }
                        () = self.timer.notified() => {}
                    }
                }
            }
        }
    }

    fn release(self: &Arc<Self>, link: LinkId) {
        self.change(|inner| inner.allocator.on_finished(link, Instant::now()));
    }

    fn leave_line(self: &Arc<Self>, link: LinkId, ticket: u64) {
        self.change(|inner| {
            let Some(line) = inner.held.get_mut(&link) else { return };
            let before = line.len();
            line.retain(|(other, _)| *other != ticket);
            if line.len() < before {
                inner.allocator.on_held_cancelled(link, Instant::now());
            }
        });
    }

    /// Applies a change, starts held requests, and queues every grant that differs. The caller queues the completion or
    /// error that belongs to the change after this returns, and thus behind the grant.
    fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut CapacityState) -> R) -> R {
        let mut inner = self.lock();
        let due = inner.allocator.next_timeout();
        let result = change(&mut inner);
        self.begin_held(&mut inner);
        self.load.store(inner.allocator.running(), Ordering::Relaxed);
        for (id, grant) in inner.allocator.changes() {
            grant_step!(
                "grants",
                id.0,
                slots = grant.slots,
                others = grant.others,
                capacity = grant.capacity,
                links = grant.links
            );
            if let Some(link) = inner.links.get(&id) {
                link.set_latest(Latest::Grant, encode(&message(grant)));
            }
        }
        if inner.allocator.next_timeout() != due {
            self.timer.notify_one();
        }
        result
    }

    fn begin_held(self: &Arc<Self>, inner: &mut CapacityState) {
        let CapacityState { allocator, held, .. } = inner;
        for (link, line) in held.iter_mut() {
            while !line.is_empty() && allocator.resume(*link, Instant::now()) {
                let Some((_, sender)) = line.pop_front() else { break };
                if let Err(mut unwanted) = sender.send(Slot(Some((Arc::clone(self), *link)))) {
                    // The request was cancelled at this instant. Dropping the slot would acquire this same lock.
                    unwanted.0 = None;
                    allocator.on_finished(*link, Instant::now());
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, CapacityState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some((capacity, link)) = self.0.take() {
            capacity.release(link);
        }
    }
}

impl Held {
    /// Waits for the slot. Returns `None` if the link is gone.
    pub async fn wait(mut self) -> Option<Slot> {
        (&mut self.slot).await.ok()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.capacity.leave_line(self.link, self.ticket);
    }
}

fn message(grant: GrantValues) -> WorkerToRelay {
    let GrantValues { slots, others, capacity, links } = grant;
    WorkerToRelay::Grant(Grant { slots, others, capacity, links, models: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grants(link: &Link) -> Vec<(u64, u64)> {
        let texts = link.drain_texts();
        let values = texts.iter().map(|text| serde_json::from_str::<serde_json::Value>(text).unwrap());
        values.map(|v| (v["slots"].as_u64().unwrap(), v["others"].as_u64().unwrap())).collect()
    }

    #[test]
    fn free_capacity_is_granted_across_links() {
        let capacity = Capacity::new(1);
        let (a, b) = (Link::for_test(1, true), Link::for_test(2, true));
        capacity.join(&a);
        assert_eq!(grants(&a), [(1, 0)]);
        capacity.join(&b);
        let CapacityAdmission::Run(slot) = capacity.handle_request(&a) else { panic!("a slot is free") };
        assert!(matches!(capacity.handle_request(&b), CapacityAdmission::AtCapacity));
        assert_eq!((grants(&b).pop(), capacity.load()), (Some((0, 1)), 1));
        drop(slot);
        assert_eq!((grants(&b).pop(), capacity.load()), (Some((1, 0)), 0));
    }

    #[tokio::test]
    async fn held_requests_run_in_order_without_cancelled_ones() {
        let capacity = Capacity::new(1);
        let old = Link::for_test(1, false);
        capacity.join(&old);
        let CapacityAdmission::Run(slot) = capacity.handle_request(&old) else { panic!("a slot is free") };
        let held: Vec<_> = (0..3)
            .map(|_| match capacity.handle_request(&old) {
                CapacityAdmission::Held(held) => held,
                CapacityAdmission::Run(_) | CapacityAdmission::AtCapacity => panic!("no slot is free"),
            })
            .collect();
        let mut held = held.into_iter();
        drop(held.next());
        drop(slot);
        let second = held.next().unwrap().wait().await;
        assert!(second.is_some() && capacity.load() == 1);
        drop(second);
        assert!(held.next().unwrap().wait().await.is_some());
        assert_eq!(capacity.load(), 0);
    }
}
