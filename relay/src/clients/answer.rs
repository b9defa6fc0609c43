//! The response's body, as the client's connection polls it.
//!
//! Bytes are forwarded as they arrive. A broken event stream gets the dialect's error frame. If every client handles
//! that frame as an error, the body then ends without the stream's terminator: a client whose connection breaks may
//! drop the bytes that it has read, including the frame. All other broken responses are aborted: every SDK treats a
//! body that merely ends as a success.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::{Frame, SizeHint};
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::event_stream::{SequenceNumber, Tail, UsageFilter};
use modelrelay_protocol::rate_limit::RateLimit;
use tokio::time::Sleep;

use super::browser;
use super::ticket::Ticket;
use crate::http::respond::Client;
use crate::net::peer::Flushed;
use crate::provider::response::{Head, ResponsePipe};

/// The header that names the worker of a response. A backend's own header of this name never reaches clients.
const WORKER_HEADER: &str = "x-modelrelay-worker";

/// How long the last frame of a broken stream may take to be sent to a slow client.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);
const FLUSH_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The response's body.
pub struct Answer {
    ticket: Ticket,
    response: Arc<ResponsePipe>,
    dialect: Dialect,
    request_id: String,
    stage: AnswerStage,
    is_event_stream: bool,
    /// True if the clients of this route raise the error frame, so that the connection need not break.
    raises_frame: bool,
    length: Option<u64>,
    /// True if the status allows no body: any body of the backend is dropped.
    is_bodiless: bool,
    /// Removes the usage that only the relay requested.
    usage_filter: Option<UsageFilter>,
    /// The last bytes that were sent, which show whether an event is complete.
    tail: Tail,
    /// For the Responses dialect.
    sequence_number: SequenceNumber,
    sent_any: bool,
    keepalive: Option<Keepalive>,
    flushed: Option<Flushed>,
}

struct Keepalive {
    after: Duration,
    sleep: Pin<Box<Sleep>>,
}

enum AnswerStage {
    /// The status has been sent already; the backend's head is still to come.
    AwaitingHead,
    Streaming,
    /// The response is broken, and its last bytes are being sent; wait until the connection has accepted them.
    Flushing {
        /// True if the body is then ended and not aborted.
        ends_body: bool,
        since: tokio::time::Instant,
        pause: Option<Pin<Box<Sleep>>>,
    },
    Done,
}

/// Responds with the backend's head and body, or with the error in its place.
pub fn respond(client: &Client, mut ticket: Ticket, head: Result<Head, ApiError>) -> Response {
    let head = match head {
        Ok(head) => head,
        Err(error) => {
            ticket.mark_status(error.status());
            return client.error(&error);
        }
    };
    ticket.mark_status(head.status.as_u16());
    if head.is_all() {
        ticket.mark_delivered();
    }
    let is_event_stream = head.is_event_stream();
    let keepalive = ticket.keepalive().filter(|_| is_event_stream);
    let (worker, limit) = (ticket.shown_worker(), ticket.token_limit());
    let is_bodiless = head.status == StatusCode::RESET_CONTENT;
    // Without the usage that only the relay requested, a stream is shorter than announced.
    let is_shortened = is_event_stream && ticket.record().hides_usage;
    let length = head.content_length.filter(|length| *length == 0 || !is_bodiless && !is_shortened);
    let mut answer = Answer::new(client, ticket, AnswerStage::Streaming, is_event_stream, length, keepalive);
    answer.is_bodiless = is_bodiless;
    let mut response = Response::new(Body::new(answer));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    if let Some(worker) = worker.and_then(|name| HeaderValue::from_bytes(name.as_bytes()).ok()) {
        response.headers_mut().insert(WORKER_HEADER, worker);
    }
    limit_headers(response.headers_mut(), limit);
    browser::confine(response.headers_mut());
    if is_event_stream {
        unbuffered(&mut response);
    }
    response
}

impl Answer {
    /// Responds 200 at once, so that an impatient proxy gets a byte; later errors are sent in the stream.
    pub fn awaiting_head(client: &Client, mut ticket: Ticket, keepalive: Duration) -> Response {
        ticket.mark_status(200);
        let limit = ticket.token_limit();
        let mut answer = Self::new(client, ticket, AnswerStage::AwaitingHead, true, None, Some(keepalive));
        if let Some(keepalive) = &mut answer.keepalive {
            keepalive.sleep.as_mut().reset(tokio::time::Instant::now());
        }
        let mut response = Response::new(Body::new(answer));
        let headers = response.headers_mut();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        limit_headers(headers, limit);
        browser::confine(headers);
        unbuffered(&mut response);
        response
    }

    fn new(
        client: &Client,
        ticket: Ticket,
        stage: AnswerStage,
        is_event_stream: bool,
        length: Option<u64>,
        keepalive: Option<Duration>,
    ) -> Self {
        let usage_filter = (is_event_stream && ticket.record().hides_usage).then(UsageFilter::default);
        Self {
            response: Arc::clone(&ticket.record().response),
            raises_frame: ticket.record().endpoint.raises_error_frame(),
            flushed: client.flushed.clone(),
            ticket,
            dialect: client.dialect,
            request_id: client.request_id.clone(),
            stage,
            is_event_stream,
            length,
            is_bodiless: false,
            usage_filter,
            tail: Tail::default(),
            sequence_number: SequenceNumber::default(),
            sent_any: false,
            keepalive: keepalive.map(|after| Keepalive { after, sleep: Box::pin(tokio::time::sleep(after)) }),
        }
    }

    fn poll_stream(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let end = loop {
            match self.response.poll_chunk(cx) {
                Poll::Ready(Some(Ok(_))) if self.is_bodiless => {}
                Poll::Ready(Some(Ok(chunk))) => {
                    let chunk = match &mut self.usage_filter {
                        Some(filter) => filter.push(chunk),
                        None => chunk,
                    };
                    if !chunk.is_empty() {
                        return Poll::Ready(Some(Ok(self.pass(chunk))));
                    }
                }
                Poll::Ready(Some(Err(error))) => break Err(error),
                Poll::Ready(None) => break Ok(()),
                Poll::Pending => return self.poll_keepalive(cx),
            }
        };
        let held = self.usage_filter.as_mut().map(UsageFilter::finish).filter(|held| !held.is_empty());
        if let Some(held) = held {
            // The end comes again at the next poll.
            return Poll::Ready(Some(Ok(self.pass(held))));
        }
        match end {
            Err(error) => self.break_off(&error, cx),
            Ok(()) => {
                self.stage = AnswerStage::Done;
                self.ticket.mark_delivered();
                Poll::Ready(None)
            }
        }
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.response.poll_head(cx) {
            Poll::Ready(Ok(head)) if head.status == StatusCode::OK && head.is_event_stream() => {
                self.stage = AnswerStage::Streaming;
                self.poll_stream(cx)
            }
            Poll::Ready(Ok(head)) => {
                // The client expects a stream, and would read anything else as one without events.
                let message = format!("the backend returned {} instead of a stream", head.status.as_u16());
                let error = ApiError::new(ErrorKind::Worker("backend_error".into()), message);
                self.response.fail(error.clone());
                self.break_off(&error, cx)
            }
            Poll::Ready(Err(error)) => self.break_off(&error, cx),
            Poll::Pending => self.poll_keepalive(cx),
        }
    }

    fn poll_keepalive(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        // Never inside an event: the comment would become a part of it.
        let between_events = self.tail.is_between_events();
        let Some(keepalive) = &mut self.keepalive else { return Poll::Pending };
        ready!(keepalive.sleep.as_mut().poll(cx));
        let next = tokio::time::Instant::now() + keepalive.after;
        keepalive.sleep.as_mut().reset(next);
        if !between_events {
            // Polled again to register the waker, so that the next interval is not missed.
            let _ = keepalive.sleep.as_mut().poll(cx);
            return Poll::Pending;
        }
        let position = matches!(self.stage, AnswerStage::AwaitingHead).then(|| self.ticket.queue_position()).flatten();
        let frame = match position {
            Some(position) => self.dialect.waiting_frame(position).into(),
            None => Bytes::from_static(self.dialect.keepalive_frame().as_bytes()),
        };
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn pass(&mut self, chunk: Bytes) -> Frame<Bytes> {
        if self.is_event_stream {
            self.tail.follow(&chunk);
            if self.dialect == Dialect::Responses {
                self.sequence_number.follow(&chunk);
            }
        }
        if let Some(keepalive) = &mut self.keepalive {
            keepalive.sleep.as_mut().reset(tokio::time::Instant::now() + keepalive.after);
        }
        self.sent_any = true;
        self.ticket.mark_bytes(&chunk, self.is_event_stream);
        // The connection does not poll for the end of a body whose length it knows.
        if self.length == Some(self.ticket.bytes()) {
            self.ticket.mark_delivered();
        }
        Frame::data(chunk)
    }

    /// Begins the end of a broken response, in an event stream with the error frame.
    fn break_off(&mut self, error: &ApiError, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let is_whole = !self.sent_any || self.tail.is_between_events();
        // Half an event hides the frame from some clients (LiteLLM for Anthropic's API).
        let ends_body = self.is_event_stream && self.raises_frame && is_whole && self.length.is_none();
        self.stage = AnswerStage::Flushing { ends_body, since: tokio::time::Instant::now(), pause: None };
        self.ticket.mark_broken(error);
        if !self.is_event_stream {
            return self.poll_broken_end(cx);
        }
        let error = error.clone().in_begun_response();
        let mut frame = self.dialect.error_frame(&error, &self.request_id, self.sequence_number.next());
        if !is_whole {
            // The frame must not become a part of an incomplete event.
            frame.insert_str(0, "\n\n");
        }
        Poll::Ready(Some(Ok(Frame::data(frame.into()))))
    }

    /// Ends or aborts the body once all previous bytes were sent: a client should see how far the response came.
    fn poll_broken_end(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let ends_body = ready!(self.poll_flushing(cx));
        self.stage = AnswerStage::Done;
        if ends_body {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the response is incomplete"))))
    }

    /// Yields at least once, which lets hyper write the frame, and as long as the connection is still writing it. Then
    /// returns true if the body ends: bytes that a client has not read in time are dropped with the connection.
    fn poll_flushing(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let AnswerStage::Flushing { ends_body, since, pause } = &mut self.stage else { return Poll::Ready(false) };
        if let Some(pause) = pause {
            ready!(pause.as_mut().poll(cx));
            let flushed = self.flushed.as_ref().is_none_or(Flushed::is_flushed);
            if flushed || since.elapsed() >= FLUSH_PATIENCE {
                return Poll::Ready(flushed && *ends_body);
            }
        }
        let mut sleep = Box::pin(tokio::time::sleep(FLUSH_POLL_INTERVAL));
        let polled = sleep.as_mut().poll(cx);
        *pause = Some(sleep);
        polled.map(|()| false)
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        match this.stage {
            AnswerStage::AwaitingHead => this.poll_head(cx),
            AnswerStage::Streaming => this.poll_stream(cx),
            AnswerStage::Flushing { .. } => this.poll_broken_end(cx),
            AnswerStage::Done => Poll::Ready(None),
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Adds the key's limit of tokens. It replaces a limit that the backend reports, which is that of all keys together.
fn limit_headers(headers: &mut HeaderMap, limit: Option<RateLimit>) {
    for (name, value) in limit.iter().flat_map(RateLimit::headers) {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Disables the buffering of streams in nginx, and in proxies that follow its convention.
fn unbuffered(response: &mut Response) {
    response.headers_mut().entry("x-accel-buffering").or_insert(HeaderValue::from_static("no"));
}
