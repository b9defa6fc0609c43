//! The responses of a hand-played worker, as a peer of either kind.

use serde_json::{Map, Value, json};

use super::{FakeWorker, Job, PIECE_MAX, unix_ms};

impl FakeWorker {
    /// Sends a whole response: 200 and JSON. Works with and without `core1`.
    pub async fn answer(&mut self, job: &Job, body: &Value) {
        self.answer_with(job, 200, &[("content-type", "application/json")], body.to_string().as_bytes()).await;
    }

    /// Sends a whole response, with a body of at most one window. Works with and without `core1`, without it only for
    /// UTF-8.
    pub async fn answer_with(&mut self, job: &Job, status: u16, headers: &[(&str, &str)], body: &[u8]) {
        if self.core1 {
            self.response_start(job, status, headers).await;
            self.pieces(job, body).await;
            self.finish(job).await;
        } else {
            let headers: Map<String, Value> =
                headers.iter().map(|(key, value)| ((*key).into(), json!(value))).collect();
            let body = std::str::from_utf8(body).expect("text peers send text");
            self.complete(&job.id, status, headers, body).await;
        }
    }

    /// Sends `response_complete` with a body, as an old peer.
    pub async fn complete(&mut self, id: &str, status: u16, headers: Map<String, Value>, body: &str) {
        self.send(&json!({"type": "response_complete", "request_id": id, "status_code": status, "headers": headers,
            "body": body, "token_counts": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}))
            .await;
    }

    /// Sends `response_chunk`, as an old peer.
    pub async fn chunk(&mut self, id: &str, chunk: &str) {
        self.send(&json!({"type": "response_chunk", "request_id": id, "chunk": chunk})).await;
    }

    /// Sends the `response_complete` that ends chunks, as an old peer.
    pub async fn complete_stream(&mut self, id: &str) {
        self.send(&json!({"type": "response_complete", "request_id": id, "status_code": 200, "headers": {}})).await;
    }

    /// Sends `response_start` of `core1`.
    pub async fn response_start(&mut self, job: &Job, status: u16, headers: &[(&str, &str)]) {
        self.send(&json!({"type": "response_start", "request_id": job.id, "status_code": status, "headers": headers}))
            .await;
    }

    /// Sends body bytes of a response in pieces of the permitted size.
    pub async fn pieces(&mut self, job: &Job, body: &[u8]) {
        for payload in body.chunks(PIECE_MAX) {
            self.send_binary(response_piece(job.stream, payload)).await;
        }
    }

    /// Sends `response_complete` of `core1`.
    pub async fn finish(&mut self, job: &Job) {
        self.send(&json!({"type": "response_complete", "request_id": job.id,
            "token_counts": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}))
            .await;
    }

    /// Sends `error` for a request.
    pub async fn fail(&mut self, id: &str, code: &str, message: &str) {
        self.send(&json!({"type": "error", "request_id": id, "code": code, "message": message})).await;
    }

    /// Begins an event stream in the form of this peer, and sends its first bytes.
    pub async fn start_stream(&mut self, job: &Job, first: &str) {
        if self.core1 {
            self.response_start(job, 200, &[("content-type", "text/event-stream")]).await;
        }
        self.stream_on(job, first).await;
    }

    /// Sends further bytes of a stream.
    pub async fn stream_on(&mut self, job: &Job, text: &str) {
        if self.core1 {
            self.pieces(job, text.as_bytes()).await;
        } else {
            self.chunk(&job.id, text).await;
        }
    }

    /// Ends a stream regularly.
    pub async fn end_stream(&mut self, job: &Job) {
        if self.core1 {
            self.finish(job).await;
        } else {
            self.complete_stream(&job.id).await;
        }
    }

    /// Sends a `pong` that reports a load, without a ping.
    pub async fn report_load(&mut self, load: u64) {
        self.load = load;
        self.send(&json!({"type": "pong", "current_load": load, "timestamp_unix_ms": unix_ms()})).await;
    }

    /// Sends `models_update`.
    pub async fn update_models(&mut self, models: &[&str]) {
        self.send(&json!({"type": "models_update", "models": models, "current_load": self.load})).await;
    }

    /// Breaks the connection without a close frame, as a crash does.
    pub fn vanish(self) {
        drop(self);
    }
}

/// A response piece as sent over the wire.
#[must_use]
pub fn response_piece(stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![2, 0];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}
