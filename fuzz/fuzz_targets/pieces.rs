//! Binary pieces of bodies: any message is judged as documented, and bodies are unchanged after they are cut, sent
//! within their credit and joined again.

#![no_main]

use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use modelrelay_protocol::credit::ReceiveWindow;
use modelrelay_protocol::frame::{BodyKind, FrameError, HEADER_BYTES, decode, encode_header};
use modelrelay_protocol::limits::MAX_PIECE_BYTES;
use modelrelay_protocol::outbox::{Frame, Outbox};

const STREAMS: usize = 3;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    message: &'a [u8],
    /// Bytes by which the message is longer: few inputs are as long as the limit.
    padding: Option<u32>,
    window: u32,
    max_window: u32,
    steps: Vec<Step<'a>>,
}

#[derive(Arbitrary, Debug)]
enum Step<'a> {
    /// Bytes of a body, repeated.
    Body { stream: u8, bytes: &'a [u8], times: u8 },
    /// The body is over.
    Finish { stream: u8 },
    /// This number of frames is written and arrives.
    Write { frames: u8 },
    /// The receiver reads, some time later.
    Read { stream: u8, bytes: u32, millis: u16 },
}

fuzz_target!(|input: Input<'_>| {
    judge(&input);
    let mut link = Link::new(u64::from(input.window), u64::from(input.max_window));
    for step in &input.steps {
        link.take(step);
    }
    link.end();
});

fn judge(input: &Input<'_>) {
    let mut message = input.message.to_vec();
    message.resize(message.len() + input.padding.map_or(0, |more| more as usize % (MAX_PIECE_BYTES + 16)), 7);
    let payload = message.len().checked_sub(HEADER_BYTES);
    match decode(Bytes::from(message.clone())) {
        Ok(piece) => {
            let mut again = encode_header(piece.kind, piece.stream).to_vec();
            again[1] = message[1]; // reserved, and not judged
            again.extend_from_slice(&piece.payload);
            assert_eq!(again, message);
            assert!(piece.payload.len() <= MAX_PIECE_BYTES);
        }
        Err(FrameError::TooShort) => assert_eq!(payload, None),
        Err(FrameError::UnknownKind(kind)) => assert!(kind == message[0] && !matches!(kind, 1 | 2)),
        Err(FrameError::TooLong(length)) => assert!(payload == Some(length) && length > MAX_PIECE_BYTES),
    }
}

/// A sender and its receiver, and the expected content of each stream.
struct Link {
    outbox: Outbox,
    now: Instant,
    streams: Vec<Stream>,
}

struct Stream {
    window: ReceiveWindow,
    sent: Vec<u8>,
    joined: Vec<u8>,
    is_finished: bool,
    has_ended: bool,
}

impl Link {
    fn new(window: u64, max: u64) -> Self {
        let mut outbox = Outbox::new(BodyKind::Response, |stream, bytes| format!("credit {stream} {bytes}"));
        let new = || Stream {
            window: ReceiveWindow::new(window, max),
            sent: Vec::new(),
            joined: Vec::new(),
            is_finished: false,
            has_ended: false,
        };
        let streams: Vec<Stream> = (0..STREAMS).map(|_| new()).collect();
        for (number, stream) in (0..).zip(&streams) {
            outbox.open_stream(number, stream.window.window());
        }
        Self { outbox, now: Instant::now(), streams }
    }

    fn take(&mut self, step: &Step<'_>) {
        match *step {
            Step::Body { stream, bytes, times } => {
                let (number, stream) = self.stream(stream);
                let bytes = bytes.repeat(usize::from(times));
                if !stream.is_finished {
                    stream.sent.extend_from_slice(&bytes);
                }
                self.outbox.push_body(number, bytes.into());
            }
            Step::Finish { stream } => {
                let (number, stream) = self.stream(stream);
                if !std::mem::replace(&mut stream.is_finished, true) {
                    self.outbox.finish(number, format!("end {number}"));
                }
            }
            Step::Write { frames } => {
                for _ in 0..frames {
                    self.write();
                }
            }
            Step::Read { stream, bytes, millis } => {
                self.now += Duration::from_millis(millis.into());
                let now = self.now;
                let (number, stream) = self.stream(stream);
                let credit = stream.window.on_consumed(bytes.into(), now);
                self.outbox.add_credit(number, credit.unwrap_or(0));
            }
        }
    }

    fn stream(&mut self, number: u8) -> (u32, &mut Stream) {
        let number = usize::from(number) % STREAMS;
        (number as u32, &mut self.streams[number])
    }

    /// Writes a frame; returns true if there was one.
    fn write(&mut self) -> bool {
        let has_frame = self.outbox.has_frame();
        let frame = self.outbox.next_frame();
        assert_eq!(frame.is_some(), has_frame);
        match frame {
            None => return false,
            Some(Frame::Text(text)) => {
                let number: usize = text.strip_prefix("end ").expect("an end").parse().expect("a number");
                let stream = &mut self.streams[number];
                assert!(!std::mem::replace(&mut stream.has_ended, true), "stream {number} ends twice");
                assert!(stream.joined == stream.sent, "stream {number} ends before its last piece");
            }
            Some(Frame::Binary { header, payload }) => {
                assert!((1..=MAX_PIECE_BYTES).contains(&payload.len()));
                let piece = decode([&header[..], &payload].concat().into()).expect("what we write can be read");
                assert_eq!((piece.kind, &piece.payload), (BodyKind::Response, &payload));
                let stream = &mut self.streams[piece.stream as usize];
                stream.window.on_piece(payload.len() as u64).expect("a piece within its credit");
                stream.joined.extend_from_slice(&payload);
                assert!(!stream.has_ended && stream.sent.starts_with(&stream.joined));
            }
        }
        true
    }

    /// Lets the receiver read everything, so that the sender can send everything.
    fn end(&mut self) {
        for number in 0..STREAMS as u8 {
            self.take(&Step::Finish { stream: number });
        }
        loop {
            let mut is_at_work = false;
            while self.write() {
                is_at_work = true;
            }
            for number in 0..STREAMS as u8 {
                self.take(&Step::Read { stream: number, bytes: u32::MAX, millis: 0 });
            }
            if !is_at_work && !self.outbox.has_frame() {
                break;
            }
        }
        for (number, stream) in self.streams.iter().enumerate() {
            assert!(stream.has_ended && stream.joined == stream.sent, "stream {number} stalled");
        }
        assert!(self.outbox.is_empty() && self.outbox.body_bytes() == 0 && self.outbox.text_bytes() == 0);
    }
}
