//! The writing half of a link: writes what is queued, a batch at a time, with one flush per batch and never on a timer.

use std::sync::Arc;

use futures_util::stream::SplitSink;
use futures_util::{Sink, SinkExt};
use modelrelay_multiplexer::net::Stream;
use modelrelay_protocol::frame;
use modelrelay_protocol::outbox::Frame;
use tokio::io::BufReader;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Bytes, Error, Message, Utf8Bytes};

use super::liveness::{Counted, Traffic};
use super::{Link, Next};
use crate::metrics::Metrics;

/// The limits of a batch: a message that arrives during the flush may be more urgent than the queued ones.
const BATCH_FRAMES: usize = 64;
const BATCH_BYTES: usize = 64 << 10;

pub(crate) type WebSocket = WebSocketStream<BufReader<Counted<Stream>>>;

/// Writes until the link is closed or its socket fails.
pub(crate) async fn run(
    link: Arc<Link>,
    mut sink: SplitSink<WebSocket, Message>,
    traffic: Arc<Traffic>,
    metrics: Arc<Metrics>,
) -> Result<(), Error> {
    loop {
        link.work().await;
        let mut more = true;
        while more {
            traffic.begin_output();
            let written = batch(&link, &mut sink, &metrics).await;
            traffic.end_output();
            match written? {
                Batch::Closed => return Ok(()),
                Batch::Empty => more = false,
                Batch::Written => link.handle_written(),
            }
        }
    }
}

enum Batch {
    Empty,
    Written,
    Closed,
}

async fn batch<S>(link: &Link, sink: &mut S, metrics: &Metrics) -> Result<Batch, Error>
where
    S: Sink<Message, Error = Error> + Unpin,
{
    let (mut frames, mut bytes) = (0, 0);
    while frames < BATCH_FRAMES && bytes < BATCH_BYTES {
        let message = match link.next() {
            Next::Nothing => break,
            Next::Ping(payload) => Message::Ping(Bytes::from_static(payload)),
            Next::Close(code, reason) => {
                let frame = CloseFrame { code: CloseCode::from(code), reason: Utf8Bytes::from_static(reason) };
                sink.send(Message::Close(Some(frame))).await?;
                return Ok(Batch::Closed);
            }
            Next::Frame(Frame::Text(text)) => Message::text(text),
            Next::Frame(Frame::Binary { header, payload }) => {
                metrics.sent_bytes.inc_by(payload.len() as u64);
                Message::Binary(frame::join(header, &payload))
            }
        };
        frames += 1;
        bytes += message.len();
        sink.feed(message).await?;
    }
    if frames == 0 {
        return Ok(Batch::Empty);
    }
    sink.flush().await?;
    Ok(Batch::Written)
}
