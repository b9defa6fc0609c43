//! The content of requests and responses. Each is derived from the other, so that a byte that changes on the way is
//! detected.
//!
//! A prompt begins with a plan in plain letters: a seed, the number of chunks, the time between them. The backend
//! executes the plan and puts a digest of the whole prompt into every response and every chunk. The client knows the
//! prompt, and so every byte that must come. The digest is one of the prompt and not of the body, because some routers
//! reserialize the body's JSON.

use std::time::Duration;

/// Bytes of a response that is not streamed.
pub const ANSWER_BYTES: usize = 345;

/// Bytes of one event of a stream, with the empty line that ends it.
pub const CHUNK_BYTES: usize = 232;

/// The event that ends a stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// The model of all requests.
pub const MODEL: &str = "m";

const BEFORE: &str = r#"{"model":"m","messages":[{"role":"user","content":""#;
const AFTER: &str = r#""}],"stream":"#;
const CONTENT: &[u8] = br#""content":""#;

/// The plan of a prompt: instructions for the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Distinguishes prompts.
    pub seed: u64,
    /// Events of the stream; 0 requests one response of [`ANSWER_BYTES`].
    pub chunks: u32,
    /// The time between two events, or before the response.
    pub gap: Duration,
}

/// The body of a request, made once and changed between requests: only the seed differs.
#[derive(Clone, Debug)]
pub struct Prompt {
    body: Vec<u8>,
    content: std::ops::Range<usize>,
}

impl Plan {
    /// The length of a plan in letters, in bytes.
    const LETTERS: usize = 16 + 1 + 8 + 1 + 8 + 1;

    fn letters(self) -> String {
        format!("{:016x} {:08} {:08} ", self.seed, self.chunks, self.gap.as_micros())
    }

    /// Parses the plan at the beginning of a prompt.
    fn read(content: &[u8]) -> Option<Self> {
        let letters = std::str::from_utf8(content.get(..Self::LETTERS)?).ok()?;
        let mut words = letters.split(' ');
        Some(Self {
            seed: u64::from_str_radix(words.next()?, 16).ok()?,
            chunks: words.next()?.parse().ok()?,
            gap: Duration::from_micros(words.next()?.parse().ok()?),
        })
    }
}

impl Prompt {
    /// Creates a body of `bytes` bytes, or more if the plan needs them.
    pub fn new(plan: Plan, bytes: usize) -> Self {
        let stream = if plan.chunks > 0 { "true}" } else { "false}" };
        let rest = BEFORE.len() + AFTER.len() + stream.len();
        let mut content = plan.letters().into_bytes();
        let mut letters = Letters(plan.seed);
        while content.len() + rest < bytes {
            content.push(letters.draw());
        }
        let begin = BEFORE.len();
        let content_range = begin..begin + content.len();
        let body = [BEFORE.as_bytes(), &content, AFTER.as_bytes(), stream.as_bytes()].concat();
        Self { body, content: content_range }
    }

    /// Changes it into another prompt of the same size.
    pub fn reseed(&mut self, seed: u64) {
        let begin = self.content.start;
        self.body[begin..begin + 16].copy_from_slice(&hex(seed));
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The digest that the response must contain.
    pub fn digest(&self) -> u64 {
        digest(&self.body[self.content.clone()])
    }
}

/// Parses a body into its plan and the digest of its prompt; `None` for a body that [`Prompt`] did not make.
pub fn read_body(body: &[u8]) -> Option<(Plan, u64)> {
    let begin = memchr::memmem::find(body, CONTENT)? + CONTENT.len();
    let length = memchr::memchr(b'"', &body[begin..])?;
    let content = &body[begin..begin + length];
    Some((Plan::read(content)?, digest(content)))
}

/// The plain response to the prompt with this digest.
pub fn answer(digest: u64) -> Vec<u8> {
    let head = format!(
        r#"{{"id":"chatcmpl-{digest:016x}","object":"chat.completion","created":1700000000,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":""#
    );
    let tail = r#""},"finish_reason":"stop"}],"usage":{"prompt_tokens":57,"completion_tokens":24,"total_tokens":81}}"#;
    padded(head, tail, ANSWER_BYTES, digest)
}

/// The events of the streamed response to the prompt with this digest, one after the other.
#[derive(Clone, Debug)]
pub struct Chunk {
    bytes: Vec<u8>,
    /// The position of its number's digits.
    digits: std::ops::Range<usize>,
}

impl Chunk {
    /// The first event.
    pub fn first(digest: u64) -> Self {
        let head = format!(
            r#"data: {{"id":"chatcmpl-{digest:016x}","object":"chat.completion.chunk","created":1700000000,"model":"{MODEL}","choices":[{{"delta":{{"content":"00000000 "#
        );
        let tail = "\"},\"index\":0,\"finish_reason\":null}]}\n\n";
        let digits = head.len() - 9..head.len() - 1;
        Self { bytes: padded(head, tail, CHUNK_BYTES, digest), digits }
    }

    /// Changes it into the event `number`.
    pub fn number(&mut self, number: u32) -> &[u8] {
        let mut rest = number;
        for digit in self.bytes[self.digits.clone()].iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        &self.bytes
    }
}

/// Compares a stream with its expected bytes, in parts of any size.
#[derive(Debug)]
pub struct StreamCheck {
    chunk: Chunk,
    total: u32,
    number: u32,
    at: usize,
}

impl StreamCheck {
    /// Expects `total` events in response to the prompt with this digest.
    pub fn new(digest: u64, total: u32) -> Self {
        Self { chunk: Chunk::first(digest), total, number: 0, at: 0 }
    }

    /// Checks the next bytes. Returns the number of events that they completed; `None` if they differ from the expected
    /// ones.
    pub fn take(&mut self, mut bytes: &[u8]) -> Option<u32> {
        let before = self.number;
        while !bytes.is_empty() {
            let expected = match self.number.cmp(&self.total) {
                std::cmp::Ordering::Less => self.chunk.number(self.number),
                std::cmp::Ordering::Equal => DONE,
                std::cmp::Ordering::Greater => return None,
            };
            let count = bytes.len().min(expected.len() - self.at);
            if bytes[..count] != expected[self.at..self.at + count] {
                return None;
            }
            bytes = &bytes[count..];
            self.at += count;
            if self.at == expected.len() {
                self.at = 0;
                self.number += 1;
            }
        }
        Some(self.number.min(self.total) - before.min(self.total))
    }

    /// True if the whole stream came.
    pub fn is_complete(&self) -> bool {
        self.number > self.total
    }
}

fn padded(head: String, tail: &str, length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = head.into_bytes();
    let mut letters = Letters(seed);
    while bytes.len() + tail.len() < length {
        bytes.push(letters.draw());
    }
    bytes.extend_from_slice(tail.as_bytes());
    bytes
}

/// An endless sequence of letters from a seed, so that neither side can go wrong on its own.
struct Letters(u64);

impl Letters {
    fn draw(&mut self) -> u8 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        b'a' + (mixed >> 56) as u8 % 26
    }
}

/// The digest of eight bytes at a time: 20 MB need two milliseconds.
fn digest(bytes: &[u8]) -> u64 {
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(bytes.len() as u64, |sum, word| mix(sum, u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| mix(sum, u64::from(*byte)))
}

fn hex(number: u64) -> [u8; 16] {
    std::array::from_fn(|at| b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 15])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { seed: 0x1234, chunks: 3, gap: Duration::from_millis(10) };

    fn stream(digest: u64, total: u32) -> Vec<u8> {
        let mut chunk = Chunk::first(digest);
        let mut bytes: Vec<u8> = (0..total).flat_map(|number| chunk.number(number).to_vec()).collect();
        bytes.extend_from_slice(DONE);
        bytes
    }

    #[test]
    fn backend_reads_plan_written_by_client() {
        for bytes in [0, 352, 5000] {
            let mut prompt = Prompt::new(PLAN, bytes);
            prompt.reseed(77);
            let plan = Plan { seed: 77, ..PLAN };
            assert_eq!(read_body(prompt.body()), Some((plan, prompt.digest())));
            assert!(serde_json::from_slice::<serde_json::Value>(prompt.body()).is_ok());
            assert_eq!(prompt.body().len(), bytes.max(prompt.body().len()));
        }
        assert_eq!(read_body(b"{}"), None);
        assert_eq!(read_body(br#"{"content":"hello"}"#), None);
    }

    #[test]
    fn bodies_responses_and_chunks_are_fixed_size_json() {
        assert_eq!(Prompt::new(PLAN, 352).body().len(), 352);
        let answer = answer(5);
        assert_eq!(answer.len(), ANSWER_BYTES);
        serde_json::from_slice::<serde_json::Value>(&answer).unwrap();
        let mut chunk = Chunk::first(5);
        let bytes = chunk.number(12_345_678);
        assert_eq!(bytes.len(), CHUNK_BYTES);
        let json: serde_json::Value = serde_json::from_slice(&bytes[6..]).unwrap();
        let content = json["choices"][0]["delta"]["content"].as_str().unwrap().to_owned();
        assert!(content.starts_with("12345678 "), "{content}");
    }

    #[test]
    fn any_changed_prompt_byte_changes_its_digest() {
        let prompt = Prompt::new(PLAN, 352);
        let range = prompt.content.clone();
        for at in range.skip(Plan::LETTERS) {
            let mut body = prompt.body().to_vec();
            body[at] ^= 1;
            assert_ne!(read_body(&body).unwrap().1, prompt.digest(), "byte {at}");
        }
    }

    #[test]
    fn stream_is_recognised_in_parts_of_any_size() {
        let whole = stream(9, 4);
        for size in [1, 7, CHUNK_BYTES, 1000, whole.len()] {
            let mut check = StreamCheck::new(9, 4);
            let events: u32 = whole.chunks(size).map(|part| check.take(part).unwrap()).sum();
            assert_eq!((events, check.is_complete()), (4, true), "parts of {size}");
        }
    }

    #[test]
    fn altered_or_truncated_stream_is_rejected() {
        let whole = stream(9, 2);
        let mut short = StreamCheck::new(9, 2);
        short.take(&whole[..whole.len() - 1]).unwrap();
        assert!(!short.is_complete());
        let mut long = StreamCheck::new(9, 2);
        assert_eq!(long.take(&[&whole[..], b"\n"].concat()), None);
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert_eq!(StreamCheck::new(9, 2).take(&changed), None, "byte {at}");
        }
        assert_eq!(StreamCheck::new(8, 2).take(&whole), None);
    }
}
