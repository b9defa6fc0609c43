//! One TokenReview.

use http::{Method, StatusCode};
use modelrelay_protocol::secret::Secret;
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::{ServiceAccount, TokenReviewOutcome};
use crate::kubernetes::api::{Body, CallError, ClusterApi};

const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

#[derive(Deserialize)]
struct Review {
    #[serde(default)]
    status: ReviewStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReviewStatus {
    authenticated: bool,
    audiences: Vec<String>,
    user: User,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
}

/// Sends the token to the API server; the error states why no result is known.
pub(super) async fn review(
    api: &ClusterApi,
    token: &Secret,
    audience: &str,
    deadline: Instant,
) -> Result<TokenReviewOutcome, String> {
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": { "token": token.expose(), "audiences": [audience] },
    });
    let body = Body { media_type: "application/json", text: review.to_string() };
    let answer = api.call(Method::POST, PATH, Some(body), deadline).await.map_err(|error| error_text(error, token))?;
    judge(&answer, audience)
}

/// An authenticator that does not support audiences returns none. That is not sufficient, because the token may have
/// been issued for any audience.
fn judge(answer: &[u8], audience: &str) -> Result<TokenReviewOutcome, String> {
    let Review { status } =
        serde_json::from_slice(answer).map_err(|_| "the API server's response is not a TokenReview".to_owned())?;
    let for_us = status.authenticated && status.audiences.iter().any(|one| one == audience);
    let account = ServiceAccount::of_user(&status.user.username).filter(|_| for_us);
    Ok(account.map_or(TokenReviewOutcome::Refused, TokenReviewOutcome::Genuine))
}

fn error_text(error: CallError, token: &Secret) -> String {
    let error_text = match error {
        CallError::Unreached(why) => why,
        CallError::Answered { status: StatusCode::UNAUTHORIZED, .. } => {
            "the API server rejected the token of the relay's own ServiceAccount (401)".to_owned()
        }
        CallError::Answered { status: StatusCode::FORBIDDEN, message, .. } => format!(
            "the relay's ServiceAccount may not create TokenReviews: bind it to a ClusterRole with create on \
             tokenreviews.authentication.k8s.io (403: {message})"
        ),
        CallError::Answered { status, message, .. } => format!("the API server returned {status}: {message}"),
    };
    // A server that does not understand its input may repeat it.
    error_text.replace(token.expose(), "…")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn outcome_of(status: &Value) -> Result<TokenReviewOutcome, String> {
        judge(json!({ "kind": "TokenReview", "status": status }).to_string().as_bytes(), "modelrelay")
    }

    #[test]
    fn genuine_token_has_audience_and_service_account() {
        let user = json!({"username": "system:serviceaccount:llm:gpu", "uid": "u"});
        let good = json!({"authenticated": true, "audiences": ["modelrelay"], "user": user});
        assert_eq!(outcome_of(&good), Ok(TokenReviewOutcome::Genuine("llm/gpu".parse().expect("an account"))));
        for (key, value) in [
            ("authenticated", json!(false)),
            ("audiences", json!([])),
            ("audiences", json!(["kubernetes"])),
            ("user", json!({"username": "system:node:n"})),
            ("user", json!({})),
        ] {
            let mut status = good.clone();
            status[key] = value;
            assert_eq!(outcome_of(&status), Ok(TokenReviewOutcome::Refused), "{status}");
        }
        assert_eq!(outcome_of(&json!({"error": "invalid bearer token"})), Ok(TokenReviewOutcome::Refused));
    }

    #[test]
    fn malformed_review_is_error_not_refusal() {
        assert!(judge(b"<html>", "modelrelay").is_err() && judge(b"[1]", "modelrelay").is_err());
    }

    #[test]
    fn review_errors_never_repeat_token() {
        let answered =
            |status, message: &str| CallError::Answered { status, message: message.to_owned(), retry_after: None };
        let token = Secret::new("a.token.of-mine");
        let error_text = error_text(answered(StatusCode::BAD_REQUEST, "what is a.token.of-mine?"), &token);
        assert!(error_text.contains("400") && !error_text.contains(token.expose()), "{error_text}");
    }
}
