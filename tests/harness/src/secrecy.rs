//! Each test also checks secrecy: the output of programs, and their responses about themselves, are searched for
//! everything that must not be in them.
//!
//! That is: the secrets of this crate, the prompt of the usual requests, any other credential that a test gave a
//! program or sent to it ([`Secrets::plant`]), and anything that looks like a whole API key or like a ServiceAccount's
//! token.

use std::sync::{Mutex, PoisonError};

use crate::{relay, worker_process};

/// The prompt of the usual requests. It may reach a backend, and nothing else.
pub const PROMPT: &str = "planted-prompt-of-the-tests";

/// Shorter secrets could be found by chance.
const SHORTEST: usize = 8;

/// Variables whose values are secrets.
const SECRET_VARIABLES: [&str; 4] = ["WORKER_SECRET", "MODELRELAY_ADMIN_TOKEN", "BACKEND_API_KEY", "DRAIN_TOKEN"];

/// Headers whose values are secrets.
const SECRET_HEADERS: [&str; 4] = ["authorization", "x-api-key", "x-worker-secret", "cookie"];

/// Secrets that the output of one program must not contain.
#[derive(Debug, Default)]
pub struct Secrets(Mutex<Vec<String>>);

impl Secrets {
    /// Adds a secret, if it is long enough to be distinguished from other text.
    pub fn plant(&self, secret: &str) {
        let mut planted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if secret.len() >= SHORTEST && !planted.iter().any(|known| known == secret) {
            planted.push(secret.to_owned());
        }
    }

    /// Adds the value of a variable, if it is a secret.
    pub fn plant_variable(&self, name: &str, value: &str) {
        if SECRET_VARIABLES.contains(&name) {
            self.plant(value);
        }
    }

    /// Adds the credential of a request header, if it contains one.
    pub fn plant_header(&self, name: &str, value: &str) {
        if SECRET_HEADERS.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            self.plant(value.strip_prefix("Bearer ").unwrap_or(value).trim());
        }
    }

    /// Returns a secret that `text` contains.
    #[must_use]
    pub fn found_in(&self, text: &str) -> Option<String> {
        let everywhere = [PROMPT, relay::WORKER_SECRET, relay::ADMIN_TOKEN, worker_process::WORKER_SECRET];
        let known = everywhere.into_iter().find(|secret| text.contains(secret)).map(str::to_owned);
        let planted = || {
            let planted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            planted.iter().find(|secret| text.contains(secret.as_str())).cloned()
        };
        known.or_else(planted).or_else(|| api_key_in(text)).or_else(|| token_in(text))
    }

    /// Fails the test if `text`, which was found in `place`, contains a secret.
    ///
    /// # Panics
    /// If it does.
    pub fn check(&self, place: &str, text: &str) {
        if let Some(secret) = self.found_in(text) {
            let line = text.lines().find(|line| line.contains(&secret)).unwrap_or(text);
            panic!("a secret was disclosed: {secret:?} is in {place}: {line}");
        }
    }
}

/// True if this request's response must not contain secrets or prompts: a response of a relay about itself. Exceptions
/// are a new key, which is shown once, and the worker secret for an admin who requests it.
#[must_use]
pub fn is_about_the_program(method: &str, target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    let shows_a_secret = method == "POST" && ["/admin/keys", "/admin/setup/secret"].contains(&path);
    let about = ["/admin", "/metrics", "/health", "/readyz", "/livez"];
    !shows_a_secret && about.iter().any(|prefix| path.starts_with(prefix))
}

/// `mr-`, an id of twelve characters, and a secret of more than twenty.
fn api_key_in(text: &str) -> Option<String> {
    text.match_indices("mr-").find_map(|(at, _)| {
        let key: String = text[at..].chars().take_while(|it| it.is_ascii_alphanumeric() || *it == '-').collect();
        let mut parts = key.splitn(3, '-').skip(1);
        let (id, secret) = (parts.next()?, parts.next()?);
        (id.len() == 12 && secret.len() > 20).then(|| key.clone())
    })
}

/// Three parts in base64 separated by dots, the first two of them objects: `eyJ` is the encoding of `{"`.
fn token_in(text: &str) -> Option<String> {
    text.match_indices("eyJ").find_map(|(at, _)| {
        let letter = |it: &char| it.is_ascii_alphanumeric() || "-_.".contains(*it);
        let token: String = text[at..].chars().take_while(letter).collect();
        let parts: Vec<_> = token.split('.').collect();
        (parts.len() == 3 && parts[1].starts_with("eyJ") && !parts[2].is_empty()).then(|| token.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_planted_secrets_are_found() {
        let secrets = Secrets::default();
        assert_eq!(secrets.found_in("long-secret-of-mine"), None);
        secrets.plant("long-secret");
        secrets.plant("short");
        secrets.plant_variable("DRAIN_TOKEN", "drain-token-1");
        secrets.plant_variable("WORKER_NAME", "a-worker-name");
        secrets.plant_header("Authorization", "Bearer client-token-1");
        secrets.plant_header("user-agent", "some-client/1.0");
        for hidden in ["long-secret", "drain-token-1", "client-token-1", PROMPT, relay::ADMIN_TOKEN] {
            assert_eq!(secrets.found_in(&format!("a {hidden}.")).as_deref(), Some(hidden));
        }
        assert_eq!(secrets.found_in("short a-worker-name Bearer some-client/1.0"), None);
    }

    #[test]
    fn whole_api_key_is_found_without_planting() {
        let key = "mr-f7ipcwmraanq-mqx2fcp3hkw6d7kq282xw5qf7ncmq72k";
        assert_eq!(api_key_in(&format!("key=\"{key}\"")).as_deref(), Some(key));
        assert_eq!(api_key_in("prefix mr-f7ipcwmraanq, mr-x-y"), None);
    }

    #[test]
    fn token_is_found_without_planting() {
        let token = crate::fake_kubernetes::made_up("llm/gpu", "modelrelay", 60, 1);
        assert_eq!(token_in(&format!("token={token}, ")), Some(token));
        assert_eq!(token_in("eyJ a.eyJhIjoxfQ.b eyJhIjoxfQ.eyJhIjoxfQ"), None);
    }

    #[test]
    fn key_and_secret_creation_responses_may_show_secrets() {
        assert!(is_about_the_program("GET", "/admin/keys") && is_about_the_program("GET", "/metrics"));
        assert!(
            is_about_the_program("DELETE", "/admin/keys/x")
                && is_about_the_program("GET", "/admin/state?residency=true")
        );
        assert!(
            !is_about_the_program("POST", "/admin/keys")
                && !is_about_the_program("POST", "/admin/setup/secret")
                && !is_about_the_program("POST", "/v1/chat/completions")
        );
    }
}
