//! A worker and its backend in one, with the present protocol or the earlier one that has only text. The costs of the
//! two to a relay can be compared only if nothing else differs, and the real worker speaks the earlier one to earlier
//! relays alone.
//!
//! It sends the responses of [`crate::backend`]. Prompts and responses are small here, below any window, so it ignores
//! credit.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use modelrelay_protocol::frame::{self, BodyKind};
use modelrelay_protocol::message::{
    Grant, Parsed, Pong, Register, RelayToWorker, Request, ResponseChunk, ResponseComplete, ResponseStart,
    WorkerLimits, WorkerToRelay, encode,
};
use modelrelay_protocol::version::{Capability, VERSION};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_tungstenite::tungstenite::Message;

use crate::content::{self, Chunk, DONE, MODEL, Plan};
use crate::crowd::{CrowdError, Socket, link, new_instance, send_message};

/// More than the concurrency of any load here.
const CONCURRENCY: u32 = 4096;

/// The most messages written at once.
const BATCH: usize = 64;

/// Connects to `relay`, and serves until that disconnects. Calls `linked` when it is ready for requests.
pub async fn serve(relay: SocketAddr, is_text: bool, linked: impl FnOnce()) -> Result<(), CrowdError> {
    let mut socket = link(relay, &registration(is_text)).await?;
    if !is_text {
        let grant = Grant { slots: CONCURRENCY, others: 0, capacity: CONCURRENCY, links: 1, models: None };
        send_message(&mut socket, &WorkerToRelay::Grant(grant)).await?;
    }
    linked();
    let (writer, reader) = socket.split();
    let (out, messages) = mpsc::channel(1024);
    let writing = tokio::spawn(write(writer, messages));
    read(reader, &out).await;
    writing.abort();
    Ok(())
}

fn registration(is_text: bool) -> Register {
    let common = Register {
        worker_name: "played".into(),
        models: vec![MODEL.into()],
        max_concurrent: CONCURRENCY,
        ..Register::default()
    };
    if is_text {
        return Register { protocol_version: Some("1".into()), ..common };
    }
    Register {
        protocol_version: Some(VERSION.into()),
        instance_id: Some(new_instance()),
        capabilities: vec![Capability::Core1.as_str().into()],
        limits: Some(WorkerLimits { stream_window_bytes: 256 << 10 }),
        ..common
    }
}

/// Writes all pending messages together.
async fn write(mut writer: SplitSink<Socket, Message>, mut messages: mpsc::Receiver<Message>) {
    let mut batch = Vec::with_capacity(BATCH);
    while messages.recv_many(&mut batch, BATCH).await > 0 {
        for message in batch.drain(..) {
            if writer.feed(message).await.is_err() {
                return;
            }
        }
        if writer.flush().await.is_err() {
            return;
        }
    }
}

async fn read(mut reader: SplitStream<Socket>, out: &mpsc::Sender<Message>) {
    // Requests whose body is incomplete.
    let mut waiting: HashMap<u32, (Request, Vec<u8>)> = HashMap::new();
    while let Some(Ok(message)) = reader.next().await {
        match message {
            Message::Text(text) => match RelayToWorker::parse(&text) {
                Ok(Parsed::Known(RelayToWorker::Request(mut request))) => match (request.stream, request.body.take()) {
                    (Some(stream), _) => drop(waiting.insert(stream, (request, Vec::new()))),
                    (None, body) => answer(request, body.unwrap_or_default().as_bytes(), out),
                },
                Ok(Parsed::Known(RelayToWorker::Ping(ping))) => {
                    let pong = Pong { current_load: Some(0), timestamp_unix_ms: ping.timestamp_unix_ms };
                    let _ = out.send(text_of(&WorkerToRelay::Pong(pong))).await;
                }
                _ => {}
            },
            Message::Binary(bytes) => {
                let Ok(piece) = frame::decode(bytes) else { return };
                let Some((request, body)) = waiting.get_mut(&piece.stream) else { continue };
                body.extend_from_slice(&piece.payload);
                if request.content_length == Some(body.len() as u64)
                    && let Some((request, body)) = waiting.remove(&piece.stream)
                {
                    answer(request, &body, out);
                }
            }
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => {}
        }
    }
}

fn answer(request: Request, body: &[u8], out: &mpsc::Sender<Message>) {
    let Some((plan, digest)) = content::read_body(body) else { return };
    let answer = Answer { id: request.request_id, stream: request.stream, out: out.clone() };
    tokio::spawn(async move {
        // Fails only when the link is gone, and then the response is not needed.
        let _ =
            if plan.chunks == 0 { answer.whole(plan.gap, digest).await } else { answer.streamed(plan, digest).await };
    });
}

type Sent = Result<(), mpsc::error::SendError<Message>>;

/// A response in progress; with a stream's number it is sent in pieces, without one as text.
struct Answer {
    id: String,
    stream: Option<u32>,
    out: mpsc::Sender<Message>,
}

impl Answer {
    async fn whole(self, gap: Duration, digest: u64) -> Sent {
        if !gap.is_zero() {
            sleep(gap).await;
        }
        let body = content::answer(digest);
        let mut complete = ResponseComplete { request_id: self.id.clone(), ..ResponseComplete::default() };
        if self.stream.is_some() {
            self.start("application/json").await?;
            self.piece(&body).await?;
        } else {
            complete.status_code = Some(200);
            complete.headers = Some([("content-type".to_owned(), "application/json".to_owned())].into());
            complete.body = Some(String::from_utf8_lossy(&body).into_owned());
        }
        self.send_text(&WorkerToRelay::ResponseComplete(complete)).await
    }

    async fn streamed(self, plan: Plan, digest: u64) -> Sent {
        if self.stream.is_some() {
            self.start("text/event-stream").await?;
        }
        let begun = Instant::now();
        let mut chunk = Chunk::first(digest);
        for number in 0..plan.chunks {
            if !plan.gap.is_zero() && number > 0 {
                sleep_until(begun + plan.gap * number).await;
            }
            self.piece(chunk.number(number)).await?;
        }
        self.piece(DONE).await?;
        let mut complete = ResponseComplete { request_id: self.id.clone(), ..ResponseComplete::default() };
        if self.stream.is_none() {
            (complete.status_code, complete.headers) = (Some(200), Some([].into()));
        }
        self.send_text(&WorkerToRelay::ResponseComplete(complete)).await
    }

    async fn start(&self, content_type: &str) -> Sent {
        self.send_text(&WorkerToRelay::ResponseStart(ResponseStart {
            request_id: self.id.clone(),
            status_code: 200,
            headers: vec![("content-type".into(), content_type.into())],
            content_length: None,
        }))
        .await
    }

    async fn piece(&self, bytes: &[u8]) -> Sent {
        let Some(stream) = self.stream else {
            let chunk = String::from_utf8_lossy(bytes).into_owned();
            return self
                .send_text(&WorkerToRelay::ResponseChunk(ResponseChunk { request_id: self.id.clone(), chunk }))
                .await;
        };
        let bytes: Bytes = [&frame::encode_header(BodyKind::Response, stream)[..], bytes].concat().into();
        self.out.send(Message::Binary(bytes)).await
    }

    async fn send_text(&self, message: &WorkerToRelay) -> Sent {
        self.out.send(text_of(message)).await
    }
}

fn text_of(message: &WorkerToRelay) -> Message {
    Message::text(encode(message))
}
