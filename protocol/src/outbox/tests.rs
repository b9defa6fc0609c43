use proptest::prelude::*;

use super::*;
use crate::limits::MAX_PIECE_BYTES;

fn credit_text(stream: u32, bytes: u64) -> String {
    format!("credit {stream} {bytes}")
}

fn relay() -> Outbox {
    Outbox::new(BodyKind::Request, credit_text)
}

fn worker() -> Outbox {
    Outbox::new(BodyKind::Response, credit_text)
}

fn body(len: usize) -> Bytes {
    Bytes::from((0..len).map(|at| (at % 251) as u8).collect::<Vec<u8>>())
}

/// Returns frames in writing order: texts unchanged, pieces as `<stream>:<length>`.
fn written(outbox: &mut Outbox) -> Vec<String> {
    std::iter::from_fn(|| outbox.next_frame()).map(|frame| shown(&frame)).collect()
}

fn shown(frame: &Frame) -> String {
    match frame {
        Frame::Text(text) => text.clone(),
        Frame::Binary { header, payload } => {
            let [_, _, a, b, c, d] = *header;
            format!("{}:{}", u32::from_be_bytes([a, b, c, d]), payload.len())
        }
    }
}

#[test]
fn texts_keep_their_order_and_precede_pieces() {
    let mut out = worker();
    out.open_stream(1, 1_000);
    out.push_body(1, body(10));
    out.push_text("a".into());
    out.push_text("b".into());
    assert_eq!(written(&mut out), ["a", "b", "1:10"]);
}

#[test]
fn piece_carries_kind_stream_and_exact_bytes() {
    let mut out = worker();
    out.open_stream(0x0102_0304, 1_000);
    out.push_body(0x0102_0304, Bytes::from_static(b"\xff\x00x"));
    let frame = out.next_frame();
    assert_eq!(frame, Some(Frame::Binary { header: [2, 0, 1, 2, 3, 4], payload: Bytes::from_static(b"\xff\x00x") }));
}

#[test]
fn request_precedes_its_body_and_is_then_forgotten() {
    let mut out = relay();
    out.push_request(1, "r1", "request r1".into(), body(100_000), 262_144);
    assert_eq!(written(&mut out), ["request r1", "1:65536", "1:34464"]);
    assert!(out.is_empty());
    assert!(out.streams.is_empty());
    out.add_credit(1, 10);
    assert!(!out.has_frame());
}

#[test]
fn streams_alternate_piece_by_piece() {
    let mut out = relay();
    out.push_request(1, "r1", "q1".into(), body(200_000), u64::MAX);
    out.push_request(2, "r2", "q2".into(), body(100), u64::MAX);
    out.push_request(3, "r3", "q3".into(), body(70_000), u64::MAX);
    assert_eq!(
        written(&mut out),
        ["q1", "q2", "q3", "1:65536", "2:100", "3:65536", "1:65536", "3:4464", "1:65536", "1:3392"]
    );
}

#[test]
fn stream_without_credit_blocks_no_other_stream() {
    let mut out = relay();
    out.push_request(1, "r1", "q1".into(), body(300), 100);
    out.push_request(2, "r2", "q2".into(), body(300), 1_000);
    assert_eq!(written(&mut out), ["q1", "q2", "1:100", "2:300"]);
    assert!(!out.has_frame());
    assert!(!out.is_empty());
    assert_eq!(out.waiting_bytes(1), 200);
    out.add_credit(1, 50);
    assert_eq!(written(&mut out), ["1:50"]);
    out.add_credit(1, 65_536);
    assert_eq!(written(&mut out), ["1:150"]);
    assert!(out.is_empty());
}

#[test]
fn stream_opened_without_credit_sends_after_credit_arrives() {
    let mut out = worker();
    out.open_stream(1, 0);
    out.open_stream(2, 5);
    out.add_credit(2, 5);
    assert!(!out.has_frame(), "credit alone is nothing to send");
    assert_eq!(out.push_body(1, body(5)), 5);
    assert!(!out.has_frame());
    out.add_credit(1, 3);
    out.add_credit(1, 1);
    assert_eq!(written(&mut out), ["1:4"]);
}

#[test]
fn completion_follows_last_piece() {
    let mut out = worker();
    out.open_stream(1, 70_000);
    out.push_body(1, body(80_000));
    out.finish(1, "complete".into());
    out.push_text("other".into());
    assert_eq!(written(&mut out), ["other", "1:65536", "1:4464"]);
    assert_eq!(out.text_bytes(), "complete".len());
    out.add_credit(1, 65_536);
    assert_eq!(written(&mut out), ["1:10000", "complete"]);
    assert_eq!((out.text_bytes(), out.body_bytes()), (0, 0));
}

#[test]
fn second_completion_replaces_first() {
    let mut out = worker();
    out.open_stream(1, 10);
    out.push_body(1, body(10));
    out.finish(1, "complete".into());
    out.finish(1, "complete, with trailers".into());
    assert_eq!(out.text_bytes(), "complete, with trailers".len());
    assert_eq!(written(&mut out), ["1:10", "complete, with trailers"]);
    assert_eq!(out.text_bytes(), 0);
}

#[test]
fn completion_of_drained_stream_needs_no_credit() {
    let mut out = worker();
    out.open_stream(1, 10);
    out.push_body(1, body(10));
    assert_eq!(written(&mut out), ["1:10"]);
    out.finish(1, "complete".into());
    assert_eq!(written(&mut out), ["complete"]);
    out.finish(2, "complete without a body".into());
    assert_eq!(written(&mut out), ["complete without a body"]);
}

#[test]
fn completion_immediately_follows_its_piece_among_streams() {
    let mut out = worker();
    out.open_stream(1, 1_000);
    out.open_stream(2, u64::MAX);
    out.push_body(2, body(200_000));
    out.push_body(1, body(10));
    out.finish(1, "complete 1".into());
    assert_eq!(written(&mut out), ["2:65536", "1:10", "complete 1", "2:65536", "2:65536", "2:3392"]);
}

#[test]
fn error_overtakes_and_drops_pieces() {
    let mut out = worker();
    out.open_stream(1, u64::MAX);
    out.open_stream(2, u64::MAX);
    out.push_body(1, body(500_000));
    out.push_body(2, body(10));
    out.push_error(1, "error 1".into());
    assert_eq!(out.body_bytes(), 10);
    assert_eq!(out.push_body(1, body(10)), 0);
    assert_eq!(written(&mut out), ["error 1", "2:10"]);
}

#[test]
fn discarding_finished_stream_drops_its_completion() {
    let mut out = worker();
    out.open_stream(1, 5);
    out.push_body(1, body(10));
    out.finish(1, "complete".into());
    out.discard(1);
    assert!(out.is_empty());
    assert_eq!((out.text_bytes(), out.body_bytes()), (0, 0));
    assert_eq!(written(&mut out), Vec::<String>::new());
}

#[test]
fn cancel_removes_unwritten_request_or_follows_written_one() {
    let mut out = relay();
    out.push_request(1, "r1", "q1".into(), body(100_000), u64::MAX);
    assert_eq!(out.cancel(1, "cancel r1".into()), CancelOutcome::RemovedUnsent);
    assert!(out.is_empty());

    out.push_request(2, "r2", "q2".into(), body(100_000), u64::MAX);
    assert_eq!(out.next_frame().map(|frame| shown(&frame)).as_deref(), Some("q2"));
    assert_eq!(out.next_frame().map(|frame| shown(&frame)).as_deref(), Some("2:65536"));
    assert_eq!(out.cancel(2, "cancel r2".into()), CancelOutcome::Queued);
    assert_eq!(written(&mut out), ["cancel r2"]);
    assert_eq!((out.text_bytes(), out.body_bytes()), (0, 0));
}

#[test]
fn waiting_credit_is_summed_per_stream() {
    let mut out = relay();
    out.return_credit(7, 65_536);
    out.return_credit(8, 1);
    out.return_credit(7, 4);
    out.return_credit(9, 0);
    assert_eq!(written(&mut out), ["credit 7 65540", "credit 8 1"]);
    out.return_credit(7, 3);
    assert_eq!(written(&mut out), ["credit 7 3"]);
    out.return_credit(7, 3);
    out.push_error(7, "error".into());
    assert_eq!(written(&mut out), ["error"]);
}

#[test]
fn newest_state_replaces_waiting_one_in_place() {
    let mut out = worker();
    out.set_latest(Latest::Grant, "grant 1".into());
    out.push_error(1, "at_capacity".into());
    out.set_latest(Latest::ModelsUpdate, "models".into());
    out.set_latest(Latest::Grant, "grant 2".into());
    assert_eq!(out.text_bytes(), "grant 2at_capacitymodels".len());
    assert_eq!(written(&mut out), ["grant 2", "at_capacity", "models"]);
    out.set_latest(Latest::Grant, "grant 3".into());
    assert_eq!(written(&mut out), ["grant 3"]);
}

#[test]
fn demand_never_moves_across_request() {
    let mut out = relay();
    out.set_demand("demand 2".into());
    out.set_demand("demand 3".into());
    out.push_text("ping".into());
    assert_eq!(out.text_bytes(), "demand 3ping".len());
    out.push_request(1, "r1", "q1".into(), Bytes::new(), 0);
    out.set_demand("demand 1".into());
    out.set_demand("demand 0".into());
    out.push_text("ping".into());
    assert_eq!(written(&mut out), ["ping", "q1", "demand 0", "ping"]);
}

#[test]
fn demand_without_later_request_keeps_its_place() {
    let mut out = relay();
    out.push_request(1, "r1", "q1".into(), Bytes::new(), 0);
    out.set_demand("demand 2".into());
    out.push_text("ping".into());
    out.set_demand("demand 1".into());
    assert_eq!(written(&mut out), ["q1", "demand 1", "ping"]);
}

#[test]
fn unwritten_requests_are_returned_in_order() {
    let mut out = relay();
    for stream in 1..=4 {
        out.push_request(stream, &format!("r{stream}"), format!("q{stream}"), body(10), 100);
    }
    out.push_text("ping".into());
    out.next_frame();
    out.cancel(3, String::new());
    assert_eq!(out.take_unwritten_requests(), [(2, "r2".to_owned()), (4, "r4".to_owned())]);
    assert_eq!(written(&mut out), ["ping", "1:10"]);
    assert!(out.is_empty());
}

#[test]
fn only_small_waiting_parts_are_copied_and_joined() {
    let mut out = worker();
    out.open_stream(1, u64::MAX);
    let large = body(100_000);
    let at = large.as_ptr();
    out.push_body(1, large);
    for _ in 0..300 {
        out.push_body(1, body(1_000));
    }
    let Some(Frame::Binary { payload, .. }) = out.next_frame() else { panic!("no piece") };
    assert_eq!(payload.as_ptr(), at);
    // 300,000 bytes in buffers of at most a piece: five, not three hundred.
    assert_eq!(written(&mut out), ["1:34464", "1:65000", "1:65000", "1:65000", "1:65000", "1:40000"]);
    for _ in 0..129 {
        out.push_body(1, body(1_024));
    }
    assert_eq!(written(&mut out), ["1:1024", "1:65536", "1:65536"]);
}

#[test]
fn large_or_unqueued_parts_are_sent_uncopied() {
    let mut out = worker();
    out.open_stream(1, u64::MAX);
    for parts in [vec![body(10)], vec![body(60_000), body(50_000)]] {
        for part in &parts {
            out.push_body(1, part.clone());
        }
        for part in parts {
            let Some(Frame::Binary { payload, .. }) = out.next_frame() else { panic!("no piece") };
            assert_eq!((payload.as_ptr(), payload.len()), (part.as_ptr(), part.len()));
        }
    }
}

#[test]
fn no_piece_follows_completion() {
    let mut out = worker();
    out.open_stream(1, u64::MAX);
    out.push_body(1, body(10));
    out.finish(1, "complete".into());
    assert_eq!(out.push_body(1, body(10)), 10, "those of before");
    assert_eq!(written(&mut out), ["1:10", "complete"]);
}

#[test]
fn forgotten_streams_do_not_accumulate_in_ring() {
    let mut out = worker();
    for stream in 0..10_000 {
        out.open_stream(stream, 10);
        out.push_body(stream, body(1));
        out.discard(stream);
    }
    assert!(out.ring.len() <= STALE_RING_ENTRIES + 1);
    assert!(!out.has_frame());
}

#[test]
fn ring_is_cleaned_when_mostly_stale() {
    let mut out = worker();
    let streams = 500;
    for stream in 0..streams {
        out.open_stream(stream, 10);
        out.push_body(stream, body(1));
    }
    let mut cleaned = Vec::new();
    for stream in 0..streams {
        let before = out.ring.len();
        out.discard(stream);
        if out.ring.len() < before {
            cleaned.push(out.ring.len());
        }
        assert!(out.ring.len() <= 2 * out.ready + STALE_RING_ENTRIES);
    }
    // Each cleaning more than halves the ring, so a stream that ends costs on average one visit to another.
    assert_eq!(cleaned, [217, 76, 5]);
}

#[derive(Clone, Debug)]
enum Step {
    Request(u16),
    Text,
    Cancel(usize),
    Discard(usize),
    Credit(usize, u16),
    Demand,
    Grant,
    Write(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        any::<u16>().prop_map(Step::Request),
        Just(Step::Text),
        (0_usize..40).prop_map(Step::Cancel),
        (0_usize..40).prop_map(Step::Discard),
        ((0_usize..40), any::<u16>()).prop_map(|(at, bytes)| Step::Credit(at, bytes)),
        Just(Step::Demand),
        Just(Step::Grant),
        any::<u8>().prop_map(Step::Write),
    ]
}

#[derive(Default)]
struct Sent {
    len: u64,
    credit: u64,
    written: bool,
    received: u64,
    over: bool,
}

proptest! {
    /// A relay's socket with a random history of requests.
    #[test]
    fn every_history_keeps_the_order_and_the_credit(steps in prop::collection::vec(step(), 1..120)) {
        let mut out = relay();
        let mut sent: Vec<Sent> = Vec::new();
        let (mut pushed_texts, mut read_texts) = (0_u32, 0_u32);
        // Each demand of this test holds the number of requests pushed before it.
        let mut read_requests = 0;
        for step in steps {
            match step {
                Step::Request(len) => {
                    let len = u64::from(len) * 3;
                    sent.push(Sent { len, credit: 20_000, ..Sent::default() });
                    out.push_request(sent.len() as u32 - 1, "r", format!("q {}", sent.len() - 1), body(len as usize), 20_000);
                }
                Step::Text => {
                    out.push_text(format!("t {pushed_texts}"));
                    pushed_texts += 1;
                }
                Step::Cancel(at) => if let Some(state) = sent.get_mut(at) {
                    let outcome = out.cancel(at as u32, "c 0".into());
                    if !state.over && !state.written {
                        prop_assert_eq!(outcome, CancelOutcome::RemovedUnsent);
                    }
                    state.over = true;
                },
                Step::Discard(at) => if let Some(state) = sent.get_mut(at).filter(|state| state.written) {
                    out.discard(at as u32);
                    state.over = true;
                },
                Step::Credit(at, bytes) => if let Some(state) = sent.get_mut(at) {
                    out.add_credit(at as u32, u64::from(bytes));
                    state.credit += u64::from(bytes);
                },
                Step::Demand => out.set_demand(format!("d {}", sent.len())),
                Step::Grant => out.set_latest(Latest::Grant, "g 0".into()),
                Step::Write(frames) => for _ in 0..frames {
                    let had = out.has_frame();
                    let Some(frame) = out.next_frame() else { prop_assert!(!had); break };
                    prop_assert!(had);
                    match frame {
                        Frame::Text(text) => {
                            let (kind, number) = text.split_once(' ').expect("our own texts");
                            let number: u32 = number.parse().expect("our own texts");
                            match kind {
                                "q" => {
                                    let state = &mut sent[number as usize];
                                    prop_assert!(!state.over && !state.written);
                                    state.written = true;
                                    read_requests = number + 1;
                                }
                                "t" => { prop_assert_eq!(number, read_texts); read_texts += 1; }
                                "d" => {
                                    // After every request that it includes, before every other.
                                    prop_assert!(number >= read_requests);
                                    prop_assert!(sent[..number as usize].iter().all(|state| state.written || state.over));
                                }
                                _ => {}
                            }
                        }
                        Frame::Binary { header, payload } => {
                            let state = &mut sent[usize::from(header[5])];
                            prop_assert!(state.written && !state.over);
                            prop_assert!(!payload.is_empty() && payload.len() <= MAX_PIECE_BYTES);
                            let from = state.received;
                            state.received += payload.len() as u64;
                            prop_assert!(state.received <= state.credit && state.received <= state.len);
                            prop_assert!(payload.iter().zip(from..).all(|(&byte, at)| u64::from(byte) == at % 251));
                        }
                    }
                },
            }
            let waiting: u64 = sent.iter().filter(|state| !state.over).map(|state| state.len - state.received).sum();
            prop_assert_eq!(out.body_bytes(), waiting);
            let texts: usize = out.texts.values().map(Entry::len).sum();
            prop_assert_eq!(out.text_bytes(), texts);
        }
        // Streams that still have credit are sent, and nothing else.
        while out.next_frame().is_some() {}
        prop_assert_eq!(out.ready, 0);
        for (at, state) in sent.iter().enumerate().filter(|(_, state)| !state.over) {
            prop_assert_eq!(out.waiting_bytes(at as u32), state.len.saturating_sub(state.credit));
        }
    }
}
