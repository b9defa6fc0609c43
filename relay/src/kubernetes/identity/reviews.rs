//! The cached results of tokens, by their SHA-256, and the pending reviews. Time is injected.
//!
//! A valid token is cached for a minute at most, so that a fleet that returns all at once is no flood, and no longer than
//! its own expiry. An invalid one is cached for a few seconds, because its worker tries it again and again. The lanes bound
//! the pending reviews; [`MAX_KNOWN`] bounds the cached results, of which invalid tokens are evicted first.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::{Denial, TokenReviewOutcome};

/// How long a valid token is cached.
const GOOD_FOR: Duration = Duration::from_secs(60);
/// How long an invalid one is cached.
const BAD_FOR: Duration = Duration::from_secs(5);
/// The most cached tokens; some hundred bytes each.
const MAX_KNOWN: usize = 16_384;

type ReviewResult = Option<Result<TokenReviewOutcome, Denial>>;

/// Results and pending reviews of tokens.
#[derive(Debug, Default)]
pub(super) struct Reviews(HashMap<[u8; 32], CachedReview>);

#[derive(Debug)]
enum CachedReview {
    Pending(watch::Receiver<ReviewResult>),
    Known { verdict: TokenReviewOutcome, until: Instant },
}

/// The known state of one token.
#[derive(Debug)]
pub(super) enum Found {
    Known(TokenReviewOutcome),
    /// A review is pending.
    Pending(watch::Receiver<ReviewResult>),
    /// Unknown; the caller has to review it, and send the result here.
    Nothing(watch::Sender<ReviewResult>),
}

impl Reviews {
    /// Returns the known state. Without one, the next caller waits for the result of this one.
    pub(super) fn find(&mut self, digest: &[u8; 32], now: Instant) -> Found {
        match self.0.get(digest) {
            Some(CachedReview::Known { verdict, until }) if *until > now => return Found::Known(verdict.clone()),
            // A task that failed will send no result.
            Some(CachedReview::Pending(answer)) if answer.has_changed().is_ok() => {
                return Found::Pending(answer.clone());
            }
            Some(CachedReview::Known { .. } | CachedReview::Pending(_)) | None => {}
        }
        let (sender, answer) = watch::channel(None);
        self.0.insert(*digest, CachedReview::Pending(answer));
        Found::Nothing(sender)
    }

    /// Caches a result; `None` is an unknown one, which is not cached.
    pub(super) fn settle(
        &mut self,
        digest: &[u8; 32],
        verdict: Option<&TokenReviewOutcome>,
        expires: SystemTime,
        now: Instant,
        wall: SystemTime,
    ) {
        self.0.remove(digest);
        let Some(verdict) = verdict else { return };
        let remembered = match verdict {
            TokenReviewOutcome::Genuine(_) => GOOD_FOR.min(expires.duration_since(wall).unwrap_or_default()),
            TokenReviewOutcome::Refused => BAD_FOR,
        };
        if self.make_room(now) {
            self.0.insert(*digest, CachedReview::Known { verdict: verdict.clone(), until: now + remembered });
        }
    }

    fn make_room(&mut self, now: Instant) -> bool {
        if self.0.len() < MAX_KNOWN {
            return true;
        }
        self.0.retain(|_, entry| match entry {
            CachedReview::Pending(_) => true,
            CachedReview::Known { verdict: TokenReviewOutcome::Genuine(_), until } => *until > now,
            CachedReview::Known { verdict: TokenReviewOutcome::Refused, .. } => false,
        });
        self.0.len() < MAX_KNOWN
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
            Found::Pending(_) | Found::Nothing(_) => None,
        }
    }

    #[test]
    fn good_token_is_cached_at_most_one_minute() {
        for (lifetime, believed) in [(3600, 60), (20, 20)] {
            let (mut reviews, now, wall) = (Reviews::default(), Instant::now(), SystemTime::now());
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
        let (mut reviews, now, wall) = (Reviews::default(), Instant::now(), SystemTime::now());
        reviews.settle(&digest(1), Some(&TokenReviewOutcome::Refused), wall + GOOD_FOR, now, wall);
        let found = reviews.find(&digest(1), now + BAD_FOR - Duration::from_millis(1));
        assert_eq!(known(&found), Some(&TokenReviewOutcome::Refused));
        assert!(matches!(reviews.find(&digest(1), now + BAD_FOR), Found::Nothing(_)));
    }

    #[test]
    fn token_has_single_pending_review_retried_on_failure() {
        let (mut reviews, now, wall) = (Reviews::default(), Instant::now(), SystemTime::now());
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
        let (mut reviews, now, wall) = (Reviews::default(), Instant::now(), SystemTime::now());
        let expires = wall + GOOD_FOR;
        reviews.settle(&digest(usize::MAX), Some(&genuine()), expires, now, wall);
        for number in 0..2 * MAX_KNOWN {
            reviews.settle(&digest(number), Some(&TokenReviewOutcome::Refused), expires, now, wall);
            assert!(reviews.0.len() <= MAX_KNOWN);
        }
        assert_eq!(known(&reviews.find(&digest(usize::MAX), now)), Some(&genuine()));
        for number in 0..MAX_KNOWN + 10 {
            reviews.settle(&digest(number), Some(&genuine()), expires, now, wall);
        }
        assert_eq!(reviews.0.len(), MAX_KNOWN);
    }
}
