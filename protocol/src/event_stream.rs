//! The position in an event stream, by its last bytes: an inserted frame must not become part of another event.

mod usage_filter;

pub use usage_filter::{MAX_HELD_BYTES, UsageFilter};

use std::sync::LazyLock;

use memchr::memchr_iter;
use memchr::memmem::FinderRev;

/// The last four bytes of a stream: the longest line ends of an empty line have that length.
#[derive(Clone, Copy, Debug)]
pub struct Tail([u8; 4]);

impl Tail {
    /// Adds the next bytes of the stream.
    pub fn follow(&mut self, chunk: &[u8]) {
        let keep = chunk.len().min(4);
        self.0.copy_within(keep.., 0);
        self.0[4 - keep..].copy_from_slice(&chunk[chunk.len() - keep..]);
    }

    /// True if the last event is complete. Backends end lines with LF or with CRLF.
    #[must_use]
    pub fn is_between_events(&self) -> bool {
        self.0.ends_with(b"\n\n") || self.0 == *b"\r\n\r\n"
    }
}

/// The number of `data` lines of a stream, however it is cut into chunks: about one per token.
#[derive(Clone, Copy, Debug, Default)]
pub struct DataLines {
    count: u64,
    /// True within a line.
    is_in_line: bool,
}

impl DataLines {
    /// Adds the next bytes of the stream.
    pub fn follow(&mut self, chunk: &[u8]) {
        // No other field begins with this letter.
        let is_data = |at: usize| chunk.get(at) == Some(&b'd');
        let first = u64::from(!self.is_in_line && is_data(0));
        let further = memchr_iter(b'\n', chunk).filter(|at| is_data(at + 1)).count();
        self.count += first + further as u64;
        if let Some(last) = chunk.last() {
            self.is_in_line = *last != b'\n';
        }
    }

    /// The number so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// Returns true if bytes begin like an event stream: with a comment or a field, after empty lines. `None` while there
/// are too few bytes to decide.
#[must_use]
pub fn begins_with(bytes: &[u8]) -> Option<bool> {
    const MARK: &[u8] = b"\xef\xbb\xbf";
    let marked = bytes.strip_prefix(MARK).unwrap_or(bytes);
    let line = marked.trim_ascii_start();
    if line.is_empty() || marked.len() < MARK.len() && MARK.starts_with(marked) {
        return None;
    }
    let is = |start: &[u8]| line.starts_with(start) || start.starts_with(line);
    let starts: [&[u8]; 5] = [b":", b"data:", b"event:", b"id:", b"retry:"];
    let start = starts.into_iter().find(|start| is(start));
    start.map_or(Some(false), |start| (line.len() >= start.len()).then_some(true))
}

impl Default for Tail {
    /// A stream begins between two events.
    fn default() -> Self {
        Self([b'\n'; 4])
    }
}

/// The `sequence_number` of the last event of a Responses stream, however the stream is cut into chunks.
#[derive(Clone, Debug, Default)]
pub struct SequenceNumber {
    last: Option<u64>,
    /// The last bytes received, in which a member may have begun.
    rest: Vec<u8>,
}

/// Longer than the member with the largest number.
const LONGEST_MEMBER: usize = 48;

impl SequenceNumber {
    /// Adds the next bytes of the stream.
    pub fn follow(&mut self, chunk: &[u8]) {
        let head = &chunk[..chunk.len().min(LONGEST_MEMBER)];
        self.rest.extend_from_slice(head);
        self.last = last_number(chunk).or_else(|| last_number(&self.rest)).or(self.last);
        if chunk.len() > LONGEST_MEMBER {
            self.rest.clear();
            self.rest.extend_from_slice(&chunk[chunk.len() - LONGEST_MEMBER..]);
        } else if self.rest.len() > LONGEST_MEMBER {
            self.rest.drain(..self.rest.len() - LONGEST_MEMBER);
        }
    }

    /// The number of the next event.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.last.map_or(0, |last| last.saturating_add(1))
    }
}

// Built once, because building it costs more than most searches.
static SEQUENCE_KEY: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new(b"\"sequence_number\":"));

/// Returns the number of the last whole `sequence_number` member. Inside a text of the model its quotes would be
/// escaped.
fn last_number(bytes: &[u8]) -> Option<u64> {
    SEQUENCE_KEY.rfind_iter(bytes).find_map(|at| {
        let value = bytes[at + SEQUENCE_KEY.needle().len()..].trim_ascii_start();
        let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
        // At the end of the bytes, more digits may follow.
        (digits < value.len()).then(|| std::str::from_utf8(&value[..digits]).ok()?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_number_is_found_however_chunks_are_cut() {
        let stream = "data: {\"type\":\"a\",\"sequence_number\":9}\n\ndata: {\"sequence_number\": 10,\"delta\":\"\\\"sequence_number\\\":77\"}\n\n";
        for size in 1..stream.len() {
            let mut number = SequenceNumber::default();
            assert_eq!(number.next(), 0);
            stream.as_bytes().chunks(size).for_each(|chunk| number.follow(chunk));
            assert_eq!(number.next(), 11, "chunks of {size}");
        }
    }

    #[test]
    fn data_lines_are_counted_however_chunks_are_cut() {
        let stream = ": ping\n\nevent: x\ndata: {\"d\":\"\\nd\"}\n\ndata: 2\r\n\r\nid: 3\ndata:3\n\n";
        for size in 1..=stream.len() {
            let mut lines = DataLines::default();
            stream.as_bytes().chunks(size).for_each(|chunk| lines.follow(chunk));
            lines.follow(b"");
            assert_eq!(lines.count(), 3, "chunks of {size}");
        }
    }

    #[test]
    fn event_stream_is_recognised_by_first_field() {
        for stream in
            ["data: 1", "data:", "event: x\ndata: 1", "id:1", "retry: 5", ":", "\n\r\n: ping", "\u{feff}data: 1"]
        {
            assert_eq!(begins_with(stream.as_bytes()), Some(true), "{stream:?}");
        }
        for other in ["{", "\n {\"error\": 1}", "dat{", "Internal Server Error", "<html>", "events", "\u{feff}{"] {
            assert_eq!(begins_with(other.as_bytes()), Some(false), "{other:?}");
        }
        for start in ["", "\n", "d", "event", "i", "\u{feff}"] {
            assert_eq!(begins_with(start.as_bytes()), None, "{start:?}");
        }
        assert_eq!(begins_with(b"\xef\xbb"), None);
    }

    #[test]
    fn event_end_is_found_however_chunks_are_cut() {
        let after = |chunks: &[&str]| {
            let mut tail = Tail::default();
            chunks.iter().for_each(|chunk| tail.follow(chunk.as_bytes()));
            tail.is_between_events()
        };
        assert!(after(&[]) && after(&["data: a\n\n"]) && after(&["data: a\n", "\n"]));
        assert!(after(&["data: a\r\n\r\n"]) && after(&["data: a\r", "\n\r", "", "\n"]));
        assert!(!after(&["data: a\n"]) && !after(&["data: a\r\n"]) && !after(&["d"]));
    }
}
