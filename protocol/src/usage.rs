//! Reads token usage, and the id of a Responses answer, while an answer's bytes go past.
//!
//! It never changes, delays or judges an answer, never panics, and holds a bounded part of it, however the
//! backend cuts its bytes:
//!
//! - An event stream is read line by line. A line of at most [`WHOLE_BYTES`] that lies whole within one part is looked at
//!   where it is; it is parsed only if it has a `usage` object (or, until the id is known, a `response`), which a
//!   substring search decides: nearly every event of a chat costs two such searches.
//! - Any other JSON is kept up to [`WHOLE_BYTES`] and parsed at its end. Of a longer one, and of a longer
//!   event, the first and the last [`EDGE_BYTES`] are kept: every known backend writes `usage` after the
//!   content, and the last `"usage":{…}` there that has token numbers is taken. The id then is the
//!   top-level `id` within the beginning.
//! - One event is one `data:` line, as all backends write it; JSON spread over several is not read.
//!
//! A value that the backend did not give stays absent. What several events say is merged, the later one
//! wins (Anthropic tells the input at the start and the output at the end; vLLM can count along).

mod fields;
mod window;

use std::sync::LazyLock;

use memchr::{memchr, memmem::Finder};

use self::fields::Found;
use self::window::Window;
pub use self::window::{EDGE_BYTES, WHOLE_BYTES};
use crate::message::TokenCounts;
use crate::paths::{Endpoint, endpoint};

/// What an answer said about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens, where the backend counted them. Anthropic's input is the sum of its three kinds, as OpenAI
    /// counts: fresh, written to the cache, read from the cache.
    pub token_counts: Option<TokenCounts>,
    /// The id of an answer of `POST /v1/responses`.
    pub response_id: Option<String>,
}

// Made once: that costs more than most searches, and each is as large as the rest of a reader.
static USAGE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static RESPONSE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"response\""));

/// Reads one successful answer.
#[derive(Debug)]
pub struct UsageReader {
    body: Body,
    /// Whether the answer has an id worth reading.
    with_id: bool,
    found: Found,
}

#[derive(Debug)]
enum Body {
    /// Has no usage.
    Skipped,
    /// Without a content type, until the first byte tells.
    Unknown,
    /// The part read so far.
    Json(Window),
    /// The line that has not ended yet.
    Events(Window),
}

impl UsageReader {
    /// A reader for the answer to `method` and `path` (with or without query) of this content type.
    /// Routes that generate nothing are not read: looking a stored answer up again would count it twice.
    #[must_use]
    pub fn new(method: &str, path: &str, content_type: Option<&str>) -> Self {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        let with_id = method == "POST" && path == "/v1/responses";
        let counted = with_id || endpoint(method, path).is_some_and(counts_tokens);
        let body = if counted { Body::of_type(content_type) } else { Body::Skipped };
        Self { body, with_id, found: Found::default() }
    }

    /// The next bytes of the answer.
    pub fn push(&mut self, mut bytes: &[u8]) {
        if let Body::Unknown = self.body {
            // None is kept, since blanks may also come in parts of their own.
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

    /// The answer is over, or was cut off: what it said until here.
    #[must_use]
    pub fn finish(mut self) -> Usage {
        match std::mem::replace(&mut self.body, Body::Skipped) {
            Body::Skipped | Body::Unknown => {}
            Body::Json(document) => match document.whole() {
                Some(json) if self.with_id || has_object(&USAGE_KEY, json) => {
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
                // One that is longer would not have been kept whole, had it come in two parts.
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
        }
    }
}

/// Whether `key` has an object as its value: with `include_usage`, every event has `"usage":null`.
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
        // `/v1/responses` itself is asked for by path; what lies below generates nothing.
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
