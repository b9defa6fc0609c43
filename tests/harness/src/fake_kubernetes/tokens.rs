//! The API server's review of ServiceAccounts' tokens, and its failures in tests.

use std::collections::{BTreeMap, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Method;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::answer::{Answer, json_answer};
use super::{FakeKubernetes, Fault, State, Unanswered};

pub(super) const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// An hour from now, the lifetime that projected volumes request.
pub const AN_HOUR: i64 = 3600;

#[derive(Default)]
pub(super) struct Tokens {
    /// The issued tokens that have neither expired nor been revoked, with their account, audience and end.
    good: BTreeMap<String, Made>,
    faults: VecDeque<Fault>,
    made: usize,
    reviewed: Vec<String>,
    /// Acts like an authenticator without audiences.
    is_old: bool,
}

struct Made {
    user: String,
    audience: String,
    expires: u64,
}

/// Holds reviews: while it exists, they get no response.
pub struct HeldReviews<'a>(&'a FakeKubernetes);

impl FakeKubernetes {
    /// The variables of a relay that reviews tokens here, with `accounts` (`NAMESPACE/NAME`, separated by commas).
    #[must_use]
    pub fn reviewing(&self, accounts: &str) -> Vec<(&'static str, String)> {
        let mut variables = self.account_variables();
        variables.push(("WORKER_SERVICE_ACCOUNTS", accounts.to_owned()));
        variables
    }

    /// Issues a token of a ServiceAccount (`NAMESPACE/NAME`), valid for `seconds` from now.
    #[must_use]
    pub fn token(&self, account: &str, audience: &str, seconds: i64) -> String {
        let mut state = self.state();
        state.tokens.made += 1;
        let token = written(account, audience, seconds, &format!("signed-{}", state.tokens.made));
        let made = Made { user: user(account), audience: audience.to_owned(), expires: unix(seconds) };
        state.tokens.good.insert(token.clone(), made);
        token
    }

    /// Revokes this token, as the deletion of its Pod or its account does.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn revoke(&self, token: &str) {
        assert!(self.state().tokens.good.remove(token).is_some(), "no such token");
    }

    /// Makes the next reviews fail like this, one after the other.
    pub fn fail_reviews(&self, faults: &[Fault]) {
        self.state().tokens.faults = faults.iter().cloned().collect();
    }

    /// Omits the audiences of tokens from now on.
    pub fn forget_audiences(&self) {
        self.state().tokens.is_old = true;
    }

    /// Tokens in the order in which their reviews were completed or dropped.
    #[must_use]
    pub fn reviewed(&self) -> Vec<String> {
        self.state().tokens.reviewed.clone()
    }

    /// Holds all reviews until the returned value is dropped.
    #[must_use]
    pub fn hold_reviews(&self) -> HeldReviews<'_> {
        self.held.send_replace(true);
        HeldReviews(self)
    }

    /// The number of held reviews.
    #[must_use]
    pub fn waiting_reviews(&self) -> usize {
        self.held.receiver_count()
    }
}

impl Drop for HeldReviews<'_> {
    fn drop(&mut self) {
        self.0.held.send_replace(false);
    }
}

/// A forged token that looks like an issued one.
#[must_use]
pub fn made_up(account: &str, audience: &str, seconds: i64, number: usize) -> String {
    written(account, audience, seconds, &format!("forged-{number}"))
}

fn written(account: &str, audience: &str, seconds: i64, signature: &str) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let head = part(json!({"alg": "RS256", "kid": "k"}));
    let payload = part(json!({
        "aud": [audience], "exp": unix(seconds), "iat": unix(0), "iss": "https://kubernetes.default.svc", "sub": user(account),
    }));
    format!("{head}.{payload}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn user(account: &str) -> String {
    format!("system:serviceaccount:{}", account.replace('/', ":"))
}

fn unix(seconds: i64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    now.saturating_add_signed(seconds)
}

pub(super) async fn wait_while_held(held: &watch::Sender<bool>) {
    if *held.borrow() {
        let _ = held.subscribe().wait_for(|held| !held).await;
    }
}

impl State {
    pub(super) fn review(&mut self, method: &Method, body: &[u8]) -> Result<Answer, Unanswered> {
        let review: Value = serde_json::from_slice(body).unwrap_or_default();
        let token = review["spec"]["token"].as_str().unwrap_or_default().to_owned();
        self.tokens.reviewed.push(token.clone());
        match self.tokens.faults.pop_front() {
            Some(Fault::Status(status, message)) => Ok(self.refuse(status, message)),
            Some(Fault::TooManyRequests) => Ok(self.refuse(429, "too many requests, please try again later")),
            Some(Fault::Drop | Fault::DropAfterwards) => Err(Unanswered::Dropped),
            Some(Fault::Silence) => Err(Unanswered::Silent),
            None if method != Method::POST || review["kind"] != "TokenReview" => Ok(self.refuse(405, "no review")),
            None => {
                let status = self.tokens.judge(&token, &review["spec"]["audiences"]);
                let answer = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "status": status});
                Ok(json_answer(201, &answer))
            }
        }
    }
}

impl Tokens {
    /// Like the real one: a token for another audience, or an expired one, is as invalid as any other.
    fn judge(&self, token: &str, audiences: &Value) -> Value {
        let has_audience =
            |made: &Made| audiences.as_array().is_some_and(|list| list.iter().any(|it| *it == made.audience));
        let made = self.good.get(token).filter(|made| made.expires > unix(0) && (self.is_old || has_audience(made)));
        let Some(made) = made else { return json!({"user": {}, "error": "[invalid bearer token]"}) };
        let mut status = json!({"authenticated": true, "user": {"username": made.user, "uid": "u"}});
        if !self.is_old {
            status["audiences"] = json!([made.audience]);
        }
        status
    }
}
