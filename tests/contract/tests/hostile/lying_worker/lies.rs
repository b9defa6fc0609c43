//! The liar's messages: right and wrong names, ids, numbers and types; pieces; invalid frames.

use serde_json::{Map, Value, json};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::frame::{
        Frame, FrameHeader,
        coding::{Control, Data, OpCode},
    },
};

/// The liar's knowledge: its own current and past requests, and those of the honest worker.
#[derive(Debug, Default)]
pub(super) struct Known {
    own: Vec<(String, u32)>,
    others: Vec<(String, u32)>,
}

impl Known {
    pub(super) fn learn(&mut self, message: &Value) {
        if message["type"] == "request" {
            let stream = message["stream"].as_u64().and_then(|stream| u32::try_from(stream).ok()).unwrap_or(0);
            remember(&mut self.own, message["request_id"].as_str().unwrap_or_default(), stream);
        }
    }

    pub(super) fn learn_others(&mut self, id: &str, stream: u32) {
        remember(&mut self.others, id, stream);
    }
}

/// Keeps the last few, which may still be running.
fn remember(ids: &mut Vec<(String, u32)>, id: &str, stream: u32) {
    ids.push((id.to_owned(), stream));
    if ids.len() > 8 {
        ids.remove(0);
    }
}

/// Reproducible random numbers (`SplitMix64`).
#[derive(Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn of(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to less than `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("less than a usize")
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let count = self.below(most + 1);
        (0..count).map(|_| self.next().to_le_bytes()[0]).collect()
    }

    /// Returns characters of one to four bytes, including quotes and control characters.
    pub(super) fn text(&mut self, most: usize) -> String {
        let letters = ['a', '"', '\\', '\n', '\u{1}', 'ö', '€', '😀', '}', ' '];
        let count = self.below(most + 1);
        (0..count).map(|_| letters[self.below(letters.len())]).collect()
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        (!of.is_empty()).then(|| &of[self.below(of.len())])
    }

    /// Returns a value that no field expects, or a boundary value.
    pub(super) fn odd_value(&mut self) -> Value {
        match self.below(16) {
            0 => json!(u64::MAX),
            1 => json!(i64::MIN),
            2 => json!(-1),
            3 => json!(1e308),
            4 => json!(u32::MAX),
            5 => json!(u64::from(u32::MAX) + 1),
            6 => Value::Null,
            7 => json!(true),
            8 => json!([]),
            9 => json!({}),
            10 => json!([[["x"]], {"id": []}]),
            11 => json!("x".repeat(self.below(100_000))),
            12 => json!(self.text(300)),
            13 => json!(""),
            14 => json!(0),
            _ => json!(1),
        }
    }

    /// Returns the id and stream of a request: its own, another worker's, or an unknown one.
    fn request(&mut self, known: &Known) -> (Value, u32) {
        let found = match self.below(6) {
            0..=3 => self.pick(&known.own),
            4 => self.pick(&known.others),
            _ => None,
        };
        match found.cloned() {
            Some((id, stream)) => (json!(id), stream),
            None => (json!(self.text(300)), u32::try_from(self.below(64)).expect("small")),
        }
    }
}

/// Returns the next message. A malformed one ends the link, so only an `outrageous` liar sends it.
pub(super) fn lie(dice: &mut Dice, known: &Known, outrageous: bool) -> Message {
    match dice.below(40) {
        0..=2 if !outrageous => piece(dice, known),
        0 => frame(dice),
        1 => Message::Binary(dice.bytes(70_000).into()),
        2 => Message::text(dice.text(2000)),
        3 | 4 => Message::Ping(dice.bytes(125).into()),
        5 => Message::Pong(dice.bytes(125).into()),
        6..=13 => piece(dice, known),
        _ => {
            let mut message = message(dice, known);
            if outrageous && dice.below(8) == 0 {
                spoil(&mut message, dice);
            }
            Message::text(message.to_string())
        }
    }
}

/// Returns response bytes in valid form, mostly for a known stream.
fn piece(dice: &mut Dice, known: &Known) -> Message {
    let (_, stream) = dice.request(known);
    let mut bytes = vec![2, 0];
    bytes.extend(stream.to_be_bytes());
    let most = if dice.below(4) == 0 { 65_536 } else { 100 };
    bytes.extend(dice.bytes(most));
    Message::Binary(bytes.into())
}

/// Returns a message of any type, with valid fields and contradictory values.
fn message(dice: &mut Dice, known: &Known) -> Value {
    let (id, stream) = dice.request(known);
    match dice.below(16) {
        0 => json!({"type": "response_chunk", "request_id": id, "chunk": dice.text(500)}),
        1 | 2 => {
            json!({"type": "response_start", "request_id": id, "status_code": status(dice), "headers": headers(dice)})
        }
        3 => json!({"type": "response_start", "request_id": id, "status_code": 200, "headers": [],
            "content_length": dice.below(1000)}),
        4 | 5 => json!({"type": "response_complete", "request_id": id, "token_counts":
            {"prompt_tokens": u64::MAX, "completion_tokens": u64::MAX, "total_tokens": dice.below(9)}}),
        6 => {
            json!({"type": "response_complete", "request_id": id, "status_code": status(dice), "headers": {"a": "b\r\nc: d"},
            "body": dice.text(1000), "response_id": dice.text(300)})
        }
        7 => json!({"type": "error", "request_id": id, "code": error_code(dice), "message": dice.text(300),
            "retry_after_ms": u64::MAX}),
        8 => json!({"type": "credit", "stream": stream, "bytes": if dice.below(2) == 0 { u64::MAX } else { 0 }}),
        9 => {
            json!({"type": "grant", "slots": number(dice), "others": number(dice), "capacity": number(dice), "links": number(dice)})
        }
        10 => json!({"type": "grant", "slots": 4, "others": 0, "capacity": 4, "links": 1,
            "models": [{"id": "lie", "slots": number(dice)}, {"id": "lie", "slots": 1}, {"id": "honest", "slots": 9}]}),
        11 => json!({"type": "models_update", "models": models(dice), "current_load": number(dice)}),
        12 => json!({"type": "pong", "current_load": number(dice), "timestamp_unix_ms": u64::MAX}),
        13 => json!({"type": "slots", "slots": slots(dice)}),
        14 => json!({"type": "command_result", "op_id": id, "ok": dice.below(2) == 0, "error": dice.text(50)}),
        _ => json!({"type": dice.text(20), "request_id": id}),
    }
}

/// Replaces, removes or adds one field.
fn spoil(message: &mut Value, dice: &mut Dice) {
    let Some(fields) = message.as_object_mut() else { return };
    let names: Vec<String> = fields.keys().filter(|name| *name != "type").cloned().collect();
    let value = dice.odd_value();
    match (dice.below(3), dice.pick(&names)) {
        (0, Some(name)) => drop(fields.remove(name)),
        (1, Some(name)) => drop(fields.insert(name.clone(), value)),
        _ => drop(fields.insert(dice.text(10), value)),
    }
}

fn number(dice: &mut Dice) -> u32 {
    *dice.pick(&[0, 1, 2, 4, 1000, u32::MAX - 1, u32::MAX]).expect("some")
}

fn status(dice: &mut Dice) -> u16 {
    *dice.pick(&[200, 200, 200, 204, 304, 404, 500, 0, 100, 101, 199, 600, 999, 1000, u16::MAX]).expect("some")
}

fn error_code(dice: &mut Dice) -> &'static str {
    let codes = [
        "lie_1",
        "lie_3",
        "lie_4",
        "backend_unreachable",
        "draining",
        "model_loading",
        "slot_quarantined",
        "severed_by_swap",
        "insufficient_memory",
        "lie_2",
    ];
    codes[dice.below(codes.len())]
}

/// Returns headers that truncate or split responses, or are invalid.
fn headers(dice: &mut Dice) -> Value {
    let pairs = [
        json!(["content-type", "text/event-stream"]),
        json!(["content-length", "5"]),
        json!(["content-length", "99999999999999999999"]),
        json!(["transfer-encoding", "gzip, chunked"]),
        json!(["connection", "upgrade"]),
        json!(["x-odd", "a\r\nx-split: b"]),
        json!(["x odd", "a"]),
        json!(["", ""]),
        json!(["x-long", "h".repeat(10_000)]),
        json!(["x-request-id", "lie"]),
    ];
    (0..dice.below(5)).map(|_| pairs[dice.below(pairs.len())].clone()).collect()
}

/// Never the honest worker's model: a worker with a secret may serve any model.
fn models(dice: &mut Dice) -> Value {
    match dice.below(4) {
        0 => json!([]),
        1 => (0..dice.below(2000)).map(|at| json!(format!("lie-{at}"))).collect(),
        2 => json!(["lie", "lie", " lie ", "", dice.text(600)]),
        _ => json!(["lie", "lie-2"]),
    }
}

fn slots(dice: &mut Dice) -> Value {
    let states = ["empty", "ready", "loading", "draining", "unloading", "quarantined", "nonsense"];
    let slot = |dice: &mut Dice, at: usize| {
        let mut slot = Map::new();
        slot.insert("id".into(), json!(if dice.below(4) == 0 { "same".into() } else { format!("gpu{at}") }));
        slot.insert("state".into(), json!(states[dice.below(states.len())]));
        slot.insert("generation".into(), json!(u64::from(number(dice))));
        for name in ["resident", "target"] {
            slot.insert(name.into(), json!(dice.pick(&["lie", "lie-2", "nobody"])));
        }
        for name in ["eta_ms", "since_ms", "idle_ms"] {
            slot.insert(name.into(), json!(u64::MAX));
        }
        slot.insert("wanted".into(), json!(number(dice)));
        slot.insert(
            "models".into(),
            json!([{"id": "lie", "aliases": ["lie-2", "lie"], "status": "ready", "capacity": number(dice),
            "swap_cost_ms": u64::MAX, "pinned": true, "wanted": true}]),
        );
        Value::Object(slot)
    };
    (0..dice.below(20)).map(|at| slot(dice, at)).collect()
}

/// Returns a frame of any opcode with any bits, or invalid UTF-8.
fn frame(dice: &mut Dice) -> Message {
    let reserved = u8::try_from(3 + dice.below(5)).expect("small");
    let opcode = match dice.below(8) {
        0 => OpCode::Data(Data::Text),
        1 => OpCode::Data(Data::Binary),
        2 => OpCode::Data(Data::Continue),
        3 => OpCode::Data(Data::Reserved(reserved)),
        4 => OpCode::Control(Control::Close),
        5 => OpCode::Control(Control::Ping),
        6 => OpCode::Control(Control::Pong),
        _ => OpCode::Control(Control::Reserved(reserved + 8)),
    };
    let mut bit = || dice.below(4) == 0;
    let header =
        FrameHeader { is_final: !bit(), rsv1: bit(), rsv2: bit(), rsv3: bit(), opcode, mask: Some([1, 2, 3, 4]) };
    Message::Frame(Frame::from_payload(header, dice.bytes(300).into()))
}
