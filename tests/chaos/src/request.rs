//! A request, and the one correct response to it.
//!
//! Everything that the backend has to know is in the query string, which relay and worker preserve, so it is known
//! before the body is read. The response contains a digest of the body, so that a changed upload yields a wrong
//! response.

use bytes::Bytes;
use serde_json::json;

use crate::dice::Dice;

/// The stage at which the backend hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// The body of the request is never read.
    Upload,
    /// The body was read; no head comes.
    Head,
    /// The head was sent, nothing else.
    FirstByte,
    /// Half of the response was sent.
    Middle,
    /// All of the response was sent but its end.
    End,
}

/// Every stage at which a backend can hang.
pub const STALLS: [Stall; 5] = [Stall::Upload, Stall::Head, Stall::FirstByte, Stall::Middle, Stall::End];

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestSpec {
    /// Its number in all logs.
    pub nonce: u64,
    /// True for server-sent events, false for one JSON body.
    pub stream: bool,
    /// The number of pieces.
    pub pieces: u64,
    /// The approximate size of each, in bytes.
    pub piece_bytes: usize,
    /// The pause before each, in milliseconds.
    pub gap_ms: u64,
    /// The size of the request's body, in bytes.
    pub upload_bytes: usize,
    /// The conversation that it is a turn of.
    pub conversation: Option<u64>,
    /// The stage at which the backend hangs.
    pub stall: Option<Stall>,
}

impl RequestSpec {
    /// A stream of this number of events, one each `gap_ms`.
    #[must_use]
    pub fn stream(nonce: u64, pieces: u64, gap_ms: u64) -> Self {
        Self { nonce, stream: true, pieces, piece_bytes: 100, gap_ms, upload_bytes: 0, conversation: None, stall: None }
    }

    /// One JSON body after `wait_ms`.
    #[must_use]
    pub fn plain(nonce: u64, wait_ms: u64) -> Self {
        Self { stream: false, ..Self::stream(nonce, 1, wait_ms) }
    }

    /// Sets the size of the body, in bytes.
    #[must_use]
    pub fn upload(self, bytes: usize) -> Self {
        Self { upload_bytes: bytes, ..self }
    }

    /// Makes it a turn of a conversation.
    #[must_use]
    pub fn turn_of(self, conversation: u64) -> Self {
        Self { conversation: Some(conversation), ..self }
    }

    /// Sets the size of the pieces, in bytes.
    #[must_use]
    pub fn pieces_of(self, bytes: usize) -> Self {
        Self { piece_bytes: bytes, ..self }
    }

    /// Sets the stage at which the backend hangs.
    #[must_use]
    pub fn stalling(self, stall: Stall) -> Self {
        Self { stall: Some(stall), ..self }
    }

    /// The usual mix of the scenarios: streams, plain responses, and some uploads of 100 to 600 kB.
    #[must_use]
    pub fn mixed(nonce: u64, dice: &mut Dice) -> Self {
        let upload = if dice.percent(15) { dice.between(100_000..=600_000) as usize } else { 0 };
        let spec = match dice.below(3) {
            0 => Self::plain(nonce, dice.between(0..=50)),
            1 => Self::stream(nonce, dice.between(1..=40), dice.between(0..=10)),
            _ => Self::stream(nonce, dice.between(10..=40), 10).pieces_of(2_000),
        };
        spec.upload(upload)
    }

    /// The same as turns of a few conversations.
    #[must_use]
    pub fn of_conversations(nonce: u64, dice: &mut Dice) -> Self {
        Self::mixed(nonce, dice).turn_of(dice.below(8) as u64)
    }

    /// Returns the path with its query string.
    #[must_use]
    pub fn target(&self) -> String {
        let stall = self.stall.and_then(|stall| STALLS.iter().position(|it| *it == stall));
        format!(
            "/v1/chat/completions?nonce={}&stream={}&pieces={}&bytes={}&gap={}&stall={}",
            self.nonce,
            u8::from(self.stream),
            self.pieces,
            self.piece_bytes,
            self.gap_ms,
            stall.map_or(0, |at| at + 1)
        )
    }

    /// Parses a request in the backend; `None` for anything else.
    #[must_use]
    pub fn parse(target: &str) -> Option<Self> {
        let query = target.split_once('?')?.1;
        let value = |name: &str| -> Option<u64> {
            query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        let stall = usize::try_from(value("stall")?).ok()?.checked_sub(1).and_then(|at| STALLS.get(at).copied());
        Some(Self {
            nonce: value("nonce")?,
            stream: value("stream")? == 1,
            pieces: value("pieces")?,
            piece_bytes: usize::try_from(value("bytes")?).ok()?,
            gap_ms: value("gap")?,
            upload_bytes: 0,
            conversation: None,
            stall,
        })
    }

    /// Returns the request's body.
    #[must_use]
    pub fn body(&self) -> Bytes {
        let upload = noise(self.nonce, self.upload_bytes);
        let Some(conversation) = self.conversation else {
            return json!({"model": "m", "stream": self.stream, "user": upload}).to_string().into();
        };
        let message = |text: &str| json!({"role": "user", "content": text});
        let messages = [message(&noise(conversation, HEAD_BYTES)), message(&upload)];
        json!({"model": "m", "stream": self.stream, "messages": messages}).to_string().into()
    }

    /// Returns the pieces of the backend's response to a request whose body has this digest.
    #[must_use]
    pub fn answer(&self, digest: u64) -> Vec<Vec<u8>> {
        let noise = |number| noise(self.nonce.rotate_left(32) ^ number, self.piece_bytes);
        let (nonce, last) = (self.nonce, self.pieces.saturating_sub(1));
        let event = |number| format!("data: {}\n\n", json!({"nonce": nonce, "n": number, "text": noise(number)}));
        let field = |number| format!("{}\"{number}\":\"{}\"", if number == 0 { "" } else { "," }, noise(number));
        let piece = |number| {
            let text = if self.stream { event(number) } else { field(number) };
            let begin = match (number, self.stream) {
                (0, true) => format!("data: {{\"digest\":{digest}}}\n\n"),
                (0, false) => format!("{{\"nonce\":{nonce},\"digest\":{digest},"),
                _ => String::new(),
            };
            let end = match (number == last, self.stream) {
                (true, true) => format!("data: {{\"choices\":[],{}}}\n\ndata: [DONE]\n\n", usage_field(nonce)),
                (true, false) => format!(",{}}}", usage_field(nonce)),
                (false, _) => String::new(),
            };
            format!("{begin}{text}{end}").into_bytes()
        };
        (0..self.pieces).map(piece).collect()
    }

    /// Returns the whole response.
    #[must_use]
    pub fn expected(&self) -> Vec<u8> {
        self.answer(digest(&self.body())).concat()
    }
}

/// Returns the tokens that the backend reports for a request: those of the prompt, and those of the response.
#[must_use]
pub fn tokens_of(nonce: u64) -> [u64; 2] {
    [100 + nonce % 97, 1 + nonce % 89]
}

fn usage_field(nonce: u64) -> String {
    let [input, output] = tokens_of(nonce);
    let usage = json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output});
    format!("\"usage\":{usage}")
}

/// FNV-1a.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The length of the text with which all turns of a conversation begin. Below 1 KiB, the relay recognizes none.
const HEAD_BYTES: usize = 2_000;

/// The length after which a text repeats: no divisor of any buffer's size, so that a piece in a wrong place is
/// detected.
const NOISE_PERIOD: usize = 1021;

/// Returns text that is unique to the seed.
fn noise(seed: u64, bytes: usize) -> String {
    let mut dice = Dice::of(seed);
    let mut text = String::with_capacity(NOISE_PERIOD + 16);
    while text.len() < bytes.min(NOISE_PERIOD) {
        text.push_str(&format!("{:016x}", dice.throw()));
    }
    text.truncate(bytes.min(NOISE_PERIOD));
    text.chars().cycle().take(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_target_round_trips_through_backend() {
        let spec = RequestSpec::stream(7, 3, 10).stalling(Stall::End);
        assert_eq!(RequestSpec::parse(&spec.target()), Some(spec));
        assert_eq!(RequestSpec::parse("/health"), None);
    }

    #[test]
    fn plain_response_is_json_stream_ends_with_done() {
        let plain = RequestSpec { pieces: 3, ..RequestSpec::plain(7, 0) }.expected();
        let plain: serde_json::Value = serde_json::from_slice(&plain).expect("JSON");
        assert_eq!((plain["nonce"].as_u64(), plain["2"].as_str().map(str::len)), (Some(7), Some(100)));
        let stream = String::from_utf8(RequestSpec::stream(7, 3, 0).expected()).expect("text");
        assert!(stream.ends_with("}\n\ndata: [DONE]\n\n") && stream.matches("\n\n").count() == 6, "{stream}");
    }
}
