//! Reads token usage, and the id of a Responses response, while a response's bytes pass.
//!
//! It never changes, delays or validates a response, never panics, and holds a bounded part of it, however the backend
//! cuts its bytes:
//!
//! - An event stream is read line by line. A line of at most [`WHOLE_BYTES`] that lies whole within one part is read in
//!   place. It is parsed only if it has a `usage` object (or, until the id is known, a `response`), which a substring
//!   search decides: nearly every event of a chat costs two such searches.
//! - Any other JSON is kept up to [`WHOLE_BYTES`] and parsed at its end. Of a longer body, and of a longer event, the
//!   first and the last [`EDGE_BYTES`] are kept: every known backend writes `usage` after the content, and the last
//!   `"usage":{…}` there with token numbers is used. The id is then the top-level `id` within the beginning.
//! - Details for traces are read only if the relay wants them. Then the first events are parsed too, and each event
//!   that contains a finish reason; a longer body or event has no finish reasons.
//! - One event is one `data:` line, as all backends write it; JSON split over several lines is not read.
//!
//! A value that the backend did not report stays absent. Values of several events are merged, and later ones win
//! (Anthropic reports the input at the start and the output at the end; vLLM can report running counts).

mod details;
mod fields;
mod window;

use std::sync::LazyLock;

use memchr::{memchr, memmem::Finder};

use self::fields::Found;
use self::window::Window;
pub use self::window::{EDGE_BYTES, WHOLE_BYTES};
use crate::message::{ResponseDetails, TokenCounts};
use crate::paths::{Endpoint, endpoint};

/// The usage and id that a response reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Token counts, if the backend reported them. Anthropic's input is the sum of its three kinds, as OpenAI counts:
    /// fresh, written to the cache, read from the cache.
    pub token_counts: Option<TokenCounts>,
    /// The id of a response to `POST /v1/responses`.
    pub response_id: Option<String>,
    /// Details for traces; `None` unless [`UsageReader::with_details`] requested them.
    pub details: Option<Box<ResponseDetails>>,
}

// Built once, because building costs more than most searches, and each is as large as the rest of a reader.
pub(crate) static USAGE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static RESPONSE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"response\""));

/// Reads one successful response.
#[derive(Debug)]
pub struct UsageReader {
    body: Body,
    /// True if the response has an id to read.
    with_id: bool,
    found: Found,
}

#[derive(Debug)]
enum Body {
    /// The response has no usage.
    Skipped,
    /// The content type is unknown until the first byte.
    Unknown,
    /// The part read so far.
    Json(Window),
    /// The line that has not ended yet.
    Events(Window),
}

impl UsageReader {
    /// Creates a reader for the response to `method` and `path` (with or without query) with this content type. Routes
    /// that generate nothing are not read: usage of a stored response would be counted twice when it is retrieved.
    #[must_use]
    pub fn new(method: &str, path: &str, content_type: Option<&str>) -> Self {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        let with_id = method == "POST" && path == "/v1/responses";
        let counted = with_id || endpoint(method, path).is_some_and(counts_tokens);
        let body = if counted { Body::of_type(content_type) } else { Body::Skipped };
        Self { body, with_id, found: Found::default() }
    }

    /// Also reads the details of the response if `is_wanted`.
    #[must_use]
    pub fn with_details(mut self, is_wanted: bool) -> Self {
        if is_wanted {
            self.found = self.found.with_details(self.with_id);
        }
        self
    }

    /// Adds the next bytes of the response.
    pub fn push(&mut self, mut bytes: &[u8]) {
        if let Body::Unknown = self.body {
            // Leading blanks are dropped, because they may arrive in parts of their own.
            bytes = bytes.trim_ascii_start();
            self.body = match bytes.first() {
                None => Body::Unknown,
                Some(b'{') => Body::Json(Window::default()),
                Some(_) => Body::Events(Window::default()),
            };
        }
        match &mut self.body {
            Body::Skipped | Body::Unknown => {}
            Body::Json(document) => document.push(bytes),
            Body::Events(_) => self.push_lines(bytes),
        }
    }

    /// Ends the response, complete or cut off, and returns what it has reported until here.
    #[must_use]
    pub fn finish(mut self) -> Usage {
        match std::mem::replace(&mut self.body, Body::Skipped) {
            Body::Skipped | Body::Unknown => {}
            Body::Json(document) => match document.whole() {
                Some(json) if self.with_id || self.found.wants_details() || has_object(&USAGE_KEY, json) => {
                    self.found.read_document(json, self.with_id);
                }
                Some(_) => {}
                None => self.found.read_edges(document.head(), document.tail(), self.with_id),
            },
            Body::Events(line) => self.read_line(&line),
        }
        self.found.into_usage()
    }

    fn push_lines(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(end) = memchr(b'\n', rest) {
            let (line, after) = rest.split_at(end);
            rest = after.get(1..).unwrap_or_default();
            match &mut self.body {
                Body::Events(begun) if !begun.is_empty() => {
                    begun.push(line);
                    let line = std::mem::take(begun);
                    self.read_line(&line);
                }
                // A longer line would not have been kept whole if it had come in two parts.
                Body::Events(_) if line.len() <= WHOLE_BYTES => self.read_whole_line(line),
                Body::Events(_) => {
                    let mut long = Window::default();
                    long.push(line);
                    self.read_line(&long);
                }
                Body::Skipped | Body::Unknown | Body::Json(_) => return,
            }
        }
        if let Body::Events(begun) = &mut self.body {
            begun.push(rest);
        }
    }

    fn read_line(&mut self, line: &Window) {
        match line.whole() {
            Some(line) => self.read_whole_line(line),
            None if line.head().starts_with(b"data:") => {
                self.found.read_edges(&[], line.tail(), false);
            }
            None => {}
        }
    }

    fn read_whole_line(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else {
            return;
        };
        let wants_id = self.with_id && !self.found.has_id();
        if has_object(&USAGE_KEY, data) || (wants_id && has_object(&RESPONSE_KEY, data)) {
            self.found.read_document(data, self.with_id);
        } else if self.found.wants_event(data) {
            self.found.read_document(data, false);
        }
    }
}

/// True if `key` has an object as its value: with `include_usage`, every event has `"usage":null`.
fn has_object(key: &Finder<'_>, json: &[u8]) -> bool {
    key.find_iter(json).any(|at| fields::object_at_key(json, at, key.needle().len()).is_some())
}

impl Body {
    fn of_type(content_type: Option<&str>) -> Self {
        let Some(content_type) = content_type else {
            return Self::Unknown;
        };
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        if essence.eq_ignore_ascii_case("text/event-stream") {
            Self::Events(Window::default())
        } else if essence.to_ascii_lowercase().ends_with("json") {
            Self::Json(Window::default())
        } else {
            Self::Skipped
        }
    }
}

fn counts_tokens(endpoint: Endpoint) -> bool {
    match endpoint {
        Endpoint::ChatCompletions
        | Endpoint::Completions
        | Endpoint::Messages
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Score
        | Endpoint::Classify
        | Endpoint::Images
        | Endpoint::Audio => true,
        // `/v1/responses` itself is matched by path; the routes below it generate nothing.
        Endpoint::Responses
        | Endpoint::CountTokens
        | Endpoint::Tokenize
        | Endpoint::Native
        | Endpoint::Models
        | Endpoint::Other => false,
    }
}

#[cfg(test)]
mod tests;
