//! The unverified claims of a token. They admit no peer: they only keep tokens that cannot be valid away from the API
//! server.

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::ServiceAccount;

/// The longest token; those of a cluster have 1 to 2 KiB.
const MAX_TOKEN_BYTES: usize = 8 << 10;
/// The allowed difference between the clocks of the relay and the API server, which allows the same.
const LEEWAY: Duration = Duration::from_secs(60);

/// The unverified claims of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The account that it names.
    pub account: ServiceAccount,
    /// The expiry that it names.
    pub expires: SystemTime,
}

/// Why a token cannot be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnfitToken {
    /// Not the token of a ServiceAccount.
    NoToken,
    /// It was issued for another audience.
    OtherAudience,
    /// It has expired.
    Expired,
}

impl UnfitToken {
    /// The message for the peer that presented it: it reveals nothing new except the relay's audience.
    pub fn description(self, audience: &str) -> String {
        match self {
            Self::NoToken => "the token is not a ServiceAccount token from a projected volume".to_owned(),
            Self::OtherAudience => {
                format!("the token has the wrong audience; it must be {audience} (serviceAccountToken.audience)")
            }
            Self::Expired => "the token has expired; use the file that the kubelet renews".to_owned(),
        }
    }
}

impl Claims {
    /// Parses the claims of a token.
    pub fn read(token: &str, audience: &str, now: SystemTime) -> Result<Self, UnfitToken> {
        let payload: Payload = payload(token).ok_or(UnfitToken::NoToken)?;
        let account = ServiceAccount::of_user(&payload.sub).ok_or(UnfitToken::NoToken)?;
        if !payload.aud.contains(audience) {
            return Err(UnfitToken::OtherAudience);
        }
        let expires =
            SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(payload.exp)).ok_or(UnfitToken::NoToken)?;
        if now.duration_since(expires).is_ok_and(|late| late > LEEWAY) {
            return Err(UnfitToken::Expired);
        }
        Ok(Self { account, expires })
    }
}

/// True if a text is a token for this audience, valid or not, or looks like one.
pub fn is_for_audience(text: &str, audience: &str) -> bool {
    payload::<AudienceOnly>(text).is_some_and(|payload| payload.aud.contains(audience))
}

#[derive(Deserialize)]
struct AudienceOnly {
    aud: Audiences,
}

#[derive(Deserialize)]
struct Payload {
    sub: String,
    aud: Audiences,
    exp: u64,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Several(Vec<String>),
}

impl Audiences {
    fn contains(&self, audience: &str) -> bool {
        match self {
            Self::One(one) => one == audience,
            Self::Several(several) => several.iter().any(|one| one == audience),
        }
    }
}

/// The middle one of three parts, if all of them look like parts of a token.
fn payload<T: DeserializeOwned>(token: &str) -> Option<T> {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if token.len() > MAX_TOKEN_BYTES || !token.bytes().all(letter) {
        return None;
    }
    let mut parts = token.split('.');
    let (Some(head), Some(payload), Some(signature), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    if head.is_empty() || signature.is_empty() {
        return None;
    }
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NOW: u64 = 1_800_000_000;

    fn token(payload: &Value) -> String {
        format!("aGVhZA.{}.c2lnbmF0dXJl", URL_SAFE_NO_PAD.encode(payload.to_string()))
    }

    fn claims() -> Value {
        json!({"sub": "system:serviceaccount:llm:gpu", "aud": ["other", "modelrelay"], "exp": NOW + 600, "nbf": NOW})
    }

    fn read(token: &str) -> Result<Claims, UnfitToken> {
        Claims::read(token, "modelrelay", SystemTime::UNIX_EPOCH + Duration::from_secs(NOW))
    }

    fn with(key: &str, value: Value) -> Result<Claims, UnfitToken> {
        let mut claims = claims();
        claims[key] = value;
        read(&token(&claims))
    }

    #[test]
    fn account_and_expiry_are_read() {
        let claims = read(&token(&claims())).expect("claims");
        assert_eq!(claims.account.to_string(), "llm/gpu");
        assert_eq!(claims.expires, SystemTime::UNIX_EPOCH + Duration::from_secs(NOW + 600));
        assert!(with("aud", json!("modelrelay")).is_ok());
    }

    #[test]
    fn unfit_tokens_are_classified_by_reason() {
        assert_eq!(with("aud", json!(["modelrelay2"])), Err(UnfitToken::OtherAudience));
        assert_eq!(with("aud", json!([])), Err(UnfitToken::OtherAudience));
        assert_eq!(with("exp", json!(NOW - 61)), Err(UnfitToken::Expired));
        assert!(with("exp", json!(NOW - 60)).is_ok(), "clocks differ");
        assert_eq!(with("exp", json!(u64::MAX)), Err(UnfitToken::NoToken));
        assert_eq!(with("exp", Value::Null), Err(UnfitToken::NoToken));
        assert_eq!(with("sub", json!("admin")), Err(UnfitToken::NoToken));
    }

    #[test]
    fn malformed_token_is_rejected() {
        let good = token(&claims());
        let long = format!("{good}{}", "x".repeat(MAX_TOKEN_BYTES));
        let signed_not = good.trim_end_matches("c2lnbmF0dXJl");
        for text in ["", "..", "mr-f7ipcwmraanq-mqx2fcp3hkw6d7kq282xw5qf7ncmq72k", "a.b.c", &long, signed_not] {
            assert_eq!(read(text), Err(UnfitToken::NoToken), "{text}");
        }
        assert_eq!(read(&format!("{good}.x")), Err(UnfitToken::NoToken));
        assert_eq!(read(&format!("{good} ")), Err(UnfitToken::NoToken));
    }

    #[test]
    fn token_for_audience_is_recognized_whatever_else_it_has() {
        for claims in [claims(), json!({"aud": "modelrelay"}), json!({"aud": ["modelrelay"], "sub": "admin", "exp": 1})]
        {
            assert!(is_for_audience(&token(&claims), "modelrelay"), "{claims}");
        }
        for other in [&token(&json!({"aud": "other"})), &token(&json!({})), "modelrelay", "a.b.c", "sk-theirs", ""] {
            assert!(!is_for_audience(other, "modelrelay"), "{other}");
        }
    }
}
