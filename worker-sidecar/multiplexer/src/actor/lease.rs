//! A request's hold on a slot: first its place in the queue, then its lease. Dropping either releases it, however its
//! holder ends.
//!
//! The slot itself creates a lease and hands it over, so there is no moment between admission and accounting at which a
//! swap could begin. If the receiver is gone, the lease is dropped by the slot and released like any other.

use std::pin::Pin;
use std::task::{Context, Poll};

use modelrelay_protocol::secret::Secret;
use tokio::sync::{mpsc, oneshot, watch};
use url::Url;

use super::Message;
use crate::Model;
use crate::board::Place;
use crate::effect::LeaseEnd;
use crate::error::SlotError;
use crate::event::{Event, Generation, RequestKey};

/// A request that waits for its lease, or for an error. Dropping it cancels the request.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct PendingLease {
    request: RequestKey,
    answer: oneshot::Receiver<Result<Lease, SlotError>>,
    /// `None` once the result has arrived.
    mailbox: Option<mpsc::UnboundedSender<Message>>,
}

/// Cancels a request before its holder drops the request or the lease.
#[derive(Debug)]
pub struct CancelHandle {
    request: RequestKey,
    /// Does not keep the slot's task alive.
    mailbox: Option<mpsc::WeakUnboundedSender<Message>>,
}

/// The right to use a model's backend. Dropping it releases it: hold it until the connection to the backend is closed
/// or can be reused.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct Lease {
    request: RequestKey,
    model: Model,
    generation: Generation,
    // On the heap, because a request without a multiplexer reserves space for a lease, too.
    backend: Box<LeasedBackend>,
    end: watch::Receiver<Option<LeaseEnd>>,
    /// `None` once it is released.
    mailbox: Option<mpsc::UnboundedSender<Message>>,
    place: Place,
}

/// The backend of a lease.
#[derive(Debug)]
pub(super) struct LeasedBackend {
    pub(super) url: Url,
    pub(super) key: Option<Secret>,
    /// Its name for the model, if that is not the id.
    pub(super) name: Option<Model>,
}

/// A report that a lease's backend could not be reached. It outlives the lease: it is sent to the slot once the failure
/// has been sent to the relay.
#[derive(Debug)]
pub struct ConnectFailureReport {
    mailbox: mpsc::UnboundedSender<Message>,
    generation: Generation,
}

impl PendingLease {
    pub(super) fn new(
        request: RequestKey,
        answer: oneshot::Receiver<Result<Lease, SlotError>>,
        mailbox: mpsc::UnboundedSender<Message>,
    ) -> Self {
        Self { request, answer, mailbox: Some(mailbox) }
    }

    /// Creates a request that no slot accepts.
    pub(crate) fn refused(request: RequestKey, error: SlotError) -> Self {
        let (sender, answer) = oneshot::channel();
        // The receiver still exists.
        let _ = sender.send(Err(error));
        Self { request, answer, mailbox: None }
    }

    /// Returns a handle that cancels the request, whether it waits or has its lease by then.
    pub fn ticket(&self) -> CancelHandle {
        CancelHandle { request: self.request, mailbox: self.mailbox.as_ref().map(mpsc::UnboundedSender::downgrade) }
    }
}

impl CancelHandle {
    /// Cancels the request. Its capacity is free for all messages that are sent to the slot after this.
    pub fn cancel(self) {
        if let Some(mailbox) = self.mailbox.and_then(|mailbox| mailbox.upgrade()) {
            let _ = mailbox.send(Message::Cancelled(self.request));
        }
    }
}

impl Future for PendingLease {
    type Output = Result<Lease, SlotError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(cx));
        self.mailbox = None;
        // A slot whose task is gone is out of use; no request may wait for it.
        Poll::Ready(answer.unwrap_or(Err(SlotError::Quarantined)))
    }
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            // A lease that is already on its way is dropped with the receiver, after this.
            let _ = mailbox.send(Message::Cancelled(self.request));
        }
    }
}

impl Lease {
    pub(super) fn new(
        (request, model, generation): (RequestKey, Model, Generation),
        backend: LeasedBackend,
        end: watch::Receiver<Option<LeaseEnd>>,
        mailbox: mpsc::UnboundedSender<Message>,
        place: Place,
    ) -> Self {
        Self { request, model, generation, backend: Box::new(backend), end, mailbox: Some(mailbox), place }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The index of the slot that holds the model.
    pub fn slot(&self) -> usize {
        self.place.slot()
    }

    /// The URL of its backend.
    pub fn url(&self) -> &Url {
        &self.backend.url
    }

    /// The API key of its backend.
    pub fn key(&self) -> Option<&Secret> {
        self.backend.key.as_ref()
    }

    /// The backend's name for the model.
    pub fn backend_name(&self) -> &str {
        self.backend.name.as_ref().unwrap_or(&self.model)
    }

    /// The load of the slot that this lease belongs to.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns when the slot requires the request to end: close the connection to the backend, report the reason to the
    /// relay, and drop the lease.
    pub async fn cancelled(&self) -> LeaseEnd {
        let mut end = self.end.clone();
        match end.wait_for(Option::is_some).await {
            Ok(end) => end.unwrap_or(LeaseEnd::Shutdown),
            // The slot's task is gone, so no reason will arrive.
            Err(_) => LeaseEnd::Shutdown,
        }
    }

    /// Returns a report that the backend could not be reached, or closed the connection.
    pub fn failure_report(&self) -> Option<ConnectFailureReport> {
        let mailbox = self.mailbox.clone()?;
        Some(ConnectFailureReport { mailbox, generation: self.generation })
    }

    /// Releases the lease at once. The returned future completes when the slot has handled this and every relay's new
    /// grant is queued: the message that ends the request on the link is sent after that. `answered`: the backend
    /// responded completely.
    pub fn release(mut self, answered: bool) -> impl Future<Output = ()> + Send + 'static {
        let (seen, until_seen) = oneshot::channel();
        self.give_back(answered, Some(seen));
        drop(self);
        async move {
            // A slot that is gone handles nothing and grants nothing.
            let _ = until_seen.await;
        }
    }

    fn give_back(&mut self, answered: bool, seen: Option<oneshot::Sender<()>>) {
        if let Some(mailbox) = self.mailbox.take() {
            let _ = mailbox.send(Message::Released { request: self.request, answered, seen });
        }
    }
}

impl ConnectFailureReport {
    /// Sends the report to the slot, which probes at once.
    pub fn send(self) {
        let _ = self.mailbox.send(Message::Event(Event::ConnectFailed { generation: self.generation }));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back(false, None);
    }
}
