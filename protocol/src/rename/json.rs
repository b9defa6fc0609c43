//! The `model` of a JSON object's top level. Only the JSON syntax needed to find it is parsed; other bodies pass
//! unchanged.

use bytes::{Buf, Bytes};
use memchr::memchr2;

/// `model` with every letter escaped, and its closing quote.
const LONGEST_KEY: usize = 31;

#[derive(Debug)]
pub(super) struct Renamer {
    /// The new name, in quotes and escaped.
    name: Vec<u8>,
    growth: usize,
    place: Place,
    /// The number of open objects and arrays.
    depth: usize,
    /// True if the next string at the top level is a key.
    before_key: bool,
    /// True if the next value at the top level is the model.
    before_name: bool,
}

#[derive(Debug)]
enum Place {
    Between,
    /// In another string; `escaped` after a backslash.
    Other {
        escaped: bool,
    },
    /// In a key of the top level, of which `raw` was read.
    Key {
        escaped: bool,
        raw: Vec<u8>,
    },
    /// In the model's name, of which `raw` was read.
    Name {
        escaped: bool,
        raw: Vec<u8>,
    },
    /// The name is replaced, or the body has none.
    Done {
        /// The number of spaces that the announced length still requires.
        missing: usize,
    },
}

impl Renamer {
    pub(super) fn new(requested: &str, name: &str) -> Self {
        let quoted = |name: &str| serde_json::Value::from(name).to_string().into_bytes();
        let name = quoted(name);
        Self {
            growth: name.len().saturating_sub(quoted(requested).len()),
            name,
            place: Place::Between,
            depth: 0,
            before_key: false,
            before_name: false,
        }
    }

    pub(super) fn growth(&self) -> u64 {
        self.growth as u64
    }

    pub(super) fn push(&mut self, mut piece: Bytes, pass: &mut impl FnMut(Bytes)) {
        let mut at = 0;
        while at < piece.len() {
            match &mut self.place {
                Place::Done { .. } => break,
                Place::Between => {
                    let byte = piece[at];
                    at += 1;
                    self.step(byte);
                    if matches!(self.place, Place::Name { .. }) {
                        // Up to the quote, because the new name includes its own quotes.
                        pass(piece.split_to(at - 1));
                        piece.advance(1);
                        at = 0;
                    }
                }
                Place::Other { escaped } => match end_of_string(&piece[at..], escaped) {
                    Some(end) => {
                        at += end;
                        self.place = Place::Between;
                    }
                    None => at = piece.len(),
                },
                Place::Key { escaped, raw } => {
                    let end = end_of_string(&piece[at..], escaped);
                    let until = end.map_or(piece.len(), |end| at + end);
                    let room = (LONGEST_KEY + 1).saturating_sub(raw.len());
                    raw.extend(piece[at..until].iter().take(room));
                    at = until;
                    if end.is_some() {
                        self.before_name = is_model(raw);
                        self.place = Place::Between;
                    }
                }
                Place::Name { escaped, raw } => {
                    let end = end_of_string(&piece, escaped);
                    raw.extend_from_slice(&piece.split_to(end.unwrap_or(piece.len())));
                    at = 0;
                    if end.is_some() {
                        let raw = std::mem::take(raw);
                        self.replace(&raw, pass);
                    }
                }
            }
        }
        pass(piece);
    }

    pub(super) fn finish(&mut self, pass: &mut impl FnMut(Bytes)) {
        let missing = match &mut self.place {
            Place::Done { missing } => std::mem::take(missing),
            Place::Name { raw, .. } => {
                pass(Bytes::from([b"\"", raw.as_slice()].concat()));
                self.growth
            }
            Place::Between | Place::Other { .. } | Place::Key { .. } => self.growth,
        };
        self.place = Place::Done { missing: 0 };
        pass(Bytes::from(vec![b' '; missing]));
    }

    /// Handles a byte outside of strings.
    fn step(&mut self, byte: u8) {
        let is_top = self.depth == 1;
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => return,
            b'"' if is_top && self.before_key => self.place = Place::Key { escaped: false, raw: Vec::new() },
            b'"' if is_top && self.before_name => self.place = Place::Name { escaped: false, raw: Vec::new() },
            b'"' => self.place = Place::Other { escaped: false },
            b':' if is_top => {
                self.before_key = false;
                return;
            }
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth == 1 {
                    self.before_key = byte == b'{';
                }
            }
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            b',' if is_top => self.before_key = true,
            _ => {}
        }
        // A broken body may hold another object or list; only the first is parsed.
        if self.depth == 0 {
            self.place = Place::Done { missing: self.growth };
        }
        self.before_name = false;
    }

    /// Replaces the name. `raw` is the old one without its opening quote.
    fn replace(&mut self, raw: &[u8], pass: &mut impl FnMut(Bytes)) {
        let room = 1 + raw.len() + self.growth;
        if room < self.name.len() {
            // The expected name would leave enough room, however it is spelled.
            pass(Bytes::from([b"\"", raw].concat()));
            self.place = Place::Done { missing: self.growth };
            return;
        }
        let mut name = std::mem::take(&mut self.name);
        name.resize(room, b' ');
        pass(Bytes::from(name));
        self.place = Place::Done { missing: 0 };
    }
}

/// Returns the position after the closing quote, if it is in `bytes`.
fn end_of_string(bytes: &[u8], escaped: &mut bool) -> Option<usize> {
    let mut at = 0;
    if std::mem::take(escaped) {
        at = 1;
    }
    while let Some(found) = memchr2(b'"', b'\\', bytes.get(at..)?) {
        at += found + 1;
        if bytes[at - 1] == b'"' {
            return Some(at);
        }
        if at == bytes.len() {
            *escaped = true;
            return None;
        }
        at += 1;
    }
    None
}

/// True if `raw`, a key with its closing quote, is `model`.
fn is_model(raw: &[u8]) -> bool {
    let quoted = [b"\"", raw].concat();
    raw.len() <= LONGEST_KEY && serde_json::from_slice::<String>(&quoted).is_ok_and(|key| key == "model")
}
