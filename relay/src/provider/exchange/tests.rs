use super::*;

pub(super) fn exchange() -> Arc<Exchange> {
    let exchange = Exchange::new(Budget::new(1 << 20), 1_000, 100);
    exchange.begin(1, None);
    exchange
}

pub(super) fn head(content_length: Option<u64>) -> Head {
    Head { status: StatusCode::OK, headers: HeaderMap::new(), content_length }
}

pub(super) fn all(exchange: &Exchange) -> (Vec<u8>, Option<Result<(), ApiError>>) {
    let cx = Context::from_waker(Waker::noop());
    let mut bytes = Vec::new();
    loop {
        match exchange.poll_chunk(&cx) {
            Poll::Ready(Some(Ok(chunk))) => bytes.extend_from_slice(&chunk),
            Poll::Ready(Some(Err(error))) => return (bytes, Some(Err(error))),
            Poll::Ready(None) => return (bytes, Some(Ok(()))),
            Poll::Pending => return (bytes, None),
        }
    }
}

#[test]
fn bytes_keep_their_order() {
    let exchange = exchange();
    exchange.push_head(1, head(None)).unwrap();
    for piece in ["a", "bc", "", "def"] {
        exchange.push_piece(1, Bytes::from_static(piece.as_bytes())).unwrap();
    }
    exchange.finish(1).unwrap();
    assert_eq!(all(&exchange), (b"abcdef".to_vec(), Some(Ok(()))));
}

#[test]
fn standstill_names_awaited_party() {
    let (exchange, minute) = (exchange(), Duration::from_secs(60));
    let party = |exchange: &Exchange| exchange.standstill(Instant::now() + minute).map(|still| still.party);
    assert_eq!(party(&exchange), Some(Party::Worker));
    exchange.push_head(1, head(None)).unwrap();
    exchange.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(party(&exchange), Some(Party::Client));
    let _ = all(&exchange);
    assert_eq!(party(&exchange), Some(Party::Worker));
    exchange.finish(1).unwrap();
    assert_eq!(party(&exchange), None);
}

#[test]
fn standstill_restarts_with_each_movement() {
    let exchange = exchange();
    let still = || exchange.standstill(Instant::now()).unwrap().time;
    let long = |time: Duration| exchange.lock().moved_at = Instant::now().checked_sub(time);
    let minute = Duration::from_secs(60);
    long(minute);
    assert!(still() >= minute);
    exchange.push_head(1, head(None)).unwrap();
    assert!(still() < minute);
    long(minute);
    exchange.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert!(still() < minute);
    long(minute);
    let _ = all(&exchange);
    assert!(still() < minute);
    exchange.detach(2);
    long(minute);
    exchange.begin(3, None);
    assert!(still() < minute);
}

#[test]
fn requeued_request_has_no_standstill() {
    let exchange = exchange();
    assert_eq!(exchange.detach(1), Detached::Unbegun);
    assert_eq!(exchange.standstill(Instant::now() + Duration::from_secs(60)), None);
}

#[test]
fn tiny_pieces_are_coalesced_in_backlog() {
    let exchange = Exchange::new(Budget::new(1 << 20), 1 << 20, 1 << 20);
    exchange.begin(1, None);
    exchange.push_head(1, head(None)).unwrap();
    let pieces: Vec<Bytes> = (0..500_u16).map(|number| number.to_be_bytes().repeat(100).into()).collect();
    for piece in &pieces {
        exchange.push_piece(1, piece.clone()).unwrap();
    }
    let held: usize = {
        let state = exchange.lock();
        assert!(state.chunks.len() < 10, "{} blocks", state.chunks.len());
        assert!(state.chunks.iter().all(|block| block.len() <= COALESCE_BYTES));
        state.chunks.iter().map(Bytes::len).sum::<usize>() + state.tail.capacity()
    };
    assert!(held <= 100_000 + COALESCE_BYTES, "{held} bytes for 100,000");
    assert_eq!(all(&exchange), (pieces.concat(), None));
}

#[test]
fn stale_attempt_cannot_push() {
    let exchange = exchange();
    assert_eq!(exchange.detach(1), Detached::Unbegun);
    assert_eq!(exchange.push_head(1, head(None)), Err(PushError::Stale));
    exchange.begin(2, None);
    assert_eq!(exchange.detach(1), Detached::Unbegun, "the older attempt's end leaves the newer one alone");
    assert_eq!(exchange.push_head(1, head(None)), Err(PushError::Stale));
    assert_eq!(exchange.push_head(2, head(None)), Ok(()));
    assert_eq!(exchange.push_piece(1, Bytes::from_static(b"x")), Err(PushError::Stale));
    assert_eq!(all(&exchange), (vec![], None));
}

#[test]
fn begun_response_survives_detach() {
    let exchange = exchange();
    exchange.push_head(1, head(None)).unwrap();
    assert_eq!(exchange.detach(1), Detached::Begun);
    exchange.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(all(&exchange), (b"abc".to_vec(), None));
}

#[test]
fn last_bytes_of_announced_length_wait_for_end() {
    let exchange = exchange();
    exchange.push_head(1, head(Some(2))).unwrap();
    let cx = Context::from_waker(Waker::noop());
    assert!(exchange.poll_head(&cx).is_ready());
    exchange.push_piece(1, Bytes::from_static(b"a")).unwrap();
    assert_eq!(all(&exchange), (b"a".to_vec(), None));
    exchange.push_piece(1, Bytes::from_static(b"b")).unwrap();
    assert_eq!(all(&exchange), (vec![], None));
    exchange.finish(1).unwrap();
    assert_eq!(all(&exchange), (b"b".to_vec(), Some(Ok(()))));
}

#[test]
fn head_of_empty_response_waits_for_end() {
    let exchange = exchange();
    exchange.push_head(1, head(Some(0))).unwrap();
    let cx = Context::from_waker(Waker::noop());
    assert!(exchange.poll_head(&cx).is_pending());
    exchange.finish(1).unwrap();
    assert!(matches!(exchange.poll_head(&cx), Poll::Ready(Ok(_))));
}

#[test]
fn body_must_match_announced_length() {
    let long = exchange();
    long.push_head(1, head(Some(2))).unwrap();
    assert!(matches!(long.push_piece(1, Bytes::from_static(b"abc")), Err(PushError::Broken(_))));
    let short = exchange();
    short.push_head(1, head(Some(2))).unwrap();
    short.push_piece(1, Bytes::from_static(b"a")).unwrap();
    assert!(matches!(short.finish(1), Err(PushError::Broken(_))));
}

#[test]
fn stream_limit_and_unread_backlog_are_enforced() {
    let exchange = exchange();
    exchange.push_head(1, head(None)).unwrap();
    exchange.push_uncredited(1, Bytes::from(vec![0; 90])).unwrap();
    assert_eq!(exchange.push_uncredited(1, Bytes::from(vec![0; 11])), Err(PushError::SlowClient));
    assert_eq!(exchange.push_whole(1, Bytes::from(vec![0; 911])), Err(PushError::StreamLimit));
}

#[test]
fn first_error_follows_earlier_bytes() {
    let exchange = exchange();
    exchange.push_head(1, head(None)).unwrap();
    exchange.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    let lost = ApiError::new(ErrorKind::WorkerLost, "gone");
    exchange.fail(lost.clone());
    exchange.fail(ApiError::new(ErrorKind::RequestTimeout, "late"));
    assert_eq!(all(&exchange), (b"abc".to_vec(), Some(Err(lost))));
}

#[test]
fn unread_bytes_are_returned_when_client_disconnects() {
    let exchange = exchange();
    exchange.push_head(1, head(None)).unwrap();
    exchange.push_piece(1, Bytes::from_static(b"abc")).unwrap();
    assert_eq!(exchange.budget.unread(), 3);
    exchange.close();
    assert_eq!(exchange.budget.unread(), 0);
    assert_eq!(exchange.push_piece(1, Bytes::from_static(b"abc")), Err(PushError::Stale));
}

#[test]
fn response_that_does_not_fit_fails_alone() {
    let budget = Budget::new(64 << 10);
    let [waiting, passing] = [1, 2].map(|_| Exchange::new(Arc::clone(&budget), 1 << 20, 1 << 20));
    for exchange in [&waiting, &passing] {
        exchange.begin(1, None);
        exchange.push_head(1, head(None)).unwrap();
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
fn head_stays_in_budget_until_exchange_ends() {
    let budget = Budget::new(64 << 10);
    let exchange = Exchange::new(Arc::clone(&budget), 1_000, 100);
    exchange.begin(1, None);
    let large = |bytes: usize| {
        let headers = HeaderMap::from_iter([(http::header::ETAG, "x".repeat(bytes).parse().unwrap())]);
        Head { headers, ..head(None) }
    };
    assert_eq!(exchange.push_head(1, large(60 << 10)), Err(PushError::NoMemory));
    exchange.push_head(1, large(40 << 10)).unwrap();
    assert!(matches!(exchange.poll_head(&Context::from_waker(Waker::noop())), Poll::Ready(Ok(_))));
    assert!(budget.used() > 40 << 10);
    exchange.close();
    assert_eq!(budget.used(), 0);
}

#[test]
fn whole_response_stays_in_budget_until_written() {
    let budget = Budget::new(1 << 20);
    let exchange = Exchange::new(Arc::clone(&budget), 1 << 20, 100);
    exchange.begin(1, None);
    exchange.push_head(1, head(None)).unwrap();
    exchange.push_whole(1, vec![b'x'; 500_000].into()).unwrap();
    let Poll::Ready(Some(Ok(chunk))) = exchange.poll_chunk(&Context::from_waker(Waker::noop())) else {
        panic!("nothing came");
    };
    drop(exchange);
    assert_eq!((budget.used(), budget.unread()), (500_000, 0));
    drop(chunk);
    assert_eq!(budget.used(), 0);
}
