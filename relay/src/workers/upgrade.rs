//! From HTTP to a WebSocket: the handshake, and the bounded socket that results from it.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use http::{HeaderMap, HeaderValue, StatusCode};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use modelrelay_protocol::limits::MAX_MESSAGE_BYTES;
use tokio::sync::OwnedSemaphorePermit;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::io::{Liveness, LivenessIo};
use super::read_ahead::ReadAhead;
use super::refuse;
use crate::net::TcpStream;
use crate::net::tls::{Connection, MaybeTls};

/// The size of tungstenite's reads. It clears this number of bytes before each read, and an idle worker holds them; the
/// system calls are larger, see [`ReadAhead`].
const READ_BUFFER_BYTES: usize = 2 << 10;

/// A worker's socket.
pub type Socket = WebSocketStream<ReadAhead<LivenessIo<MaybeTls<TcpStream>>>>;

/// Returns the reply to a valid handshake's key, or the rejection of an invalid one.
pub fn accept(headers: &HeaderMap) -> Result<HeaderValue, Box<Response>> {
    let has = |name, wanted: &str| {
        let values = headers.get_all(name).iter().filter_map(|value: &HeaderValue| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|token| token.trim().eq_ignore_ascii_case(wanted))
    };
    if !has(UPGRADE, "websocket") || !has(SEC_WEBSOCKET_VERSION, "13") && headers.contains_key(SEC_WEBSOCKET_VERSION) {
        let mut response = refuse(StatusCode::UPGRADE_REQUIRED, "this route requires WebSocket, version 13");
        response.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
        response.headers_mut().insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        return Err(Box::new(response));
    }
    let key = headers.get(SEC_WEBSOCKET_KEY).filter(|key| key.len() == 24);
    let Some(key) = key.filter(|_| has(CONNECTION, "upgrade") && has(SEC_WEBSOCKET_VERSION, "13")) else {
        return Err(Box::new(refuse(StatusCode::BAD_REQUEST, "invalid WebSocket handshake")));
    };
    HeaderValue::try_from(derive_accept_key(key.as_bytes()))
        .map_err(|_| Box::new(refuse(StatusCode::BAD_REQUEST, "invalid WebSocket handshake")))
}

/// Returns the response after which the connection is a WebSocket.
pub fn switching(accept: HeaderValue) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    response
}

/// Returns the socket of an upgraded connection of our own listener, and the connection's place there; `None` for a
/// connection of another kind.
pub async fn open(upgraded: Upgraded, liveness: &Arc<Liveness>) -> Option<(Socket, Option<OwnedSemaphorePermit>)> {
    // Without hyper's boxes it costs less.
    let parts = upgraded.downcast::<TokioIo<Connection>>().ok()?;
    let (stream, place) = match parts.io.into_inner() {
        Connection::Plain(io) => {
            let (stream, place) = io.into_parts();
            (MaybeTls::Plain(stream), Some(place))
        }
        Connection::Tls(mut stream) => {
            // The session has a rule of its own for a worker that stops reading.
            stream.get_mut().0.leave_patience_to_others();
            (MaybeTls::Tls(stream), None)
        }
    };
    let config = WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER_BYTES)
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let io = ReadAhead::new(LivenessIo::new(stream, Arc::clone(liveness)));
    let socket = WebSocketStream::from_partially_read(io, parts.read_buf.to_vec(), Role::Server, Some(config)).await;
    Some((socket, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pairs: &[(&'static str, &'static str)]) -> Option<u16> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        accept(&headers).err().map(|response| response.status().as_u16())
    }

    #[test]
    fn incomplete_handshake_is_rejected() {
        let whole = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        assert_eq!(status(&whole), None);
        assert_eq!(status(&[]), Some(426));
        assert_eq!(status(&[whole[0], whole[1], ("sec-websocket-version", "8"), whole[3]]), Some(426));
        assert_eq!(status(&[whole[0], whole[1], whole[2]]), Some(400));
        assert_eq!(status(&[whole[1], whole[2], whole[3]]), Some(400));
    }
}
