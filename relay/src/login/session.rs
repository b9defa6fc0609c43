//! Logins to the dashboard: a cookie with its expiry, signed with a key that is derived from the admin token.
//!
//! The relay stores nothing. So every relay with the same token accepts the cookie, a restart ends no login, and a new
//! token ends them all. The browser does not store the token itself, and scripts cannot read the cookie (`HttpOnly`).
//!
//! Other sites: browsers do not send the cookie with their requests (`SameSite=Strict`), and a change also needs a
//! header of the relay's own, which they cannot send without permission.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, Method};
use modelrelay_protocol::secret::Secret;
use sha2::Sha256;

use crate::system::ids::random_hex;

/// The name of the cookie.
pub(super) const COOKIE: &str = "modelrelay_session";
/// The name of the cookie over TLS: browsers accept it from this host alone, and over TLS alone.
pub(super) const HOST_COOKIE: &str = "__Host-modelrelay_session";
/// The header that a page's script sends with each change.
pub(crate) const CHANGE_HEADER: &str = "x-modelrelay-dashboard";
/// The duration of a login.
pub(super) const LASTS: Duration = Duration::from_secs(12 * 3600);

/// The purpose of the key, so that no signature for another purpose is valid here.
const PURPOSE: &[u8] = b"modelrelay dashboard session 1:";

/// Why a cookie is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoginRefusal {
    /// There is no cookie.
    Absent,
    /// It has expired.
    Ended,
    /// It was signed with another token, or forged.
    Foreign,
    /// It is valid, but the request is a change and does not come from the dashboard's page.
    NotOurPage,
}

/// The value of a cookie that is valid until [`LASTS`] from `now`.
pub(crate) fn issue(token: &Secret, now: SystemTime) -> String {
    let until = seconds(now) + LASTS.as_secs();
    let claim = format!("{until}.{}", random_hex::<16>());
    let signature = URL_SAFE_NO_PAD.encode(signer(token, &claim).finalize().into_bytes());
    format!("{claim}.{signature}")
}

/// The whole `Set-Cookie` of a login; with an empty value that of a logout.
pub(crate) fn set_cookie(value: &str, is_encrypted: bool) -> String {
    let age = if value.is_empty() { 0 } else { LASTS.as_secs() };
    let (name, secure) = if is_encrypted { (HOST_COOKIE, "; Secure") } else { (COOKIE, "") };
    format!("{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}")
}

/// The `Set-Cookie`s of a logout: over TLS there may be a cookie of the other name too.
pub(crate) fn clear_cookies(is_encrypted: bool) -> Vec<String> {
    let kinds: &[bool] = if is_encrypted { &[true, false] } else { &[false] };
    kinds.iter().map(|is_encrypted| set_cookie("", *is_encrypted)).collect()
}

/// Checks whether the cookie of a request permits it.
pub(crate) fn check(token: &Secret, method: &Method, headers: &HeaderMap, now: SystemTime) -> Result<(), LoginRefusal> {
    let value = cookie(headers).ok_or(LoginRefusal::Absent)?;
    let until = signed_until(token, value).ok_or(LoginRefusal::Foreign)?;
    if seconds(now) >= until {
        return Err(LoginRefusal::Ended);
    }
    let is_ours = headers.contains_key(CHANGE_HEADER);
    if method.is_safe() || is_ours { Ok(()) } else { Err(LoginRefusal::NotOurPage) }
}

/// The expiry of the cookie, in seconds of Unix time, if it was made with this token.
fn signed_until(token: &Secret, value: &str) -> Option<u64> {
    let (claim, signature) = value.rsplit_once('.')?;
    let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
    // In constant time, and before any part of the claim is trusted.
    let is_ours = !token.is_empty() && signer(token, claim).verify_slice(&signature).is_ok();
    claim.split('.').next().and_then(|until| until.parse().ok()).filter(|_| is_ours)
}

fn cookie(headers: &HeaderMap) -> Option<&str> {
    cookie_named(headers, HOST_COOKIE).or_else(|| cookie_named(headers, COOKIE))
}

fn cookie_named<'a>(headers: &'a HeaderMap, wanted: &str) -> Option<&'a str> {
    let lines = headers.get_all(http::header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == wanted).map(|(_, value)| value)
}

fn signer(token: &Secret, claim: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token.expose().as_bytes()).expect("HMAC accepts keys of any length");
    mac.update(PURPOSE);
    mac.update(claim.as_bytes());
    mac
}

fn seconds(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn with_cookie(cookie: &str) -> HeaderMap {
        let cookie = format!("theme=dark; {COOKIE}={cookie}; other=1");
        HeaderMap::from_iter([(http::header::COOKIE, cookie.parse().unwrap())])
    }

    #[test]
    fn session_ends_at_expiry_or_token_change() {
        let token = Secret::new("admin");
        let headers = with_cookie(&issue(&token, now()));
        let at = |token: &Secret, later| check(token, &Method::GET, &headers, now() + Duration::from_secs(later));
        assert_eq!(at(&token, 0), Ok(()));
        assert_eq!(at(&token, LASTS.as_secs() - 1), Ok(()));
        assert_eq!(at(&token, LASTS.as_secs()), Err(LoginRefusal::Ended));
        assert_eq!(at(&Secret::new("admin2"), 0), Err(LoginRefusal::Foreign));
        assert_eq!(at(&Secret::new("admin2"), LASTS.as_secs()), Err(LoginRefusal::Foreign));
        assert_eq!(at(&Secret::new(""), 0), Err(LoginRefusal::Foreign));
    }

    #[test]
    fn host_cookie_precedes_plain_cookie() {
        let token = Secret::new("admin");
        let cookies = format!("{COOKIE}=planted; {HOST_COOKIE}={}", issue(&token, now()));
        let headers = HeaderMap::from_iter([(http::header::COOKIE, cookies.parse().unwrap())]);
        assert_eq!(check(&token, &Method::GET, &headers, now()), Ok(()));
    }

    #[test]
    fn forged_or_altered_session_is_rejected() {
        let token = Secret::new("admin");
        let good = issue(&token, now());
        let longer = good.replacen(&good[..10], "9999999999", 1);
        for bad in
            ["", ".", "..", "1.2.3", "9999999999.00", longer.as_str(), &good[..good.len() - 1], &good[..good.len() - 2]]
        {
            assert_eq!(check(&token, &Method::GET, &with_cookie(bad), now()), Err(LoginRefusal::Foreign), "{bad}");
        }
        assert_ne!(good, issue(&token, now()), "each is another");
        assert_eq!(check(&token, &Method::GET, &HeaderMap::new(), now()), Err(LoginRefusal::Absent));
    }

    #[test]
    fn change_requires_header_of_own_page() {
        let token = Secret::new("admin");
        let mut headers = with_cookie(&issue(&token, now()));
        assert_eq!(check(&token, &Method::POST, &headers, now()), Err(LoginRefusal::NotOurPage));
        assert_eq!(check(&token, &Method::DELETE, &headers, now()), Err(LoginRefusal::NotOurPage));
        headers.insert(CHANGE_HEADER, "1".parse().unwrap());
        assert_eq!(check(&token, &Method::POST, &headers, now()), Ok(()));
    }

    #[test]
    fn logout_removes_session_cookie() {
        assert_eq!(set_cookie("", false), "modelrelay_session=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict");
        assert!(
            set_cookie("v", true).starts_with("__Host-modelrelay_session=v; Path=/; ")
                && set_cookie("v", true).ends_with("; Secure")
        );
    }
}
