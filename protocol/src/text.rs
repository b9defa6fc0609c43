//! Text for peers that support only text messages: a body's bytes may be cut anywhere, but a text message must consist
//! of whole characters. The first bytes of a cut character, at most three, wait for the rest.

use std::fmt;

/// The body is not UTF-8, so a text message cannot carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidUtf8;

impl fmt::Display for InvalidUtf8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body is not UTF-8")
    }
}

impl std::error::Error for InvalidUtf8 {}

/// Cuts a stream of bytes at character boundaries.
#[derive(Clone, Debug, Default)]
pub struct Utf8Chunker {
    tail: [u8; 3],
    tail_len: usize,
}

impl Utf8Chunker {
    /// Creates a chunker that holds no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all whole characters so far; the text is empty if no character is complete.
    ///
    /// # Errors
    /// The bytes can never become UTF-8. The held bytes are then dropped.
    pub fn push(&mut self, bytes: &[u8]) -> Result<String, InvalidUtf8> {
        let mut text = Vec::with_capacity(self.tail_len + bytes.len());
        text.extend_from_slice(&self.tail[..self.tail_len]);
        text.extend_from_slice(bytes);
        self.tail_len = 0;
        let error = match String::from_utf8(text) {
            Ok(text) => return Ok(text),
            Err(error) => error,
        };
        // `error_len` is absent only if the input ends within a character.
        if error.utf8_error().error_len().is_some() {
            return Err(InvalidUtf8);
        }
        let valid = error.utf8_error().valid_up_to();
        let mut text = error.into_bytes();
        let rest = text.len() - valid;
        let carried = self.tail.get_mut(..rest).ok_or(InvalidUtf8)?;
        carried.copy_from_slice(&text[valid..]);
        self.tail_len = rest;
        text.truncate(valid);
        String::from_utf8(text).map_err(|_| InvalidUtf8)
    }

    /// Ends the body.
    ///
    /// # Errors
    /// The body ended within a character.
    pub fn finish(&self) -> Result<(), InvalidUtf8> {
        if self.tail_len == 0 { Ok(()) } else { Err(InvalidUtf8) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn split_character_is_joined_wherever_cut() {
        let text = "aé€😀z";
        for cut in 0..=text.len() {
            let (head, tail) = text.as_bytes().split_at(cut);
            let mut chunker = Utf8Chunker::new();
            let mut joined = chunker.push(head).unwrap();
            joined += &chunker.push(tail).unwrap();
            assert_eq!(joined, text);
            assert_eq!(chunker.finish(), Ok(()));
        }
    }

    #[test]
    fn bytes_that_are_not_text_are_refused() {
        assert_eq!(Utf8Chunker::new().push(b"a\xff"), Err(InvalidUtf8));
        let mut chunker = Utf8Chunker::new();
        assert_eq!(chunker.push(b"a\xe2\x82"), Ok("a".to_owned()));
        assert_eq!(chunker.finish(), Err(InvalidUtf8));
        assert_eq!(chunker.push(b"z"), Err(InvalidUtf8));
    }

    proptest! {
        #[test]
        fn any_text_in_any_cuts_is_unchanged(text in any::<String>(), sizes in prop::collection::vec(0_usize..7, 1..50)) {
            let mut chunker = Utf8Chunker::new();
            let mut rest = text.as_bytes();
            let mut joined = String::new();
            for size in sizes {
                let (head, tail) = rest.split_at(size.min(rest.len()));
                joined += &chunker.push(head).unwrap();
                rest = tail;
            }
            joined += &chunker.push(rest).unwrap();
            prop_assert_eq!(joined, text);
            prop_assert_eq!(chunker.finish(), Ok(()));
        }

        #[test]
        fn chunked_validation_agrees_with_whole_text(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..10)) {
            let mut chunker = Utf8Chunker::new();
            let verdict = parts.iter().try_for_each(|part| chunker.push(part).map(drop)).and_then(|()| chunker.finish());
            prop_assert_eq!(verdict.is_ok(), std::str::from_utf8(&parts.concat()).is_ok());
        }
    }
}
