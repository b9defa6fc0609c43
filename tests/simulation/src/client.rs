//! Clients: each request uses its own connection, or one that is kept for as long as it lasts.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::time::{sleep, timeout};
use turmoil::net::TcpStream;

use crate::ledger::{Ending, Event, Ledger};
use crate::plan::RequestPlan;
use crate::secrets;
use crate::{answer, keys};

/// The relays' port.
pub const RELAY_PORT: u16 = 8080;

/// The time without an end after which a client gives up. Every deadline of a relay is over long before.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A connection that may be reused.
type Kept = Option<SendRequest<Full<Bytes>>>;

/// Sends these requests in order, each at its planned time or as soon as the previous one has ended.
pub async fn send_in_turn(requests: Vec<RequestPlan>, ledger: Ledger) {
    let mut kept = None;
    for request in &requests {
        sleep(request.at.saturating_sub(turmoil::elapsed())).await;
        send_one(request, &ledger, &mut kept).await;
        kept = kept.filter(|_| request.client.is_some());
    }
}

/// Sends one request as planned, and records how it ends.
async fn send_one(plan: &RequestPlan, ledger: &Ledger, kept: &mut Kept) {
    let nonce = plan.nonce;
    ledger.note(Event::Sent { nonce });
    let mut exchange = Exchange { plan, ledger, kept, received: Vec::new(), has_begun: false };
    let patience = plan.leaves_after.unwrap_or(PATIENCE);
    let how = match timeout(patience, exchange.run()).await {
        Ok(how) => how,
        Err(_) if plan.leaves_after.is_some() => {
            exchange.check_part();
            Ending::Left
        }
        Err(_) => Ending::Hung,
    };
    ledger.note(Event::Ended { nonce, how });
}

struct Exchange<'a> {
    plan: &'a RequestPlan,
    ledger: &'a Ledger,
    kept: &'a mut Kept,
    received: Vec<u8>,
    /// True once a part of the response itself, not only a comment, has arrived.
    has_begun: bool,
}

impl Exchange<'_> {
    async fn run(&mut self) -> Ending {
        let Some((sender, response)) = self.send().await else { return Ending::Unconnected };
        let status = response.status().as_u16();
        let is_complete = self.read(response.into_body(), status).await;
        if is_complete {
            *self.kept = Some(sender);
        }
        match (status, is_complete) {
            (200, true) => self.handle_complete(),
            (200, false) => self.handle_broken(),
            (_, true) => self.handle_error(),
            (_, false) => Ending::BrokenOff,
        }
    }

    /// Sends the request. The connection is no longer kept: whether it can be is known at the end of the response.
    async fn send(&mut self) -> Option<(SendRequest<Full<Bytes>>, Response<Incoming>)> {
        if let Some(mut sender) = self.kept.take()
            && sender.ready().await.is_ok()
        {
            match sender.send_request(self.request()).await {
                Ok(response) => return Some((sender, response)),
                // The relay had closed it, and received nothing of the request.
                Err(error) if error.is_canceled() => {}
                Err(_) => return None,
            }
        }
        let stream = TcpStream::connect((self.relay(), RELAY_PORT)).await.ok()?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
        tokio::task::spawn_local(connection);
        let response = sender.send_request(self.request()).await.ok()?;
        Some((sender, response))
    }

    fn relay(&self) -> String {
        format!("relay-{}", self.plan.relay)
    }

    fn request(&self) -> Request<Full<Bytes>> {
        let key = self.plan.key.map_or_else(|| secrets::CLIENT_KEY.to_owned(), keys::text);
        let request = Request::post("/v1/chat/completions")
            .header("host", self.relay())
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {key}"))
            .header("x-request-id", id(self.plan.nonce))
            .body(Full::new(answer::prompt(self.plan)));
        request.expect("a fixed head")
    }

    /// Returns true if the body was complete.
    async fn read(&mut self, mut body: Incoming, status: u16) -> bool {
        loop {
            let frame = match body.frame().await {
                None => return true,
                Some(Err(_)) => return false,
                Some(Ok(frame)) => frame,
            };
            let data = frame.into_data().unwrap_or_default();
            self.received.extend_from_slice(&data);
            if status == 200 && !self.has_begun && !self.body().is_empty() {
                self.has_begun = true;
                self.ledger.note(Event::FirstByte { nonce: self.plan.nonce });
            }
            if let Some(pause) = self.plan.reads_each {
                sleep(pause).await;
            }
        }
    }

    fn handle_complete(&self) -> Ending {
        let body = self.body();
        // A stream that breaks between two events ends with the error frame.
        if split_error(&body).1.is_some() {
            return self.handle_broken();
        }
        if body != answer::whole(self.plan) {
            self.wrong("a response ends as complete but differs from the backend's");
        }
        Ending::Answered
    }

    fn handle_error(&self) -> Ending {
        if self.received == answer::BACKEND_ERROR.as_bytes() {
            return Ending::BackendError;
        }
        let body: Value = serde_json::from_slice(&self.received).unwrap_or_default();
        match body["error"]["code"].as_str() {
            Some(code) => Ending::Failed(code.to_owned()),
            None => {
                self.wrong("an error without a code");
                Ending::Failed(String::new())
            }
        }
    }

    fn handle_broken(&self) -> Ending {
        let body = self.body();
        let (part, error) = split_error(&body);
        if !answer::whole(self.plan).starts_with(part) {
            self.wrong("a broken response is not a prefix of the backend's");
        }
        error.map_or(Ending::BrokenOff, Ending::BrokenStream)
    }

    fn check_part(&self) {
        if self.received.is_empty() {
            return;
        }
        let body = self.body();
        // The received part may end anywhere, also in a comment or in an error frame.
        let (part, _) = split_error(&body);
        let part = &part[..part.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)];
        let whole = answer::whole(self.plan);
        if self.plan.answer.streams && !whole.starts_with(part) && !part.starts_with(b"{\"error\"") {
            self.wrong("the bytes that a disconnecting client read are not a prefix of the backend's response");
        }
    }

    /// Returns the received bytes without keep-alive comments.
    fn body(&self) -> Vec<u8> {
        if !self.plan.answer.streams {
            return self.received.clone();
        }
        let mut rest = self.received.as_slice();
        let mut body = Vec::with_capacity(rest.len());
        while !rest.is_empty() {
            let end = rest.windows(2).position(|two| two == b"\n\n").map_or(rest.len(), |at| at + 2);
            let (event, later) = rest.split_at(end);
            if !event.starts_with(b":") {
                body.extend_from_slice(event);
            }
            rest = later;
        }
        body
    }

    fn wrong(&self, what: &str) {
        let tail = String::from_utf8_lossy(&self.received[self.received.len().saturating_sub(200)..]).into_owned();
        self.ledger.note(Event::Wrong(format!("request {}: {what}; it ends with {tail:?}", self.plan.nonce)));
    }
}

/// Returns the id of a request, which is the same everywhere.
pub fn id(nonce: usize) -> String {
    format!("n-{nonce}")
}

/// Splits a body into the part of the backend's response, and the code of the error frame after it.
fn split_error(body: &[u8]) -> (&[u8], Option<String>) {
    let marker = b"data: {\"error\"";
    let Some(at) = body.windows(marker.len()).position(|window| window == marker) else { return (body, None) };
    let frame = String::from_utf8_lossy(&body[at + "data: ".len()..]).into_owned();
    let error: Value = serde_json::from_str(frame.trim()).unwrap_or_default();
    let code = error["error"]["code"].as_str().or(error["error"]["message"].as_str()).unwrap_or("unreadable");
    // The relay ends a truncated event of the backend before it begins its own frame.
    let part = body[..at].strip_suffix(b"\n\n").filter(|part| !part.ends_with(b"}")).unwrap_or(&body[..at]);
    (part, Some(code.to_owned()))
}

/// Retries until a request succeeds; fails if none does in time. Only violations are recorded.
pub async fn probe(plan: &RequestPlan, patience: Duration, ledger: &Ledger) -> Result<(), Ending> {
    let mut last = Ending::Hung;
    let trying = async {
        loop {
            let own = Ledger::default();
            let mut exchange = Exchange { plan, ledger: &own, kept: &mut None, received: Vec::new(), has_begun: false };
            last = exchange.run().await;
            let noted = own.entries().into_iter().map(|entry| entry.event);
            noted.filter(|event| matches!(event, Event::Wrong(_))).for_each(|event| ledger.note(event));
            if last == Ending::Answered {
                return;
            }
            sleep(Duration::from_millis(300)).await;
        }
    };
    timeout(patience, trying).await.map_err(|_| last)
}
