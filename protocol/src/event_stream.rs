//! Where an event stream stands, by its last bytes: what is put into it must not become a part of somebody's event.

use std::sync::LazyLock;

use memchr::memmem::FinderRev;

/// The last four bytes of a stream: as many as the longest line ends of an empty line take.
#[derive(Clone, Copy, Debug)]
pub struct Tail([u8; 4]);

impl Tail {
    /// The next bytes of the stream.
    pub fn follow(&mut self, chunk: &[u8]) {
        let keep = chunk.len().min(4);
        self.0.copy_within(keep.., 0);
        self.0[4 - keep..].copy_from_slice(&chunk[chunk.len() - keep..]);
    }

    /// Whether the last event is over. Backends end lines with LF or with CRLF.
    #[must_use]
    pub fn is_between_events(&self) -> bool {
        self.0.ends_with(b"\n\n") || self.0 == *b"\r\n\r\n"
    }
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
    /// The end of what came, in which a member may have begun.
    rest: Vec<u8>,
}

/// Longer than the member with the largest number.
const LONGEST_MEMBER: usize = 48;

impl SequenceNumber {
    /// The next bytes of the stream.
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

    /// The number that the next event has.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.last.map_or(0, |last| last.saturating_add(1))
    }
}

// Made once: that costs more than most searches.
static SEQUENCE_KEY: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new(b"\"sequence_number\":"));

/// The number of the last whole member `sequence_number`. Inside a text of the model its quotes would be escaped.
fn last_number(bytes: &[u8]) -> Option<u64> {
    SEQUENCE_KEY.rfind_iter(bytes).find_map(|at| {
        let value = bytes[at + SEQUENCE_KEY.needle().len()..].trim_ascii_start();
        let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
        // At the end of the bytes there may be more digits to come.
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
    fn a_tail_knows_where_events_end_however_they_are_cut() {
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
