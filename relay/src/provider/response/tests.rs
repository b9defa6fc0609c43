use super::*;

pub(super) fn response() -> Arc<ResponsePipe> {
    let response = ResponsePipe::new(Budget::new(1 << 20), 1_000, 100);
    response.begin(1, None);
    response
}

pub(super) fn head(content_length: Option<u64>) -> Head {
    Head { status: StatusCode::OK, headers: HeaderMap::new(), content_length }
}

pub(super) fn all(response: &ResponsePipe) -> (Vec<u8>, Option<Result<(), ApiError>>) {
    let cx = Context::from_waker(Waker::noop());
    let mut bytes = Vec::new();
    loop {
        match response.poll_chunk(&cx) {
            Poll::Ready(Some(Ok(chunk))) => bytes.extend_from_slice(&chunk),
            Poll::Ready(Some(Err(error))) => return (bytes, Some(Err(error))),
            Poll::Ready(None) => return (bytes, Some(Ok(()))),
            Poll::Pending => return (bytes, None),
        }
    }
}

#[test]
fn bytes_keep_their_order() {
    let response = response();
    response.push_head(1, head(None)).unwrap();
    for piece in ["a", "bc", "", "def"] {
        response.push_piece(1, Bytes::from_static(piece.as_bytes())).unwrap();
    }
    response.finish(1).unwrap();
    assert_eq!(all(&response), (b"abcdef".to_vec(), Some(Ok(()))));
}

#[test]
fn standstill_names_awaited_party() {
    let (response, minute) = (response(), Duration::from_secs(60));
    let party = |response: &ResponsePipe| response.standstill(Instant::now() + minute).map(|still| still.party);
    assert_eq!(party(&response), Some(Party::Worker));
    response.push_head(1, head(None)).unwrap();
    response.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(party(&response), Some(Party::Client));
    let _ = all(&response);
    assert_eq!(party(&response), Some(Party::Worker));
    response.finish(1).unwrap();
    assert_eq!(party(&response), None);
}

#[test]
fn standstill_restarts_with_each_movement() {
    let response = response();
    let still = || response.standstill(Instant::now()).unwrap().time;
    let long = |time: Duration| response.lock().moved_at = Instant::now().checked_sub(time);
    let minute = Duration::from_secs(60);
    long(minute);
    assert!(still() >= minute);
    response.push_head(1, head(None)).unwrap();
    assert!(still() < minute);
    long(minute);
    response.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert!(still() < minute);
    long(minute);
    let _ = all(&response);
    assert!(still() < minute);
    response.detach(2);
    long(minute);
    response.begin(3, None);
    assert!(still() < minute);
}

#[test]
fn requeued_request_has_no_standstill() {
    let response = response();
    assert_eq!(response.detach(1), Detached::Unbegun);
    assert_eq!(response.standstill(Instant::now() + Duration::from_secs(60)), None);
}

#[test]
fn tiny_pieces_are_coalesced_in_backlog() {
    let response = ResponsePipe::new(Budget::new(1 << 20), 1 << 20, 1 << 20);
    response.begin(1, None);
    response.push_head(1, head(None)).unwrap();
    let pieces: Vec<Bytes> = (0..500_u16).map(|number| number.to_be_bytes().repeat(100).into()).collect();
    for piece in &pieces {
        response.push_piece(1, piece.clone()).unwrap();
    }
    let held: usize = {
        let state = response.lock();
        assert!(state.chunks.len() < 10, "{} blocks", state.chunks.len());
        assert!(state.chunks.iter().all(|block| block.len() <= COALESCE_BYTES));
        state.chunks.iter().map(Bytes::len).sum::<usize>() + state.tail.capacity()
    };
    assert!(held <= 100_000 + COALESCE_BYTES, "{held} bytes for 100,000");
    assert_eq!(all(&response), (pieces.concat(), None));
}

#[test]
fn stale_attempt_cannot_push() {
    let response = response();
    assert_eq!(response.detach(1), Detached::Unbegun);
    assert_eq!(response.push_head(1, head(None)), Err(PushError::Stale));
    response.begin(2, None);
    assert_eq!(response.detach(1), Detached::Unbegun, "the older attempt's end leaves the newer one alone");
    assert_eq!(response.push_head(1, head(None)), Err(PushError::Stale));
    assert_eq!(response.push_head(2, head(None)), Ok(()));
    assert_eq!(response.push_piece(1, Bytes::from_static(b"x")), Err(PushError::Stale));
    assert_eq!(all(&response), (vec![], None));
}

#[test]
fn begun_response_survives_detach() {
    let response = response();
    response.push_head(1, head(None)).unwrap();
    assert_eq!(response.detach(1), Detached::Begun);
    response.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(all(&response), (b"abc".to_vec(), None));
}

#[test]
fn last_bytes_of_announced_length_wait_for_end() {
    let response = response();
    response.push_head(1, head(Some(2))).unwrap();
    let cx = Context::from_waker(Waker::noop());
    assert!(response.poll_head(&cx).is_ready());
    response.push_piece(1, Bytes::from_static(b"a")).unwrap();
    assert_eq!(all(&response), (b"a".to_vec(), None));
    response.push_piece(1, Bytes::from_static(b"b")).unwrap();
    assert_eq!(all(&response), (vec![], None));
    response.finish(1).unwrap();
    assert_eq!(all(&response), (b"b".to_vec(), Some(Ok(()))));
}

#[test]
fn head_of_empty_response_waits_for_end() {
    let response = response();
    response.push_head(1, head(Some(0))).unwrap();
    let cx = Context::from_waker(Waker::noop());
    assert!(response.poll_head(&cx).is_pending());
    response.finish(1).unwrap();
    assert!(matches!(response.poll_head(&cx), Poll::Ready(Ok(_))));
}

#[test]
fn body_must_match_announced_length() {
    let long = response();
    long.push_head(1, head(Some(2))).unwrap();
    assert!(matches!(long.push_piece(1, Bytes::from_static(b"abc")), Err(PushError::Broken(_))));
    let short = response();
    short.push_head(1, head(Some(2))).unwrap();
    short.push_piece(1, Bytes::from_static(b"a")).unwrap();
    assert!(matches!(short.finish(1), Err(PushError::Broken(_))));
}

#[test]
fn stream_limit_and_unread_backlog_are_enforced() {
    let response = response();
    response.push_head(1, head(None)).unwrap();
    response.push_uncredited(1, Bytes::from(vec![0; 90])).unwrap();
    assert_eq!(response.push_uncredited(1, Bytes::from(vec![0; 11])), Err(PushError::SlowClient));
    assert_eq!(response.push_whole(1, Bytes::from(vec![0; 911])), Err(PushError::StreamLimit));
}

#[test]
fn first_error_follows_earlier_bytes() {
    let response = response();
    response.push_head(1, head(None)).unwrap();
    response.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    let lost = ApiError::new(ErrorKind::WorkerLost, "gone");
    response.fail(lost.clone());
    response.fail(ApiError::new(ErrorKind::RequestTimeout, "late"));
    assert_eq!(all(&response), (b"abc".to_vec(), Some(Err(lost))));
}

#[test]
fn unread_bytes_are_returned_when_client_disconnects() {
    let response = response();
    response.push_head(1, head(None)).unwrap();
    response.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(response.budget.unread(), 3);
    response.close();
    assert_eq!(response.budget.unread(), 0);
    assert_eq!(response.push_piece(1, Bytes::from_static(b"abc")), Err(PushError::Stale));
}

#[test]
fn response_that_does_not_fit_fails_alone() {
    let budget = Budget::new(64 << 10);
    let [waiting, passing] = [1, 2].map(|_| ResponsePipe::new(Arc::clone(&budget), 1 << 20, 1 << 20));
    for response in [&waiting, &passing] {
        response.begin(1, None);
        response.push_head(1, head(None)).unwrap();
    }
    let piece = Bytes::from(vec![b'x'; 8 << 10]);
    (0..7).for_each(|_| waiting.push_piece(1, piece.clone()).unwrap());
    assert_eq!(waiting.push_piece(1, piece.clone()), Err(PushError::NoMemory));
    for _ in 0..20 {
        passing.push_piece(1, piece.clone()).unwrap();
        assert_eq!(all(&passing).0.len(), 8 << 10);
    }
    drop(waiting);
    assert_eq!(budget.used(), 0);
}

#[test]
fn head_stays_in_budget_until_response_ends() {
    let budget = Budget::new(64 << 10);
    let response = ResponsePipe::new(Arc::clone(&budget), 1_000, 100);
    response.begin(1, None);
    let large = |bytes: usize| {
        let headers = HeaderMap::from_iter([(http::header::ETAG, "x".repeat(bytes).parse().unwrap())]);
        Head { headers, ..head(None) }
    };
    assert_eq!(response.push_head(1, large(60 << 10)), Err(PushError::NoMemory));
    response.push_head(1, large(40 << 10)).unwrap();
    assert!(matches!(response.poll_head(&Context::from_waker(Waker::noop())), Poll::Ready(Ok(_))));
    assert!(budget.used() > 40 << 10);
    response.close();
    assert_eq!(budget.used(), 0);
}

#[test]
fn whole_response_stays_in_budget_until_written() {
    let budget = Budget::new(1 << 20);
    let response = ResponsePipe::new(Arc::clone(&budget), 1 << 20, 100);
    response.begin(1, None);
    response.push_head(1, head(None)).unwrap();
    response.push_whole(1, vec![b'x'; 500_000].into()).unwrap();
    let Poll::Ready(Some(Ok(chunk))) = response.poll_chunk(&Context::from_waker(Waker::noop())) else {
        panic!("nothing came");
    };
    drop(response);
    assert_eq!((budget.used(), budget.unread()), (500_000, 0));
    drop(chunk);
    assert_eq!(budget.used(), 0);
}
