use proptest::prelude::*;

use super::*;

const CHUNK: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\n\\\"usage\\\"\"}}],\"usage\":null}\n\n";
const USAGE: &str = "data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// Returns what passes of a stream that is cut into these pieces.
fn filtered<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut filter = UsageFilter::default();
    let mut passed = Vec::new();
    for piece in pieces {
        passed.extend_from_slice(&filter.push(Bytes::copy_from_slice(piece)));
        assert!(filter.held.len() <= MAX_HELD_BYTES, "{} bytes are held", filter.held.len());
    }
    passed.extend_from_slice(&filter.finish());
    String::from_utf8(passed).unwrap()
}

/// Checks a stream whole, in pieces of each size, and cut in two at each position.
fn check(stream: &str, expected: &str) {
    let bytes = stream.as_bytes();
    assert_eq!(filtered([bytes]), expected, "{stream:?}");
    for size in 1..bytes.len() {
        assert_eq!(filtered(bytes.chunks(size)), expected, "{stream:?} in pieces of {size}");
        let (before, after) = bytes.split_at(size);
        assert_eq!(filtered([before, after]), expected, "{stream:?} cut at {size}");
    }
}

#[test]
fn event_with_only_usage_is_dropped_however_cut() {
    check(&[CHUNK, CHUNK, USAGE, DONE].concat(), &[CHUNK, CHUNK, DONE].concat());
    check(&[USAGE, USAGE, CHUNK, USAGE].concat(), CHUNK);
    let crlf = |text: &str| text.replace('\n', "\r\n");
    check(&crlf(&[CHUNK, USAGE, DONE].concat()), &crlf(&[CHUNK, DONE].concat()));
    let mixed = format!("{}{USAGE}{}", crlf(CHUNK), crlf(DONE));
    check(&mixed, &format!("{}{}", crlf(CHUNK), crlf(DONE)));
    let cr = |text: &str| text.replace('\n', "\r");
    check(&cr(&[CHUNK, USAGE, CHUNK].concat()), &cr(&[CHUNK, CHUNK].concat()));
}

#[test]
fn usage_in_any_form_of_event_is_dropped() {
    for event in [
        "data:{\"usage\" : { } , \"choices\" : [ ]}\n\n",
        "data: {\"choices\":[],\ndata: \"usage\"\ndata: :\ndata: {\"total_tokens\":3}}\n\n",
        "id: 7\ndata: {\"choices\":[],\"usage\":{}}\nretry: 1\n\n",
        "data: {\"choices\":[],\"usage\":{\"usage\":null}}\n: inside\n\n",
        "data: {\"choices\":[],\"usage\":{},\"error\":null}\r\n\n",
    ] {
        check(&format!("{CHUNK}{event}{DONE}"), &format!("{CHUNK}{DONE}"));
    }
    // Without the empty line, at the end of the stream.
    check(&format!("{CHUNK}{}", USAGE.trim_end()), CHUNK);
    check(&format!("{CHUNK}{}\n", USAGE.trim_end()), CHUNK);
}

#[test]
fn every_other_event_passes() {
    for event in [
        "data: {\"choices\":[{\"delta\":{}}],\"usage\":{\"total_tokens\":3}}\n\n",
        "data: {\"choices\":[],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n",
        "data: {\"choices\":null,\"usage\":{}}\n\n",
        "data: {\"choices\":[],\"usage\":7}\n\n",
        "data: {\"usage\":{}}\n\n",
        "data: {\"choices\":[],\"usage\":{},\"error\":{\"message\":\"broken\"}}\n\n",
        "data: {\"choices\":[],\"usage\":{},\"usage\":{}}\n\n",
        "data: {\"choices\":[],\"usage\":{}} x\n\n",
        "event: error\ndata: {\"choices\":[],\"usage\":{}}\n\n",
        ": {\"choices\":[],\"usage\":{}}\n\n",
        "other: {\"choices\":[],\"usage\":{}}\n\n",
        "\u{feff}data: {\"choices\":[],\"usage\":{}}\n\n",
        "\n\n\r\n\n: ping\n\n:\n: two\n",
        "data\n\n",
        "data: \"usage\": \"half of it",
    ] {
        check(event, event);
        check(&format!("{event}{CHUNK}"), &format!("{event}{CHUNK}"));
    }
}

#[test]
fn comment_before_dropped_event_passes() {
    check(&format!(": ping\n{USAGE}{DONE}"), &format!(": ping\n{DONE}"));
    check(&format!(": ping\n\n{USAGE}\n{DONE}"), &format!(": ping\n\n\n{DONE}"));
}

#[test]
fn complete_parts_pass_at_once() {
    let mut filter = UsageFilter::default();
    let mut push = |piece: &str| {
        let passed = filter.push(Bytes::copy_from_slice(piece.as_bytes()));
        String::from_utf8(passed.to_vec()).unwrap()
    };
    assert_eq!(push(CHUNK), CHUNK);
    assert_eq!(push(": ping\n"), ": ping\n");
    assert_eq!(push("data: {}\n\ndata: {"), "data: {}\n\n");
    assert_eq!(push("}\n"), "");
    assert_eq!(push("\n: pi"), "data: {}\n\n");
    assert_eq!(push("ng\r\n\r\n"), ": ping\r\n\r\n");
    assert_eq!(push("data: 1\r\n\r\n"), "data: 1\r\n\r\n");
    assert_eq!(push("data: 2\r\r"), "data: 2\r\r");
}

#[test]
fn too_long_event_passes_and_next_is_filtered() {
    let long = format!("data: {{\"choices\":[],\"x\":\"{}\",\"usage\":{{}}}}\n\n", "x".repeat(3 * MAX_HELD_BYTES));
    for end in ["\n", "\r\n", "\r"] {
        let stream = [CHUNK, &long, USAGE, DONE].concat().replace('\n', end);
        let expected = [CHUNK, &long, DONE].concat().replace('\n', end);
        let bytes = stream.as_bytes();
        for size in [1, 2, 3, 100, 1000, MAX_HELD_BYTES, MAX_HELD_BYTES + 1, bytes.len()] {
            assert!(filtered(bytes.chunks(size)) == expected, "pieces of {size}, lines end with {end:?}");
        }
        let near = CHUNK.len() + long.len() - 8..CHUNK.len() + long.len() + 8;
        for cut in near {
            let (before, after) = bytes.split_at(cut);
            let (first, second) = before.split_at(MAX_HELD_BYTES * 2);
            assert!(filtered([first, second, after]) == expected, "cut at {cut}, lines end with {end:?}");
        }
    }
}

/// Parts of a stream with their line ends.
fn stream() -> impl Strategy<Value = (String, String)> {
    let part = prop::sample::select(vec![
        CHUNK,
        CHUNK,
        USAGE,
        USAGE,
        DONE,
        "\n",
        ": ping\n",
        ": ping\n\n",
        "event: error\ndata: {}\n\n",
        "data: 1\ndata: 2\n\n",
    ]);
    let line_end = prop::sample::select(vec!["\n", "\r\n"]);
    prop::collection::vec((part, line_end), 0..12).prop_map(|parts| {
        let text = |parts: &[(&str, &str)]| parts.iter().map(|(part, end)| part.replace('\n', end)).collect();
        let kept: Vec<_> = parts.iter().copied().filter(|(part, _)| *part != USAGE).collect();
        (text(&parts), text(&kept))
    })
}

proptest! {
    #[test]
    fn result_does_not_depend_on_cuts(
        (stream, expected) in stream(),
        sizes in prop::collection::vec(1..200_usize, 1..20),
    ) {
        let (mut rest, mut pieces) = (stream.as_bytes(), Vec::new());
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at((*size).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        prop_assert_eq!(filtered(pieces), expected);
    }

    #[test]
    fn held_bytes_never_exceed_event(bytes in prop::collection::vec(prop::sample::select(b"\r\n:d{}".to_vec()), 0..64)) {
        let whole = UsageFilter::default().push(Bytes::from(bytes.clone()));
        prop_assert!(bytes.starts_with(&whole));
        let mut filter = UsageFilter::default();
        let mut passed: Vec<u8> = bytes.iter().flat_map(|byte| filter.push(Bytes::copy_from_slice(&[*byte]))).collect();
        passed.extend_from_slice(&filter.finish());
        prop_assert_eq!(passed, bytes);
    }
}
