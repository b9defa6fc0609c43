//! Token limits of a key.
//!
//! `tokens_per_minute` is a bucket of so many tokens, which refills continuously, a sixtieth of the limit per second.
//! `tokens_per_day` applies to a day in UTC.
//!
//! A request is charged an estimate of its input when it is admitted, and at its end what it used instead. Its output
//! is not known before, so it may exceed a limit; further requests are then rejected until a token is free again. The
//! state holds what was used and not what is left, so that a changed limit applies to earlier requests too.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use modelrelay_protocol::rate_limit::{RateLimit, Span};

use super::KeyLimits;

const MINUTE_SECS: f64 = 60.0;
const DAY_SECS: u64 = 86_400;

/// The tokens that requests of a key used, and its limits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenUse {
    minute: Bucket,
    day: DaySum,
}

#[derive(Debug, Clone, PartialEq)]
struct Bucket {
    limit: Option<u64>,
    /// The tokens that are missing from a full bucket, as of `at`.
    used: f64,
    at: SystemTime,
}

#[derive(Debug, Clone, PartialEq)]
struct DaySum {
    limit: Option<u64>,
    /// The number of the day since 1970.
    day: u64,
    /// The tokens of requests that ended on that day.
    used: u64,
    /// The estimates of requests that have not ended.
    running: u64,
    /// True if `used` includes requests before the relay's start.
    is_resumed: bool,
}

/// A key has used up its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the API key's limit of {} tokens per {period} (tokens_per_{period}) is reached; it may use tokens again in {}",
    .rate.limit,
    Span(*.free_in)
)]
pub struct TokenLimit {
    /// `minute` or `day`.
    pub period: &'static str,
    /// The limit.
    pub rate: RateLimit,
    /// The time until a token is free.
    pub free_in: Duration,
}

impl Default for TokenUse {
    fn default() -> Self {
        Self {
            minute: Bucket { limit: None, used: 0.0, at: UNIX_EPOCH },
            day: DaySum { limit: None, day: 0, used: 0, running: 0, is_resumed: false },
        }
    }
}

impl TokenUse {
    /// Applies limits from now on.
    pub(super) fn set_limits(&mut self, limits: &KeyLimits, now: SystemTime) {
        // Until now, the bucket refilled at the previous rate.
        self.advance(now);
        self.minute.set_limit(limits.tokens_per_minute);
        self.day.limit = limits.tokens_per_day;
    }

    /// Adds, once, the tokens that were used on this day before the relay's start.
    pub(super) fn resume(&mut self, now: SystemTime, used_today: impl FnOnce() -> u64) {
        if !self.day.is_resumed {
            self.advance(now);
            self.day.is_resumed = true;
            self.day.used = self.day.used.saturating_add(used_today());
        }
    }

    /// Returns the limit that is reached, if one is. Of two, the one that lasts longer.
    pub(super) fn check(&mut self, now: SystemTime) -> Result<(), TokenLimit> {
        let reached = self.limits(now).filter(|limit| limit.rate.remaining == 0).max_by_key(|limit| limit.free_in);
        reached.map_or(Ok(()), Err)
    }

    /// Charges a request's estimate, unless a limit is reached.
    pub(super) fn charge(&mut self, estimate: u64, now: SystemTime) -> Result<(), TokenLimit> {
        self.check(now)?;
        self.minute.used += estimate as f64;
        self.day.running = self.day.running.saturating_add(estimate);
        Ok(())
    }

    /// Replaces a request's estimate with what it used.
    pub(super) fn settle(&mut self, estimate: u64, used: u64, now: SystemTime) {
        self.advance(now);
        self.minute.used = (self.minute.used + used as f64 - estimate as f64).max(0.0);
        self.day.running = self.day.running.saturating_sub(estimate);
        self.day.used = self.day.used.saturating_add(used);
    }

    /// The limit with fewer free tokens; `None` without limits.
    pub(super) fn tighter(&mut self, now: SystemTime) -> Option<RateLimit> {
        self.limits(now).map(|limit| limit.rate).min_by_key(|rate| (rate.remaining, Reverse(rate.reset)))
    }

    fn limits(&mut self, now: SystemTime) -> impl Iterator<Item = TokenLimit> {
        self.advance(now);
        [self.minute.state(), self.day.state(now)].into_iter().flatten()
    }

    fn advance(&mut self, now: SystemTime) {
        self.minute.refill(now);
        let today = seconds(now) / DAY_SECS;
        if self.day.day != today {
            self.day.day = today;
            self.day.used = 0;
        }
    }
}

impl Bucket {
    /// Use that the previous limit allowed costs at most a minute of a lower one.
    fn set_limit(&mut self, limit: Option<u64>) {
        if let Some(limit) = limit.filter(|limit| self.limit.is_none_or(|before| *limit < before)) {
            self.used = self.used.min(limit as f64);
        }
        self.limit = limit;
    }

    /// Without a limit, older use fades within about a minute, in case a limit is set.
    fn refill(&mut self, now: SystemTime) {
        // A clock that was set back adds nothing.
        let elapsed = now.duration_since(self.at).unwrap_or_default();
        self.at = now;
        let per_minute = self.limit.map_or(self.used, |limit| limit as f64);
        self.used = (self.used - per_minute * elapsed.as_secs_f64() / MINUTE_SECS).max(0.0);
    }

    fn state(&self) -> Option<TokenLimit> {
        let limit = self.limit?;
        let time_of = |tokens: f64| {
            let secs = tokens.max(0.0) * MINUTE_SECS / limit as f64;
            Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX)
        };
        // The last digits of sums are not exact.
        let remaining = (limit as f64 - self.used + 1e-6).max(0.0).floor() as u64;
        let rate = RateLimit { limit, remaining, reset: time_of(self.used) };
        let free_in = time_of(self.used - limit as f64 + 1.0);
        Some(TokenLimit { period: "minute", rate, free_in })
    }
}

impl DaySum {
    fn state(&self, now: SystemTime) -> Option<TokenLimit> {
        let limit = self.limit?;
        let midnight = UNIX_EPOCH + Duration::from_secs((self.day + 1) * DAY_SECS);
        let reset = midnight.duration_since(now).unwrap_or_default();
        let remaining = limit.saturating_sub(self.used.saturating_add(self.running));
        Some(TokenLimit { period: "day", rate: RateLimit { limit, remaining, reset }, free_in: reset })
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noon of a day.
    fn noon() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(20_000 * DAY_SECS + DAY_SECS / 2)
    }

    fn after(millis: u64) -> SystemTime {
        noon() + Duration::from_millis(millis)
    }

    fn limits(tokens_per_minute: Option<u64>, tokens_per_day: Option<u64>) -> KeyLimits {
        KeyLimits { tokens_per_minute, tokens_per_day, ..KeyLimits::default() }
    }

    fn with(tokens_per_minute: Option<u64>, tokens_per_day: Option<u64>) -> TokenUse {
        let mut tokens = TokenUse::default();
        tokens.set_limits(&limits(tokens_per_minute, tokens_per_day), noon());
        tokens
    }

    fn free_in(tokens: &mut TokenUse, now: SystemTime) -> Option<(&'static str, Duration)> {
        tokens.check(now).err().map(|limit| (limit.period, limit.free_in))
    }

    fn remaining(tokens: &mut TokenUse, now: SystemTime) -> u64 {
        tokens.tighter(now).expect("a limit").remaining
    }

    #[test]
    fn bucket_refills_continuously_up_to_limit() {
        let mut tokens = with(Some(600), None);
        tokens.charge(600, noon()).expect("full");
        assert_eq!(free_in(&mut tokens, noon()), Some(("minute", Duration::from_millis(100))));
        assert_eq!(free_in(&mut tokens, after(100)), None);
        assert_eq!(remaining(&mut tokens, after(30_000)), 300);
        let rate = tokens.tighter(after(30_000)).expect("a limit");
        assert_eq!((rate.limit, rate.reset), (600, Duration::from_secs(30)));
        assert_eq!(remaining(&mut tokens, after(600_000)), 600);
    }

    #[test]
    fn many_small_steps_refill_as_one() {
        let mut tokens = with(Some(60), None);
        tokens.charge(60, noon()).expect("full");
        let free = (0..=1000).find(|millis| tokens.check(after(*millis)).is_ok());
        assert_eq!(free, Some(1000));
    }

    #[test]
    fn overdraft_is_paid_back_before_next_request() {
        let mut tokens = with(Some(60), None);
        tokens.charge(10, noon()).expect("full");
        tokens.settle(10, 180, noon());
        assert_eq!(tokens.charge(1, noon()).expect_err("empty").rate.remaining, 0);
        assert_eq!(free_in(&mut tokens, noon()), Some(("minute", Duration::from_secs(121))));
        assert_eq!(free_in(&mut tokens, after(121_000)), None);
    }

    #[test]
    fn refunded_request_leaves_no_trace() {
        let mut tokens = with(Some(100), Some(1000));
        tokens.charge(100, noon()).expect("full");
        assert!(tokens.check(noon()).is_err());
        tokens.settle(100, 0, noon());
        assert_eq!(tokens, with(Some(100), Some(1000)));
        // A bucket that was full again meanwhile does not overflow.
        tokens.charge(100, noon()).expect("full");
        tokens.settle(100, 0, after(90_000));
        assert_eq!(remaining(&mut tokens, after(90_000)), 100);
    }

    #[test]
    fn day_limit_lasts_until_midnight_utc() {
        let mut tokens = with(None, Some(100));
        tokens.charge(30, noon()).expect("full");
        tokens.settle(30, 100, noon());
        let half = Duration::from_secs(DAY_SECS / 2);
        assert_eq!(free_in(&mut tokens, noon()), Some(("day", half)));
        assert_eq!(
            free_in(&mut tokens, noon() + half - Duration::from_millis(1)),
            Some(("day", Duration::from_millis(1)))
        );
        assert_eq!(remaining(&mut tokens, noon() + half), 100);
    }

    #[test]
    fn request_over_midnight_counts_when_it_ends() {
        let mut tokens = with(None, Some(100));
        tokens.charge(30, noon()).expect("full");
        let tomorrow = noon() + Duration::from_secs(DAY_SECS);
        assert_eq!(remaining(&mut tokens, tomorrow), 70);
        tokens.settle(30, 40, tomorrow);
        assert_eq!(remaining(&mut tokens, tomorrow), 60);
    }

    #[test]
    fn earlier_use_of_day_is_added_once() {
        let mut tokens = with(None, Some(100));
        tokens.resume(noon(), || 90);
        tokens.resume(noon(), || 90);
        assert_eq!(remaining(&mut tokens, noon()), 10);
    }

    #[test]
    fn lower_limit_blocks_for_less_than_its_minute() {
        let mut tokens = with(None, None);
        tokens.charge(500_000, noon()).expect("no limit");
        for limit in [10_000, 1_000] {
            tokens.set_limits(&limits(Some(limit), None), noon());
            let (_, free_in) = free_in(&mut tokens, noon()).expect("all is used");
            assert!(free_in <= Duration::from_secs(1), "{free_in:?}");
        }
    }

    #[test]
    fn changed_limits_apply_to_earlier_use() {
        let mut tokens = with(Some(100), Some(100));
        tokens.charge(100, noon()).expect("full");
        tokens.set_limits(&limits(Some(150), Some(1000)), noon());
        assert_eq!(remaining(&mut tokens, noon()), 50);
        tokens.set_limits(&KeyLimits::default(), noon());
        assert_eq!((tokens.tighter(noon()), tokens.check(noon())), (None, Ok(())));
        tokens.set_limits(&limits(Some(80), None), noon());
        assert!(tokens.check(noon()).is_err());
        tokens.set_limits(&limits(None, Some(80)), noon());
        assert!(tokens.check(noon()).is_err());
    }

    #[test]
    fn lower_limit_does_not_undo_refill() {
        let mut tokens = with(Some(6000), None);
        tokens.charge(6000, noon()).expect("full");
        tokens.set_limits(&limits(Some(60), None), after(60_000));
        assert_eq!(remaining(&mut tokens, after(60_000)), 60);
    }

    #[test]
    fn use_without_limit_fades_within_minutes() {
        let mut tokens = with(None, None);
        tokens.charge(1000, noon()).expect("no limit");
        tokens.set_limits(&limits(Some(100), None), after(59_000));
        assert_eq!(remaining(&mut tokens, after(59_000)), 83);
        let mut tokens = with(None, None);
        tokens.charge(1000, noon()).expect("no limit");
        tokens.set_limits(&limits(Some(100), None), after(60_000));
        assert_eq!(remaining(&mut tokens, after(60_000)), 100);
    }

    #[test]
    fn reached_limit_that_lasts_longer_is_named() {
        let mut tokens = with(Some(60), Some(60));
        tokens.charge(60, noon()).expect("full");
        let limit = tokens.check(noon()).expect_err("empty");
        assert_eq!(
            limit.to_string(),
            "the API key's limit of 60 tokens per day (tokens_per_day) is reached; it may use tokens again in 12h0m0s"
        );
    }

    #[test]
    fn clock_that_is_set_back_blocks_nothing() {
        let mut tokens = with(Some(60), None);
        tokens.charge(60, after(3_600_000)).expect("full");
        assert!(tokens.check(noon()).is_err());
        assert!(tokens.check(after(1000)).is_ok());
    }
}
