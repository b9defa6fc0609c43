//! What a request holds of a slot: first its place in the line, then its lease. Both end by being dropped, in whatever way
//! their holder ends.
//!
//! A lease is made by the slot itself and handed over; so between being allowed and being counted there is no moment in
//! which a swap could begin. When nobody is left to take it, it is dropped in the slot's hands, and counts as any other
//! that was given back.

use std::pin::Pin;
use std::task::{Context, Poll};

use modelrelay_protocol::secret::Secret;
use tokio::sync::{mpsc, oneshot, watch};
use url::Url;

use super::Message;
use crate::multiplexer::Model;
use crate::multiplexer::board::Place;
use crate::multiplexer::effect::LeaseEnd;
use crate::multiplexer::error::SlotError;
use crate::multiplexer::event::{Event, Generation, RequestKey};

/// A request that waits for its lease, or for the word that it gets none. Dropping it is how it is cancelled.
#[derive(Debug)]
#[must_use = "a request that nobody waits for is cancelled"]
pub struct Arriving {
    request: RequestKey,
    answer: oneshot::Receiver<Result<Lease, SlotError>>,
    /// None once there is an answer.
    mailbox: Option<mpsc::UnboundedSender<Message>>,
}

/// Who may say that a request is wanted no more, before its holder has come to drop what it has.
#[derive(Debug)]
pub struct Ticket {
    request: RequestKey,
    /// Not what keeps the slot's task.
    mailbox: Option<mpsc::WeakUnboundedSender<Message>>,
}

/// The right to talk to a model's backend. Dropping it gives it back: hold it until the backend's connection is closed or
/// can be used again.
#[derive(Debug)]
#[must_use = "a lease that is dropped is given back"]
pub struct Lease {
    request: RequestKey,
    model: Model,
    generation: Generation,
    // On the heap: a request without a multiplexer has room for a lease, too.
    backend: Box<Backend>,
    end: watch::Receiver<Option<LeaseEnd>>,
    /// None once it is given back.
    mailbox: Option<mpsc::UnboundedSender<Message>>,
    place: Place,
}

/// The backend of a lease.
#[derive(Debug)]
pub(super) struct Backend {
    pub(super) url: Url,
    pub(super) key: Option<Secret>,
    /// Its name for the model, if that is not the id.
    pub(super) name: Option<Model>,
}

/// That a lease's backend could not be reached. Outlives the lease: the slot hears of it once the relay has read of the failure.
#[derive(Debug)]
pub struct Suspicion {
    mailbox: mpsc::UnboundedSender<Message>,
    generation: Generation,
}

impl Arriving {
    pub(super) fn new(
        request: RequestKey,
        answer: oneshot::Receiver<Result<Lease, SlotError>>,
        mailbox: mpsc::UnboundedSender<Message>,
    ) -> Self {
        Self { request, answer, mailbox: Some(mailbox) }
    }

    /// A request that no slot takes.
    pub(crate) fn refused(request: RequestKey, error: SlotError) -> Self {
        let (sender, answer) = oneshot::channel();
        // The receiver is right here.
        let _ = sender.send(Err(error));
        Self { request, answer, mailbox: None }
    }

    /// To cancel it with, be it waiting or leased by then.
    pub fn ticket(&self) -> Ticket {
        Ticket { request: self.request, mailbox: self.mailbox.as_ref().map(mpsc::UnboundedSender::downgrade) }
    }
}

impl Ticket {
    /// The request's place is free for what comes next: all that is told to the slot after this.
    pub fn cancel(self) {
        if let Some(mailbox) = self.mailbox.and_then(|mailbox| mailbox.upgrade()) {
            let _ = mailbox.send(Message::Cancelled(self.request));
        }
    }
}

impl Future for Arriving {
    type Output = Result<Lease, SlotError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(cx));
        self.mailbox = None;
        // A slot whose task is gone is out of use, and nobody shall wait for it.
        Poll::Ready(answer.unwrap_or(Err(SlotError::Quarantined)))
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            // Should the lease be on its way already, it is dropped with the receiver, after this.
            let _ = mailbox.send(Message::Cancelled(self.request));
        }
    }
}

impl Lease {
    pub(super) fn new(
        (request, model, generation): (RequestKey, Model, Generation),
        backend: Backend,
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

    /// Which of the worker's slots holds it.
    pub fn slot(&self) -> usize {
        self.place.slot()
    }

    /// Where its backend is.
    pub fn url(&self) -> &Url {
        &self.backend.url
    }

    /// What its backend wants to be shown.
    pub fn key(&self) -> Option<&Secret> {
        self.backend.key.as_ref()
    }

    /// The backend's name for the model.
    pub fn backend_name(&self) -> &str {
        self.backend.name.as_ref().unwrap_or(&self.model)
    }

    /// Which load of the slot this lease belongs to.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns when the slot wants the request to end: close the connection to the backend, tell the relay why, and drop
    /// the lease.
    pub async fn cancelled(&self) -> LeaseEnd {
        let mut end = self.end.clone();
        match end.wait_for(Option::is_some).await {
            Ok(end) => end.unwrap_or(LeaseEnd::Shutdown),
            // The slot's task is gone, and nobody would ever say.
            Err(_) => LeaseEnd::Shutdown,
        }
    }

    /// Nobody was found at the backend's address, or it broke off.
    pub fn suspicion(&self) -> Option<Suspicion> {
        let mailbox = self.mailbox.clone()?;
        Some(Suspicion { mailbox, generation: self.generation })
    }

    /// Gives the lease back at once. What this returns ends when the slot has seen it and every relay's new grant is queued:
    /// whatever ends the request on the wire comes after that. `answered`: the backend answered to the end.
    pub fn release(mut self, answered: bool) -> impl Future<Output = ()> + Send + 'static {
        let (seen, until_seen) = oneshot::channel();
        self.give_back(answered, Some(seen));
        drop(self);
        async move {
            // A slot that is gone sees nothing, and grants nothing.
            let _ = until_seen.await;
        }
    }

    fn give_back(&mut self, answered: bool, seen: Option<oneshot::Sender<()>>) {
        if let Some(mailbox) = self.mailbox.take() {
            let _ = mailbox.send(Message::Released { request: self.request, answered, seen });
        }
    }
}

impl Suspicion {
    /// Tells the slot, which looks at once.
    pub fn tell(self) {
        let _ = self.mailbox.send(Message::Event(Event::ConnectFailed { generation: self.generation }));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back(false, None);
    }
}
