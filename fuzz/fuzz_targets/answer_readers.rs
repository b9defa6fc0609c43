//! The readers of a response on its way: their results do not depend on how the backend or the network cuts its bytes.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use modelrelay_fuzz::Cuts;
use modelrelay_protocol::event_stream::Tail;
use modelrelay_protocol::limits::{MAX_FINISH_REASON_BYTES, MAX_FINISH_REASONS, MAX_ID_BYTES};
use modelrelay_protocol::usage::{Usage, UsageReader};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    path: Path,
    content_type: ContentType,
    cuts: Cuts,
    filler: Option<Filler>,
    bytes: &'a [u8],
}

/// This number of KiB of one byte, somewhere: some responses are too long to keep.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Filler {
    byte: u8,
    kibibytes: u16,
    at: u16,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Path {
    Chat,
    Responses,
    Messages,
    Embeddings,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum ContentType {
    Events,
    Json,
    Absent,
}

/// More than twice what is kept whole.
const MOST_FILLER: usize = 2_500;

fuzz_target!(|input: Input<'_>| {
    let mut bytes = input.bytes.to_vec();
    if let Some(Filler { byte, kibibytes, at }) = input.filler {
        let at = usize::from(at).min(bytes.len());
        let filler = std::iter::repeat_n(byte, (usize::from(kibibytes) % MOST_FILLER) << 10);
        bytes.splice(at..at, filler);
    }

    let whole = usage(&input, false, std::iter::once(bytes.as_slice()));
    assert_eq!(usage(&input, false, input.cuts.of(&bytes)), whole, "cut as given");
    if bytes.len() < 4_096 {
        assert_eq!(usage(&input, false, bytes.chunks(1)), whole, "cut everywhere");
    }
    if let Some(id) = &whole.response_id {
        assert!(matches!(input.path, Path::Responses) && (1..=MAX_ID_BYTES).contains(&id.len()));
    }

    let traced = usage(&input, true, std::iter::once(bytes.as_slice()));
    assert_eq!(usage(&input, true, input.cuts.of(&bytes)), traced, "cut as given, with details");
    let details = traced.details.expect("details were requested");
    assert!(details.id.is_none_or(|id| id.len() <= MAX_ID_BYTES) && details.finish_reasons.len() <= MAX_FINISH_REASONS);
    assert!(details.finish_reasons.iter().all(|reason| (1..=MAX_FINISH_REASON_BYTES).contains(&reason.len())));

    let between = is_between_events(std::iter::once(bytes.as_slice()));
    assert_eq!(is_between_events(input.cuts.of(&bytes)), between);
    // False is always safe, at the cost of an empty line; true within an event is not.
    assert!(!between || has_ended_its_event(&bytes));
});

fn usage<'a>(input: &Input<'_>, wants_details: bool, pieces: impl Iterator<Item = &'a [u8]>) -> Usage {
    let path = match input.path {
        Path::Chat => "/v1/chat/completions",
        Path::Responses => "/v1/responses?x=1",
        Path::Messages => "/v1/messages",
        Path::Embeddings => "/v1/embeddings",
    };
    let content_type = match input.content_type {
        ContentType::Events => Some("text/event-stream; charset=utf-8"),
        ContentType::Json => Some("application/json"),
        ContentType::Absent => None,
    };
    let mut reader = UsageReader::new("POST", path, content_type).with_details(wants_details);
    pieces.for_each(|piece| reader.push(piece));
    reader.finish()
}

fn is_between_events<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut tail = Tail::default();
    pieces.for_each(|piece| tail.follow(piece));
    tail.is_between_events()
}

/// As the standard defines it: lines end with CR, LF or CRLF, and an empty one ends an event.
fn has_ended_its_event(bytes: &[u8]) -> bool {
    let (mut line, mut is_between, mut after_cr) = (0, true, false);
    for &byte in bytes {
        match byte {
            b'\n' if after_cr => {}
            b'\r' | b'\n' => {
                is_between = line == 0;
                line = 0;
            }
            _ => line += 1,
        }
        after_cr = byte == b'\r';
    }
    line == 0 && is_between
}
