//! The part of HTTP/1.1 that a load client and a backend need: heads, and bodies of known length or in chunks.
//!
//! It is implemented here because the client must cost little compared with the systems that it measures. It rejects
//! anything that it cannot parse: a proxy that breaks framing is detected, not forgiven.

mod connection;
mod request;

pub use connection::Connection;
pub use request::send_request;

use std::io;

/// The longest head, and the most that is read at once.
pub const BUFFER_BYTES: usize = 64 << 10;

/// A violation of this subset of HTTP.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection broke, or ended early.
    #[error("connection lost: {0}")]
    Io(#[from] io::Error),
    /// The connection ended inside a message.
    #[error("the connection was closed inside a message")]
    Cut,
    /// A head that cannot be parsed.
    #[error("not an HTTP/1.1 head: {0}")]
    BadHead(&'static str),
    /// Invalid chunked encoding.
    #[error("invalid chunked encoding")]
    BadChunk,
}

/// The first line and framing of a message.
#[derive(Debug, PartialEq, Eq)]
pub struct Head<'a> {
    /// The first line, without its line end.
    pub first_line: &'a str,
    /// How the body ends.
    pub framing: Framing,
    /// True if the connection ends with this message.
    pub closes: bool,
}

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// After this number of bytes.
    Length(u64),
    /// With the last chunk.
    Chunked,
    /// No header states it: a request has no body then, a response lasts until the connection ends.
    Unstated,
}

impl<'a> Head<'a> {
    /// Parses a head and returns it with its length; `None` while it is incomplete.
    pub fn read(buffer: &'a [u8]) -> Result<Option<(Self, usize)>, HttpError> {
        let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n") else {
            return if buffer.len() >= BUFFER_BYTES { Err(HttpError::BadHead("it is too long")) } else { Ok(None) };
        };
        let text = std::str::from_utf8(&buffer[..end]).map_err(|_| HttpError::BadHead("it is not text"))?;
        let mut lines = text.split("\r\n");
        let first_line = lines.next().unwrap_or_default();
        let mut head = Self { first_line, framing: Framing::Unstated, closes: false };
        for line in lines {
            let (name, value) = line.split_once(':').ok_or(HttpError::BadHead("a header without a colon"))?;
            head.take_header(name, value.trim())?;
        }
        Ok(Some((head, end + 4)))
    }

    fn take_header(&mut self, name: &str, value: &str) -> Result<(), HttpError> {
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().map_err(|_| HttpError::BadHead("a content-length that is not a number"))?;
            if self.framing != Framing::Unstated {
                return Err(HttpError::BadHead("two framings"));
            }
            self.framing = Framing::Length(length);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") || self.framing != Framing::Unstated {
                return Err(HttpError::BadHead("two framings, or an unknown one"));
            }
            self.framing = Framing::Chunked;
        } else if name.eq_ignore_ascii_case("connection") {
            self.closes |= value.eq_ignore_ascii_case("close");
        }
        Ok(())
    }

    /// The status code of a response.
    pub fn status(&self) -> Result<u16, HttpError> {
        let status = self.first_line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        status.ok_or(HttpError::BadHead("no status"))
    }

    /// The method and target of a request.
    pub fn method_and_target(&self) -> Result<(&'a str, &'a str), HttpError> {
        let mut words = self.first_line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0")) => Ok((method, target)),
            _ => Err(HttpError::BadHead("no request line")),
        }
    }
}

/// Decodes a body from the bytes that are read.
#[derive(Debug)]
pub struct Body(State);

#[derive(Debug)]
enum State {
    Length(u64),
    UntilClose,
    /// In a chunk's size.
    Size(u64, SizeLine),
    /// In a chunk's bytes.
    Chunk(u64),
    /// After them: the number of missing bytes of CR LF.
    ChunkEnd(u8),
    /// In a line of the trailer: its bytes so far, and whether the last one was a CR.
    Trailer(u32, bool),
    Complete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeLine {
    Empty,
    Digits,
    Extension,
    Return,
}

impl Body {
    /// Creates a decoder for a body with this framing.
    pub fn new(framing: Framing) -> Self {
        Self(match framing {
            Framing::Length(0) => State::Complete,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::Size(0, SizeLine::Empty),
            Framing::Unstated => State::UntilClose,
        })
    }

    /// True if the body is complete.
    pub fn is_complete(&self) -> bool {
        matches!(self.0, State::Complete)
    }

    /// True if the end of the connection ends the body, too.
    pub fn ends_with_connection(&self) -> bool {
        matches!(self.0, State::UntilClose)
    }

    /// The bytes that surely belong to the body, if its length is known.
    pub fn remaining(&self) -> Option<u64> {
        if let State::Length(left) = self.0 { Some(left) } else { None }
    }

    /// Passes the body's bytes in `input` to `sink`; returns the number of bytes of `input` that it consumed.
    pub fn take(&mut self, input: &[u8], mut sink: impl FnMut(&[u8])) -> Result<usize, HttpError> {
        let mut at = 0;
        while at < input.len() {
            let rest = &input[at..];
            at += match &mut self.0 {
                State::Complete => break,
                State::UntilClose => {
                    sink(rest);
                    rest.len()
                }
                State::Length(left) | State::Chunk(left) => {
                    let count = usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
                    sink(&rest[..count]);
                    *left -= count as u64;
                    count
                }
                State::Size(..) | State::ChunkEnd(_) | State::Trailer(..) => {
                    self.take_framing(rest[0])?;
                    1
                }
            };
            match self.0 {
                State::Length(0) => self.0 = State::Complete,
                State::Chunk(0) => self.0 = State::ChunkEnd(2),
                State::Complete
                | State::UntilClose
                | State::Length(_)
                | State::Chunk(_)
                | State::Size(..)
                | State::ChunkEnd(_)
                | State::Trailer(..) => {}
            }
        }
        Ok(at)
    }

    fn take_framing(&mut self, byte: u8) -> Result<(), HttpError> {
        self.0 = match (&self.0, byte) {
            (State::Size(size, SizeLine::Return), b'\n') if *size == 0 => State::Trailer(0, false),
            (State::Size(size, SizeLine::Return), b'\n') => State::Chunk(*size),
            (State::Size(size, SizeLine::Digits | SizeLine::Extension), b'\r') => State::Size(*size, SizeLine::Return),
            (State::Size(size, SizeLine::Digits), b';' | b' ') => State::Size(*size, SizeLine::Extension),
            (State::Size(size, SizeLine::Extension), _) => State::Size(*size, SizeLine::Extension),
            (State::Size(size, SizeLine::Empty | SizeLine::Digits), digit) => {
                let digit = char::from(digit).to_digit(16).ok_or(HttpError::BadChunk)?;
                let size = size.checked_mul(16).ok_or(HttpError::BadChunk)? + u64::from(digit);
                State::Size(size, SizeLine::Digits)
            }
            (State::ChunkEnd(2), b'\r') => State::ChunkEnd(1),
            (State::ChunkEnd(1), b'\n') => State::Size(0, SizeLine::Empty),
            (State::Trailer(0, true), b'\n') => State::Complete,
            (State::Trailer(_, true), b'\n') => State::Trailer(0, false),
            (State::Trailer(length, false), b'\r') => State::Trailer(*length, true),
            (State::Trailer(length, false), _) => State::Trailer(length + 1, false),
            _ => return Err(HttpError::BadChunk),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(framing: Framing, input: &[u8], step: usize) -> Result<(Vec<u8>, bool, usize), HttpError> {
        let (mut body, mut out, mut used) = (Body::new(framing), Vec::new(), 0);
        for part in input.chunks(step) {
            used += body.take(part, |bytes| out.extend_from_slice(bytes))?;
        }
        Ok((out, body.is_complete(), used))
    }

    #[test]
    fn heads_are_read_when_they_are_whole() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\nbody";
        for end in 0..text.len() - 5 {
            assert!(Head::read(&text[..end]).unwrap().is_none());
        }
        let (head, length) = Head::read(text).unwrap().unwrap();
        assert_eq!((head.status().unwrap(), head.framing, head.closes), (200, Framing::Length(12), true));
        assert_eq!(&text[length..], b"body");
        let (head, _) = Head::read(b"POST /a HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n").unwrap().unwrap();
        assert_eq!((head.method_and_target().unwrap(), head.framing), (("POST", "/a"), Framing::Chunked));
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        for headers in [
            "content-length: 1\r\ncontent-length: 1",
            "content-length: 1\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip",
            "content-length: -1",
            "nonsense",
        ] {
            assert!(Head::read(format!("HTTP/1.1 200 OK\r\n{headers}\r\n\r\n").as_bytes()).is_err(), "{headers}");
        }
        assert!(Head::read(b"HTTP/2 200\r\n\r\n").unwrap().unwrap().0.status().is_err());
    }

    #[test]
    fn bodies_are_decoded_whole_from_any_split() {
        let chunked = b"5\r\nhello\r\nC;x=y\r\n, all of you\r\n0\r\nt: 1\r\n\r\nNEXT";
        for step in 1..=chunked.len() {
            let (out, complete, used) = decode(Framing::Chunked, chunked, step).unwrap();
            assert_eq!(
                (out.as_slice(), complete, used),
                (&b"hello, all of you"[..], true, chunked.len() - 4),
                "{step}"
            );
            let (out, complete, used) = decode(Framing::Length(3), b"abcNEXT", step).unwrap();
            assert_eq!((out.as_slice(), complete, used), (&b"abc"[..], true, 3));
        }
        assert!(Body::new(Framing::Length(0)).is_complete());
        assert!(Body::new(Framing::Unstated).ends_with_connection());
    }

    #[test]
    fn cut_body_is_incomplete_and_broken_chunk_fails() {
        assert!(!decode(Framing::Chunked, b"5\r\nhello\r\n0\r\n", 1).unwrap().1);
        assert!(!decode(Framing::Length(4), b"abc", 1).unwrap().1);
        for broken in [&b"x\r\n"[..], b"\r\n", b"5\r\nhelloX\n", b"5\rhello", b"11111111111111111\r\n"] {
            assert!(matches!(decode(Framing::Chunked, broken, 1), Err(HttpError::BadChunk)), "{broken:?}");
        }
    }
}
