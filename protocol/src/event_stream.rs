//! Where an event stream stands, by its last bytes: what is put into it must not become a part of somebody's event.

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

#[cfg(test)]
mod tests {
    use super::*;

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
