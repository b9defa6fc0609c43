//! Establishes a registered link to an address.
//!
//! A link may replace an older one to the same relay, whose secret or token has since been replaced: the registration
//! states this (`succeeds`), and both live until the older one has finished its requests.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use modelrelay_protocol::limits::{HEARTBEAT_INTERVAL, REGISTER_TIMEOUT, STREAM_WINDOW_BYTES};
use modelrelay_protocol::message::{Parsed, Register, RegisterAck, RelayToWorker, WorkerLimits, WorkerToRelay, encode};
use modelrelay_protocol::version::{Capabilities, Capability};
use tokio_tungstenite::tungstenite::Message;

use super::session::{CLOSE_TIMEOUT, PROTOCOL_ERROR, Session};
use super::{End, draining};
use crate::link::liveness::Traffic;
use crate::link::writer::WebSocket;
use crate::link::{Advertised, DialError, EndKind, Endpoint, Link, Way, dial};
use crate::settings::Credential;
use crate::worker::Worker;

/// How long one registration waits for another to end. After that they may reach the same relay, which costs a link.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);

/// A registered link; [`Linked::serve`] serves it, and dropping this detaches it.
pub(super) struct Linked {
    socket: WebSocket,
    traffic: Arc<Traffic>,
    heartbeat: Duration,
    attached: Attached,
}

/// Detaches the link, however its session ends.
struct Attached {
    worker: Arc<Worker>,
    link: Arc<Link>,
}

impl Linked {
    /// The link.
    pub(super) fn link(&self) -> &Arc<Link> {
        &self.attached.link
    }

    /// Serves the link to its end.
    pub(super) async fn serve(self) -> End {
        let Self { socket, traffic, heartbeat, attached } = self;
        Session::new(&attached.worker, &attached.link, heartbeat).pump(socket, traffic).await
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.worker.detach(&self.link);
    }
}

/// Establishes a link; with `older`, one to the same relay that replaces it.
pub(super) async fn establish(
    worker: &Arc<Worker>,
    endpoint: &Endpoint,
    version: &str,
    older: Option<&Link>,
) -> Result<Linked, End> {
    let mut drain = worker.drain.subscribe();
    tokio::select! {
        linked = dial_and_register(worker, endpoint, version, older) => linked,
        // No request runs on a link that is still being established, so nothing has to be finished.
        () = draining(&mut drain) => Err(End::new(EndKind::Failed, "draining", "the worker is draining")),
    }
}

async fn dial_and_register(
    worker: &Arc<Worker>,
    endpoint: &Endpoint,
    version: &str,
    older: Option<&Link>,
) -> Result<Linked, End> {
    let credential = worker.credential().await;
    let (mut socket, traffic) = connect(worker, endpoint, &credential).await?;
    tracing::info!(relay = %endpoint.name(), "connected to proxy");
    // Two dials to one balancer may reach the same relay. The second must know of the first, or it would replace it.
    let turn = async {
        match endpoint.addr {
            Some(_) => None,
            None => tokio::time::timeout(TURN_TIMEOUT, worker.links.register_turn()).await.ok(),
        }
    };
    let _turn = turn.await;
    let advertised = worker.serving.advertised();
    let registering = register(worker, &mut socket, version, &advertised, older);
    let ack = tokio::time::timeout(REGISTER_TIMEOUT, registering)
        .await
        .unwrap_or_else(|_| Err(End::new(EndKind::Failed, "register_timeout", "no register_ack within 10 s")))?;
    // A balancer may have chosen a relay that was not linked; the dial for that relay will find it.
    let astray = older.is_some_and(|older| older.relay_id != ack.relay_id);
    if ack.duplicate || astray {
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, socket.close(None)).await;
        let reason = if astray { "connected to another relay" } else { "already linked to this relay" };
        let mut end = End::new(EndKind::Duplicate, "duplicate", reason);
        end.relay_id = ack.relay_id;
        return Err(end);
    }
    let link = link_of(worker, endpoint, &ack, credential);
    for warning in &ack.warnings {
        tracing::warn!(relay = %link.relay, "warning from the relay: {warning}");
    }
    tracing::info!(relay = %link.relay, worker_id = %ack.worker_id, models = ack.models.len(), core1 = link.core1, slots1 = link.slots1, "registered");
    if let Some(count) = ack.relay_count {
        worker.set_relay_count(count);
    }
    // Zero: the relay does not report it.
    if let Some(limits) = ack.limits.filter(|limits| limits.cold_timeout_ms > 0) {
        worker.serving.check_patience(&link, Duration::from_millis(limits.cold_timeout_ms));
    }
    let heartbeat = ack.limits.map_or(HEARTBEAT_INTERVAL, |limits| Duration::from_millis(limits.heartbeat_ms.max(10)));
    worker.attach(&link, &advertised);
    if let Some(older) = older {
        older.succeed();
    }
    Ok(Linked { socket, traffic, heartbeat, attached: Attached { worker: Arc::clone(worker), link } })
}

async fn connect(
    worker: &Worker,
    endpoint: &Endpoint,
    credential: &Credential,
) -> Result<(WebSocket, Arc<Traffic>), End> {
    let (live, trust) = (worker.live.load_full(), worker.trust.load_full());
    let way = Way { headers: &live.relay_headers, proxies: &worker.settings.proxies, trust: &trust };
    let dialled = dial(endpoint, &live.provider, credential, &way).await;
    dialled.map_err(|error| {
        let text = error.to_string();
        match error {
            DialError::Unauthorized { .. } => {
                End { refused: Some(Box::new(credential.clone())), ..End::new(EndKind::Refused, "auth_failed", text) }
            }
            DialError::Status { retry_after, .. } => End { retry_after, ..End::new(EndKind::Failed, "rejected", text) },
            DialError::Io(_) => End::new(EndKind::Failed, "unreachable", text),
        }
    })
}

fn link_of(worker: &Worker, endpoint: &Endpoint, ack: &RegisterAck, credential: Credential) -> Arc<Link> {
    let capabilities = Capabilities::from_names(&ack.capabilities).intersection(&capabilities(worker));
    Link::new(endpoint.name(), ack, &capabilities, credential)
}

/// Returns the capabilities that this worker announces.
fn capabilities(worker: &Worker) -> Capabilities {
    Capabilities::new([Capability::Core1, Capability::Homes1].into_iter().chain(worker.serving.capability()))
}

async fn register(
    worker: &Arc<Worker>,
    socket: &mut WebSocket,
    version: &str,
    advertised: &Advertised,
    older: Option<&Link>,
) -> Result<RegisterAck, End> {
    let register = WorkerToRelay::Register(Register {
        worker_name: worker.settings.name.clone(),
        models: advertised.models.clone(),
        max_concurrent: worker.serving.max_concurrency(),
        protocol_version: Some(version.to_owned()),
        current_load: worker.serving.running(),
        instance_id: Some(worker.instance_id.clone()),
        pool: worker.settings.pool.clone(),
        location: Some(&worker.settings.location).filter(|it| !it.is_unknown()).cloned().map(Box::new),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        have: worker.links.connected_relay_ids(older),
        succeeds: older.and_then(|older| older.relay_id.clone()).into_iter().collect(),
        capabilities: capabilities(worker).names(),
        limits: Some(WorkerLimits { stream_window_bytes: STREAM_WINDOW_BYTES }),
        slots: worker.serving.slots(),
        model_details: advertised.details.clone(),
        naming: advertised.naming,
        failing: advertised.failing.clone(),
    });
    let lost = |reason: String| End::new(EndKind::Failed, "unreachable", reason);
    socket.send(Message::text(encode(&register))).await.map_err(|error| lost(error.to_string()))?;
    loop {
        let message = match socket.next().await {
            Some(Ok(message)) => message,
            Some(Err(error)) => return Err(lost(error.to_string())),
            None => return Err(lost("the relay closed before register_ack".to_owned())),
        };
        match message {
            Message::Text(text) => {
                if let Ok(Parsed::Known(RelayToWorker::RegisterAck(ack))) = RelayToWorker::parse(text.as_str()) {
                    return Ok(ack);
                }
            }
            Message::Close(frame) => {
                let code = frame.as_ref().map_or(0, |frame| u16::from(frame.code));
                let reason = frame.map_or_else(String::new, |frame| frame.reason.to_string());
                let kind = if code == PROTOCOL_ERROR { EndKind::OtherVersion } else { EndKind::Failed };
                return Err(End::new(kind, "closed", format!("the relay closed with {code} {reason}")));
            }
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
}
