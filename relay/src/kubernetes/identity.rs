//! Workers and clients with an identity: a projected ServiceAccount token instead of a shared secret or an API key.
//!
//! The cluster's API server verifies a token and its account (TokenReview, with the relay's audience for workers or the
//! one for clients); the provider's list decides which accounts may connect, the list of tenants which ones are
//! clients. Rules:
//!
//! - **Made-up tokens cost the API server next to nothing.** Only tokens that could be valid are reviewed at all
//!   ([`claims`]), each token once at a time, few in parallel, and results are cached for a while ([`reviews`]).
//!   Addresses that failed often have a narrow lane of their own, so that they delay no other worker.
//! - **An unknown result is not a rejection.** Without the API server no new worker is accepted, and its error is
//!   temporary; connected workers stay.
//! - **A token is reviewed again while its worker is connected** ([`crate::workers::recheck`]): it ends with its Pod
//!   and its account. Its expiry alone ends no link: the kubelet renews it long before, and the worker opens a new link
//!   with the new one. Only if it does not do so for a while, its link is closed.
//! - **A client presents its token with each request**, so that its result is renewed while it is in use, and stays in
//!   effect for a while if the API server is away ([`reviews::CacheRule`]).

pub mod claims;
mod clients;
mod review;
mod reviews;

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use modelrelay_protocol::secret::Secret;
use tokio::sync::{Semaphore, watch};
use tracing::{info, warn};

use crate::kubernetes::api::ClusterApi;
use claims::Claims;
use reviews::{CacheRule, Found, Reviews};

/// Reviews in parallel.
const AT_ONCE: usize = 8;
/// Tokens that may wait for their review: more than those of a large fleet that dials in one instant, a few seconds'
/// worth.
const WAITING: usize = 1024;
/// The same for addresses that failed often. A pause follows each of their reviews.
const SUSPECTS_WAITING: usize = 16;
const SUSPECTS_PAUSE: Duration = Duration::from_millis(100);
/// The timeout of waiting and review together: less than a worker's timeout of a handshake.
const PATIENCE: Duration = Duration::from_secs(8);
/// Review intervals after which a link with an expired token is closed, if no new token came.
const GRACE_INTERVALS: u32 = 3;

/// The name of a ServiceAccount, as `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

/// The identity of a connected worker, and its token.
#[derive(Debug)]
pub struct Identity {
    /// The account.
    pub account: ServiceAccount,
    token: Secret,
    expires: SystemTime,
    token_status: Mutex<TokenStatus>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenStatus {
    Good,
    /// Rejected once, before its expiry.
    Doubted,
    /// Seen as expired at this time, without a new token since.
    Late(Instant),
    Refused,
}

/// Why a token was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// The token is invalid. The message may be sent to the peer that presented it.
    Refused(String),
    /// The result is not known now.
    Unknown(String),
}

/// The result of a review.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TokenReviewOutcome {
    Genuine(ServiceAccount),
    Refused,
}

/// The peers whose tokens are reviewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenHolder {
    /// Workers.
    Worker,
    /// Clients.
    Client,
}

/// Identifies the accounts of tokens.
#[derive(Debug)]
pub struct Identities {
    api: Option<ClusterApi>,
    holder: TokenHolder,
    audience: String,
    pub(crate) recheck: Duration,
    /// Held for a lookup, never across an await.
    reviews: Mutex<Reviews>,
    usual: ReviewLane,
    suspects: ReviewLane,
    error: Mutex<Option<String>>,
}

/// A bound on running reviews, and on those that wait for them.
#[derive(Debug)]
struct ReviewLane {
    running: Semaphore,
    room: Semaphore,
    pause: Duration,
}

impl FromStr for ServiceAccount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || "NAMESPACE/NAME of a ServiceAccount, such as llm/gpu-workers".to_owned();
        let (namespace, name) = text.split_once('/').ok_or_else(allowed)?;
        if is_namespace(namespace) && is_account_name(name) {
            Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
        } else {
            Err(allowed())
        }
    }
}

/// True if a namespace may have this name.
pub fn is_namespace(text: &str) -> bool {
    is_name(text, 63, b"-")
}

/// True if a ServiceAccount may have this name.
pub fn is_account_name(text: &str) -> bool {
    is_name(text, 253, b"-.")
}

fn is_name(text: &str, longest: usize, inner: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.len() <= longest
        && bytes.first().is_some_and(plain)
        && bytes.last().is_some_and(plain)
        && bytes.iter().all(|byte| plain(byte) || inner.contains(byte))
}

impl ServiceAccount {
    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name in the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The account of an API server's user name, if it belongs to an account.
    fn of_user(user: &str) -> Option<Self> {
        let (namespace, name) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        format!("{namespace}/{name}").parse().ok()
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Identity {
    fn new(account: ServiceAccount, token: Secret, expires: SystemTime) -> Arc<Self> {
        Arc::new(Self { account, token, expires, token_status: Mutex::new(TokenStatus::Good) })
    }

    /// True if the worker has to disconnect, regardless of the provider's list.
    pub fn is_refused(&self) -> bool {
        *self.token_status() == TokenStatus::Refused
    }

    /// True if its token has merely expired, and was not revoked.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        self.expires <= now
    }

    /// Handles a review that accepted the token; previous results have no effect any more.
    fn handle_good(&self) {
        *self.token_status() = TokenStatus::Good;
    }

    /// Handles a review that rejected the token. Before the expiry, this means that the Pod or the account is gone, if
    /// the next review rejects it too: an API server that fails to look an account up for a moment gives the same
    /// result. After the expiry, the worker should have connected with another token. It has `grace` to do so from the
    /// time at which the relay first sees it, not from the expiry: while the API server was away, no worker could get a
    /// new one.
    fn handle_refused(&self, now: Instant, wall: SystemTime, grace: Duration) {
        let mut token_status = self.token_status();
        *token_status = match *token_status {
            TokenStatus::Good | TokenStatus::Doubted if self.has_expired(wall) => TokenStatus::Late(now),
            TokenStatus::Late(since) if now.saturating_duration_since(since) < grace => TokenStatus::Late(since),
            TokenStatus::Good => TokenStatus::Doubted,
            TokenStatus::Doubted | TokenStatus::Late(_) | TokenStatus::Refused => TokenStatus::Refused,
        };
    }

    fn token_status(&self) -> MutexGuard<'_, TokenStatus> {
        lock(&self.token_status)
    }
}

impl Identities {
    /// Creates the verifier. Without an `api` no token is valid; the configuration ensures that none is needed.
    pub fn new(api: Option<ClusterApi>, holder: TokenHolder, audience: &str, recheck: Duration) -> Arc<Self> {
        let rule = match holder {
            TokenHolder::Worker => CacheRule::WORKERS,
            TokenHolder::Client => CacheRule::CLIENTS,
        };
        Arc::new(Self {
            api,
            holder,
            audience: audience.to_owned(),
            recheck,
            reviews: Mutex::new(Reviews::new(rule)),
            usual: ReviewLane::new(AT_ONCE, WAITING, Duration::ZERO),
            suspects: ReviewLane::new(1, SUSPECTS_WAITING, SUSPECTS_PAUSE),
            error: Mutex::new(None),
        })
    }

    /// Identifies the account of this token. It is reviewed only if it could belong to an account that is `listed`
    /// anywhere, so that the response to a made-up one does not reveal which providers exist. A `suspect` is an address
    /// that failed often.
    pub async fn identify(
        self: &Arc<Self>,
        token: &str,
        listed: impl Fn(&ServiceAccount) -> bool,
        suspect: bool,
    ) -> Result<Arc<Identity>, Denial> {
        let claims = Claims::read(token, &self.audience, SystemTime::now())
            .map_err(|why| Denial::Refused(why.description(&self.audience)))?;
        if !listed(&claims.account) {
            return Err(Denial::Refused("worker authentication failed".to_owned()));
        }
        let token = Secret::new(token);
        match self.review_outcome(&token, &claims, suspect).await?.0 {
            TokenReviewOutcome::Genuine(account) => Ok(Identity::new(account, token, claims.expires)),
            TokenReviewOutcome::Refused => Err(Denial::Refused("worker authentication failed".to_owned())),
        }
    }

    /// Why tokens could not be reviewed in the last attempt.
    pub fn error(&self) -> Option<String> {
        lock(&self.error).clone()
    }

    /// Returns the known result and false, or true and the result of a review that was waited for, alone or with
    /// others.
    async fn review_outcome(
        self: &Arc<Self>,
        token: &Secret,
        claims: &Claims,
        suspect: bool,
    ) -> Result<(TokenReviewOutcome, bool), Denial> {
        let found = lock(&self.reviews).find(token.digest(), Instant::now());
        // In a task of its own, so that a peer that disconnects does not cancel the review for the others.
        let review = |sender: watch::Sender<_>| {
            let (identities, token, expires) = (Arc::clone(self), token.clone(), claims.expires);
            tokio::spawn(async move { identities.review_for_all(token, expires, suspect, sender).await });
        };
        let mut answer = match found {
            Found::Known(verdict) => return Ok((verdict, false)),
            Found::Due(verdict, sender) => {
                review(sender);
                return Ok((verdict, false));
            }
            Found::Pending(answer) => answer,
            Found::Nothing(sender) => {
                let answer = sender.subscribe();
                review(sender);
                answer
            }
        };
        let verdict = match answer.wait_for(Option::is_some).await {
            Ok(answer) => answer.clone().unwrap_or_else(|| Err(unknown())),
            Err(_) => Err(unknown()),
        };
        verdict.map(|verdict| (verdict, true))
    }

    async fn review_for_all(
        &self,
        token: Secret,
        expires: SystemTime,
        suspect: bool,
        answer: watch::Sender<Option<Result<TokenReviewOutcome, Denial>>>,
    ) {
        let lane = if suspect { &self.suspects } else { &self.usual };
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let verdict = lane.run(deadline, self.review(&token, deadline)).await;
        let (now, wall) = (Instant::now(), SystemTime::now());
        let in_effect = lock(&self.reviews).settle(token.digest(), verdict.as_ref().ok(), expires, now, wall);
        answer.send_replace(Some(in_effect.map_or(verdict, Ok)));
    }

    /// Reviews the token of a connected worker again; false if this failed.
    pub(crate) async fn review_again(&self, identity: &Identity) -> bool {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let (now, wall) = (Instant::now(), SystemTime::now());
        let Ok(verdict) = self.review(&identity.token, deadline).await else { return false };
        lock(&self.reviews).settle(identity.token.digest(), Some(&verdict), identity.expires, now, wall);
        match verdict {
            TokenReviewOutcome::Genuine(account) if account == identity.account => identity.handle_good(),
            TokenReviewOutcome::Genuine(_) | TokenReviewOutcome::Refused => {
                identity.handle_refused(now, wall, self.recheck * GRACE_INTERVALS);
            }
        }
        true
    }

    async fn review(&self, token: &Secret, deadline: tokio::time::Instant) -> Result<TokenReviewOutcome, Denial> {
        let Some(api) = &self.api else { return Ok(TokenReviewOutcome::Refused) };
        let verdict = review::review(api, token, &self.audience, deadline).await;
        self.note(verdict.as_ref().err());
        verdict.map_err(|_| unknown())
    }

    /// Logs an error as a warning once, until it changes.
    fn note(&self, error: Option<&String>) {
        let before = std::mem::replace(&mut *lock(&self.error), error.cloned());
        let (failed, works_again) = match self.holder {
            TokenHolder::Worker => {
                ("cannot review worker tokens; connected workers stay connected", "worker token reviews work again")
            }
            TokenHolder::Client => (
                "cannot review client tokens; those reviewed in the last ten minutes are accepted",
                "client token reviews work again",
            ),
        };
        match error {
            Some(error) if before.as_ref() != Some(error) => warn!(error, "{failed}"),
            None if before.is_some() => info!("{works_again}"),
            Some(_) | None => {}
        }
    }
}

impl ReviewLane {
    fn new(at_once: usize, waiting: usize, pause: Duration) -> Self {
        Self { running: Semaphore::new(at_once), room: Semaphore::new(waiting), pause }
    }

    async fn run(
        &self,
        deadline: tokio::time::Instant,
        review: impl Future<Output = Result<TokenReviewOutcome, Denial>>,
    ) -> Result<TokenReviewOutcome, Denial> {
        let Ok(_room) = self.room.try_acquire() else { return Err(unknown()) };
        let Ok(Ok(_turn)) = tokio::time::timeout_at(deadline, self.running.acquire()).await else {
            return Err(unknown());
        };
        let verdict = review.await;
        if !self.pause.is_zero() {
            tokio::time::sleep(self.pause).await;
        }
        verdict
    }
}

fn unknown() -> Denial {
    Denial::Unknown("cannot review the token with the cluster now; try again".to_owned())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(360);

    #[test]
    fn account_is_namespace_and_name() {
        for text in ["llm/gpu-workers", "a/b.c-d", "0/1"] {
            assert_eq!(text.parse::<ServiceAccount>().map(|account| account.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "llm", "llm/", "/x", "a.b/c", "A/b", "a/b/c", "a/b:c", "a/-b", "a/b c", "*/*"] {
            assert!(text.parse::<ServiceAccount>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_service_account_users_have_account() {
        let account = |user: &str| ServiceAccount::of_user(user).map(|account| account.to_string());
        assert_eq!(account("system:serviceaccount:llm:gpu").as_deref(), Some("llm/gpu"));
        for user in ["admin", "system:node:n", "system:serviceaccount:llm", "system:serviceaccount:llm:a:b", "llm:gpu"]
        {
            assert_eq!(account(user), None, "{user}");
        }
    }

    fn identity(expires: SystemTime) -> Arc<Identity> {
        Identity::new("llm/gpu".parse().expect("an account"), Secret::new("token"), expires)
    }

    #[test]
    fn second_consecutive_refusal_of_unexpired_token_ends_link() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let identity = identity(wall + Duration::from_secs(1));
        identity.handle_refused(now, wall, GRACE);
        assert!(!identity.is_refused(), "an API server in trouble returns the same");
        identity.handle_good();
        identity.handle_refused(now, wall, GRACE);
        assert!(!identity.is_refused());
        identity.handle_refused(now, wall, GRACE);
        assert!(identity.is_refused() && !identity.has_expired(wall));
    }

    #[test]
    fn token_expiring_after_refusal_gets_grace() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let identity = identity(wall + Duration::from_secs(1));
        identity.handle_refused(now, wall, GRACE);
        let (later, wall) = (now + GRACE, wall + GRACE);
        identity.handle_refused(later, wall, GRACE);
        assert!(!identity.is_refused());
        identity.handle_refused(later + GRACE, wall + GRACE, GRACE);
        assert!(identity.is_refused() && identity.has_expired(wall));
    }

    #[test]
    fn expired_token_ends_link_after_grace() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let identity = identity(wall);
        // It expired long ago, while the API server could not be reached.
        let (now, wall) = (now + 100 * GRACE, wall + 100 * GRACE);
        identity.handle_refused(now, wall, GRACE);
        assert!(!identity.is_refused());
        identity.handle_refused(now + GRACE - Duration::from_millis(1), wall + GRACE, GRACE);
        assert!(!identity.is_refused());
        identity.handle_refused(now + GRACE, wall + GRACE, GRACE);
        assert!(identity.is_refused() && identity.has_expired(wall));
    }

    #[test]
    fn good_review_resets_grace() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let identity = identity(wall);
        identity.handle_refused(now, wall, GRACE);
        identity.handle_good();
        identity.handle_refused(now + GRACE, wall + GRACE, GRACE);
        assert!(!identity.is_refused());
    }

    #[test]
    fn token_is_never_printed() {
        let shown = format!("{:?}", identity(SystemTime::now()));
        assert!(shown.contains("gpu") && !shown.contains("\"token\""), "{shown}");
    }
}
