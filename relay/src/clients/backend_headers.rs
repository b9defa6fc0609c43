//! The headers of a client that a backend receives.

use std::collections::BTreeMap;

use http::HeaderMap;
use modelrelay_protocol::headers;
use modelrelay_protocol::secret::Secret;

use crate::kubernetes::identity::claims::is_for_audience;

/// The credentials that are meant for the relay, besides its API keys.
#[derive(Debug, Clone, Copy)]
pub struct OwnCredentials<'a> {
    /// The token of `/admin`, if there is one.
    pub admin_token: Option<&'a Secret>,
    /// The audience of tenants' tokens.
    pub client_audience: &'a str,
}

/// Returns the client's headers for the backend, with repeated ones joined. The relay's own credentials are removed:
/// keys, tokens of tenants, and an admin token that was sent to the wrong place. `further` are the names that
/// `REQUEST_HEADERS` adds.
pub fn backend_headers(map: &HeaderMap, own: &OwnCredentials<'_>, further: &[String]) -> BTreeMap<String, String> {
    // A token that contains a space is no single credential word.
    let is_token = |value: &str, token: &Secret| {
        token.verify(headers::bearer_token(value)) || headers::credential_words(value).any(|word| token.verify(word))
    };
    let is_ours = |value: &str| {
        headers::is_own_key(value)
            || own.admin_token.is_some_and(|token| is_token(value, token))
            || headers::credential_words(value).any(|word| is_for_audience(word, own.client_audience))
    };
    let mut kept: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in map {
        let Ok(value) = std::str::from_utf8(value.as_bytes()) else { continue };
        let may_be_secret = !headers::REQUEST_HEADERS.contains(&name.as_str());
        if !headers::is_forwarded_header(name.as_str(), further) || may_be_secret && is_ours(value) {
            continue;
        }
        kept.entry(name.as_str().to_owned())
            .and_modify(|joined| {
                joined.push_str(", ");
                joined.push_str(value);
            })
            .or_insert_with(|| value.to_owned());
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use http::{HeaderName, HeaderValue};

    fn kept(map: &HeaderMap, admin_token: &str) -> BTreeMap<String, String> {
        let admin_token = Secret::new(admin_token);
        let own = OwnCredentials { admin_token: Some(&admin_token), client_audience: "modelrelay-clients" };
        backend_headers(map, &own, &[])
    }

    #[test]
    fn backend_headers_are_listed_joined_and_without_keys() {
        let mut map = HeaderMap::new();
        for (name, value) in [
            ("content-type", "application/json"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
            ("authorization", "Bearer mr-1-2"),
            ("x-api-key", "sk-theirs"),
            ("authorization", "Bearer admin"),
            ("cookie", "c"),
        ] {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let kept = kept(&map, "admin");
        let kept: Vec<_> = kept.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            kept,
            [("anthropic-beta", "a, b"), ("content-type", "application/json"), ("x-api-key", "sk-theirs")]
        );
    }

    #[test]
    fn admin_token_never_reaches_backend() {
        for value in
            ["admin", "bearer admin", "Bearer  admin", "Bearer\tadmin", "Token admin", "Bearer sk, Bearer admin"]
        {
            for name in ["authorization", "x-api-key"] {
                let map = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))]);
                assert!(kept(&map, "admin").is_empty(), "{name}: {value:?}");
            }
        }
        let two_words =
            HeaderMap::from_iter([(http::header::AUTHORIZATION, HeaderValue::from_static("Bearer two words"))]);
        assert!(kept(&two_words, "two words").is_empty());
        assert_eq!(kept(&two_words, "two").len(), 0);
        assert_eq!(kept(&two_words, "wo").len(), 1);
    }

    #[test]
    fn token_of_tenant_never_reaches_backend() {
        let token = |audience: &str| {
            let payload = format!(r#"{{"aud":["{audience}"],"exp":1,"sub":"system:serviceaccount:llm:a"}}"#);
            format!("eyJhIjoxfQ.{}.c2ln", URL_SAFE_NO_PAD.encode(payload))
        };
        let forwarded = |name: &'static str, value: &str| {
            let value = HeaderValue::from_str(value).expect("a value");
            !kept(&HeaderMap::from_iter([(HeaderName::from_static(name), value)]), "admin").is_empty()
        };
        let (ours, theirs) = (token("modelrelay-clients"), token("another-api"));
        for name in ["authorization", "x-api-key"] {
            for form in ["{}", "Bearer {}", "bearer  {}", "Token {}", "Bearer sk-theirs, Bearer {}"] {
                assert!(!forwarded(name, &form.replace("{}", &ours)), "{name}: {form}");
                assert!(forwarded(name, &form.replace("{}", &theirs)), "{name}: {form}");
            }
        }
    }
}
