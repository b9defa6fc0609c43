//! The cached results of tokens, by their SHA-256, and the pending reviews. Time is injected.
//!
//! A valid token is cached for a minute at most, so that a fleet that returns all at once is no flood, and no longer
//! than its own expiry. An invalid one is cached for a few seconds, because its worker tries it again and again. The
//! lanes bound the pending reviews; [`MAX_KNOWN`] bounds the cached results, of which invalid tokens are evicted first.
//!
//! Clients present their token with each request, so for them a [`CacheRule`] adds two things: the token is reviewed
//! again before its result expires, while requests go on with that result; and if the review fails, the last result
//! stays in effect for a while.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::{Denial, TokenReviewOutcome};

/// How long a valid token is cached.
const GOOD_FOR: Duration = Duration::from_secs(60);
/// How long an invalid one is cached.
const BAD_FOR: Duration = Duration::from_secs(5);
/// The pause after a failed review of a token whose last result stays in effect.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// The most cached tokens; some hundred bytes each.
const MAX_KNOWN: usize = 16_384;

type ReviewResult = Option<Result<TokenReviewOutcome, Denial>>;

/// How results of valid tokens are renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CacheRule {
    /// The age from which on a valid token is reviewed again when it is used.
    pub(super) renewed_after: Duration,
    /// The age up to which the last result stays in effect while reviews fail.
    pub(super) kept_for: Duration,
}

/// Results and pending reviews of tokens.
#[derive(Debug)]
pub(super) struct Reviews {
    rule: CacheRule,
    entries: HashMap<[u8; 32], CachedReview>,
}

/// At least one of both is present.
#[derive(Debug, Default)]
struct CachedReview {
    known: Option<KnownResult>,
    pending: Option<watch::Receiver<ReviewResult>>,
}

#[derive(Debug, Clone)]
struct KnownResult {
    verdict: TokenReviewOutcome,
    renew_at: Instant,
    until: Instant,
    /// The end of its effect if reviews fail.
    kept_until: Instant,
}

/// The known state of one token.
#[derive(Debug)]
pub(super) enum Found {
    Known(TokenReviewOutcome),
    /// Known, but the caller has to review it again, and send the result here.
    Due(TokenReviewOutcome, watch::Sender<ReviewResult>),
    /// A review is pending.
    Pending(watch::Receiver<ReviewResult>),
    /// Unknown; the caller has to review it, and send the result here.
    Nothing(watch::Sender<ReviewResult>),
}

impl CacheRule {
    /// For workers, which present a token when they connect. Without the API server, none is admitted.
    pub(super) const WORKERS: Self = Self { renewed_after: GOOD_FOR, kept_for: GOOD_FOR };
    /// For clients.
    pub(super) const CLIENTS: Self =
        Self { renewed_after: Duration::from_secs(30), kept_for: Duration::from_secs(600) };
}

impl Reviews {
    /// Creates an empty cache.
    pub(super) fn new(rule: CacheRule) -> Self {
        Self { rule, entries: HashMap::new() }
    }

    /// Returns the known state. If a review is required, the next callers wait for the result of this one.
    pub(super) fn find(&mut self, digest: &[u8; 32], now: Instant) -> Found {
        let entry = self.entries.entry(*digest).or_default();
        let known = entry.known.as_ref().filter(|known| known.until > now);
        // A task that failed will send no result.
        let pending = entry.pending.as_ref().filter(|answer| answer.has_changed().is_ok());
        match (known, pending) {
            (Some(known), Some(_)) => return Found::Known(known.verdict.clone()),
            (Some(known), None) if known.renew_at > now => return Found::Known(known.verdict.clone()),
            (None, Some(answer)) => return Found::Pending(answer.clone()),
            (Some(_) | None, None) => {}
        }
        let due = known.map(|known| known.verdict.clone());
        let (sender, answer) = watch::channel(None);
        entry.pending = Some(answer);
        match due {
            Some(verdict) => Found::Due(verdict, sender),
            None => Found::Nothing(sender),
        }
    }

    /// Caches a result; `None` is an unknown one, which is not cached. Returns the result that is in effect: after an
    /// unknown one, that may be the previous.
    pub(super) fn settle(
        &mut self,
        digest: &[u8; 32],
        verdict: Option<&TokenReviewOutcome>,
        expires: SystemTime,
        now: Instant,
        wall: SystemTime,
    ) -> Option<TokenReviewOutcome> {
        let previous = self.entries.remove(digest).and_then(|entry| entry.known);
        let known = match verdict {
            Some(verdict) => self.rule.result(verdict.clone(), expires.duration_since(wall).unwrap_or_default(), now),
            None => previous.filter(|previous| previous.kept_until > now)?.retried(now),
        };
        let in_effect = known.verdict.clone();
        if self.make_room(now) {
            self.entries.insert(*digest, CachedReview { known: Some(known), pending: None });
        }
        Some(in_effect)
    }

    fn make_room(&mut self, now: Instant) -> bool {
        if self.entries.len() < MAX_KNOWN {
            return true;
        }
        self.entries.retain(|_, entry| {
            let is_good = |known: &KnownResult| matches!(known.verdict, TokenReviewOutcome::Genuine(_));
            entry.pending.is_some() || entry.known.as_ref().is_some_and(|known| is_good(known) && known.until > now)
        });
        self.entries.len() < MAX_KNOWN
    }
}

impl CacheRule {
    /// A new result of a token that expires after `left`.
    fn result(self, verdict: TokenReviewOutcome, left: Duration, now: Instant) -> KnownResult {
        let (renewed_after, good_for, kept_for) = match verdict {
            TokenReviewOutcome::Genuine(_) => (self.renewed_after, GOOD_FOR.min(left), self.kept_for.min(left)),
            TokenReviewOutcome::Refused => (BAD_FOR, BAD_FOR, BAD_FOR),
        };
        KnownResult { verdict, renew_at: now + renewed_after, until: now + good_for, kept_until: now + kept_for }
    }
}

impl KnownResult {
    /// The same result after a failed review.
    fn retried(self, now: Instant) -> Self {
        let until = self.kept_until.min(now + GOOD_FOR);
        Self { renew_at: now + RETRY_AFTER, until, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn genuine() -> TokenReviewOutcome {
        TokenReviewOutcome::Genuine("llm/gpu".parse().expect("an account"))
    }

    fn digest(number: usize) -> [u8; 32] {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_be_bytes());
        digest
    }

    fn known(found: &Found) -> Option<&TokenReviewOutcome> {
        match found {
            Found::Known(verdict) => Some(verdict),
            Found::Due(..) | Found::Pending(_) | Found::Nothing(_) => None,
        }
    }

    #[test]
    fn good_token_is_cached_at_most_one_minute() {
        for (lifetime, believed) in [(3600, 60), (20, 20)] {
            let (mut reviews, now, wall) = (Reviews::new(CacheRule::WORKERS), Instant::now(), SystemTime::now());
            let expires = wall + Duration::from_secs(lifetime);
            reviews.settle(&digest(1), Some(&genuine()), expires, now, wall);
            let at = |reviews: &mut Reviews, millis| {
                let found = reviews.find(&digest(1), now + Duration::from_millis(millis));
                known(&found).cloned()
            };
            assert_eq!(at(&mut reviews, believed * 1000 - 1), Some(genuine()));
            assert_eq!(at(&mut reviews, believed * 1000), None);
        }
    }

    #[test]
    fn bad_token_is_cached_for_five_seconds() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::WORKERS), Instant::now(), SystemTime::now());
        reviews.settle(&digest(1), Some(&TokenReviewOutcome::Refused), wall + GOOD_FOR, now, wall);
        let found = reviews.find(&digest(1), now + BAD_FOR - Duration::from_millis(1));
        assert_eq!(known(&found), Some(&TokenReviewOutcome::Refused));
        assert!(matches!(reviews.find(&digest(1), now + BAD_FOR), Found::Nothing(_)));
    }

    #[test]
    fn token_has_single_pending_review_retried_on_failure() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::WORKERS), Instant::now(), SystemTime::now());
        let Found::Nothing(sender) = reviews.find(&digest(1), now) else { panic!("it is known") };
        assert!(matches!(reviews.find(&digest(1), now), Found::Pending(_)));
        assert!(matches!(reviews.find(&digest(2), now), Found::Nothing(_)));
        reviews.settle(&digest(1), None, wall, now, wall);
        drop(sender);
        assert!(matches!(reviews.find(&digest(1), now), Found::Nothing(_)));
        // Its task ended without a result.
        assert!(matches!(reviews.find(&digest(1), now), Found::Nothing(_)));
    }

    #[test]
    fn token_cache_is_bounded_and_evicts_bad_first() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::WORKERS), Instant::now(), SystemTime::now());
        let expires = wall + GOOD_FOR;
        reviews.settle(&digest(usize::MAX), Some(&genuine()), expires, now, wall);
        for number in 0..2 * MAX_KNOWN {
            reviews.settle(&digest(number), Some(&TokenReviewOutcome::Refused), expires, now, wall);
            assert!(reviews.entries.len() <= MAX_KNOWN);
        }
        assert_eq!(known(&reviews.find(&digest(usize::MAX), now)), Some(&genuine()));
        for number in 0..MAX_KNOWN + 10 {
            reviews.settle(&digest(number), Some(&genuine()), expires, now, wall);
        }
        assert_eq!(reviews.entries.len(), MAX_KNOWN);
    }

    fn cached(kept: &mut Reviews, now: Instant, millis: u64) -> Found {
        kept.find(&digest(1), now + Duration::from_millis(millis))
    }

    #[test]
    fn used_token_of_client_is_renewed_without_waiting() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::CLIENTS), Instant::now(), SystemTime::now());
        let expires = wall + Duration::from_secs(3600);
        reviews.settle(&digest(1), Some(&genuine()), expires, now, wall);
        assert_eq!(known(&cached(&mut reviews, now, 29_999)), Some(&genuine()));
        let Found::Due(verdict, _sender) = cached(&mut reviews, now, 30_000) else { panic!("it is not due") };
        assert_eq!(verdict, genuine());
        // One review at a time, which others need not wait for until the result has expired.
        assert_eq!(known(&cached(&mut reviews, now, 59_999)), Some(&genuine()));
        assert!(matches!(cached(&mut reviews, now, 60_000), Found::Pending(_)));
        reviews.settle(&digest(1), Some(&TokenReviewOutcome::Refused), expires, now, wall);
        assert_eq!(known(&cached(&mut reviews, now, 1)), Some(&TokenReviewOutcome::Refused));
    }

    #[test]
    fn failed_reviews_keep_client_for_ten_minutes() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::CLIENTS), Instant::now(), SystemTime::now());
        let at = |secs: u64| (now + Duration::from_secs(secs), wall + Duration::from_secs(secs));
        let expires = wall + Duration::from_secs(3600);
        reviews.settle(&digest(1), Some(&genuine()), expires, now, wall);
        for secs in [60, 90, 599] {
            let (now, wall) = at(secs);
            assert_eq!(reviews.settle(&digest(1), None, expires, now, wall), Some(genuine()), "{secs}");
            assert_eq!(known(&reviews.find(&digest(1), now)), Some(&genuine()));
        }
        assert!(matches!(reviews.find(&digest(1), at(600).0), Found::Nothing(_)));
        assert_eq!(reviews.settle(&digest(1), None, expires, at(600).0, at(600).1), None);
    }

    #[test]
    fn unused_token_is_reviewed_soon_after_failure() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::CLIENTS), Instant::now(), SystemTime::now());
        let expires = wall + Duration::from_secs(3600);
        reviews.settle(&digest(1), Some(&genuine()), expires, now, wall);
        reviews.settle(&digest(1), None, expires, now, wall);
        assert_eq!(known(&cached(&mut reviews, now, 4_999)), Some(&genuine()));
        assert!(matches!(cached(&mut reviews, now, 5_000), Found::Due(..)));
        reviews.settle(&digest(1), None, expires, now, wall);
        assert!(matches!(cached(&mut reviews, now, 60_000), Found::Nothing(_)), "it may be revoked since");
    }

    #[test]
    fn kept_result_ends_with_its_token() {
        let (mut reviews, now, wall) = (Reviews::new(CacheRule::CLIENTS), Instant::now(), SystemTime::now());
        let expires = wall + Duration::from_secs(100);
        reviews.settle(&digest(1), Some(&genuine()), expires, now, wall);
        let later = Duration::from_secs(99);
        assert_eq!(reviews.settle(&digest(1), None, expires, now + later, wall + later), Some(genuine()));
        assert!(matches!(cached(&mut reviews, now, 100_000), Found::Nothing(_)));
    }
}
