//! A text of any length in bounded memory: whole while it is short, otherwise only its two edges.

/// The largest text that is kept whole.
pub const WHOLE_BYTES: usize = 1 << 20;

/// The number of bytes that are kept at each end of a longer text.
pub const EDGE_BYTES: usize = 64 << 10;

#[derive(Debug, Default)]
pub(super) struct Window {
    /// The whole text, or its beginning once `is_cut`.
    head: Vec<u8>,
    /// At most two edges long, so that bytes are moved only once per edge.
    tail: Vec<u8>,
    is_cut: bool,
}

impl Window {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if !self.is_cut {
            if self.head.len() + bytes.len() <= WHOLE_BYTES {
                self.head.extend_from_slice(bytes);
                return;
            }
            self.is_cut = true;
            let room = EDGE_BYTES.saturating_sub(self.head.len());
            let begin = self.head.len().saturating_sub(EDGE_BYTES);
            self.tail.extend_from_slice(&self.head[begin..]);
            self.head.extend_from_slice(&bytes[..room.min(bytes.len())]);
            self.head.truncate(EDGE_BYTES);
            self.head.shrink_to_fit();
        }
        if bytes.len() >= EDGE_BYTES {
            self.tail.clear();
        }
        self.tail.extend_from_slice(&bytes[bytes.len().saturating_sub(EDGE_BYTES)..]);
        if self.tail.len() > 2 * EDGE_BYTES {
            self.tail.drain(..self.tail.len() - EDGE_BYTES);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// The whole text, if it was not cut.
    pub(super) fn whole(&self) -> Option<&[u8]> {
        (!self.is_cut).then_some(&self.head)
    }

    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// The last edge and no more, so that the result does not depend on how the text was cut.
    pub(super) fn tail(&self) -> &[u8] {
        let all = if self.is_cut { &self.tail } else { &self.head };
        &all[all.len().saturating_sub(EDGE_BYTES)..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_keeps_its_edges_however_cut() {
        let text: Vec<u8> = (0..3 * WHOLE_BYTES).map(|at| (at % 253) as u8).collect();
        for size in [1_000, EDGE_BYTES - 1, 5 * EDGE_BYTES, WHOLE_BYTES, text.len()] {
            let mut window = Window::default();
            text.chunks(size).for_each(|part| window.push(part));
            assert_eq!(window.whole(), None);
            assert_eq!(window.head(), &text[..EDGE_BYTES]);
            assert_eq!(window.tail(), &text[text.len() - EDGE_BYTES..]);
        }
    }

    #[test]
    fn tail_is_bounded_and_moved_once_per_edge() {
        let mut window = Window::default();
        window.push(&vec![1; WHOLE_BYTES]);
        let (mut longest, mut moves) = (0, 0);
        for _ in 0..1_000 {
            let before = window.tail.len();
            window.push(&[2; 1_024]);
            longest = longest.max(window.tail.len());
            moves += usize::from(window.tail.len() < before);
        }
        assert_eq!((longest, moves), (2 * EDGE_BYTES, 1_000 * 1_024 / EDGE_BYTES));
    }

    #[test]
    fn text_at_limit_is_kept_whole() {
        let mut window = Window::default();
        window.push(&vec![1; WHOLE_BYTES]);
        assert_eq!(window.whole().map(<[u8]>::len), Some(WHOLE_BYTES));
        window.push(&[]);
        assert!(window.whole().is_some());
        window.push(&[2]);
        assert_eq!(window.whole(), None);
        assert_eq!(window.tail().last(), Some(&2));
    }
}
