//! The key of a request's conversation: a keyed hash of the part of the prompt with which each of its turns begins.
//!
//! Clients rewrite what does not matter to a model: Claude Code writes `messages` before `system`, moves
//! `cache_control` to the newest message, and turns text blocks into strings. So the key covers a canonical form
//! ([`head`]) and not the bytes. Neither that form nor the key is logged or exported; traces and the request journal
//! can show a pseudonym ([`HashKey::pseudonym`]). A body that cannot be read has no key, which is never an error: the
//! backend reports it.

mod head;
mod json;
mod secret;
#[cfg(test)]
mod tests;

pub use json::{PromptField, PromptSpans};
pub use secret::{HashKey, ShownIn};

use crate::settings::config::CacheIsolation;

use head::PromptHasher;
use http::HeaderMap;
use json::PromptFields;
use modelrelay_protocol::paths::Endpoint;

/// A shorter body or head has no key: computing so little again costs less than a turn elsewhere in the round-robin
/// order.
const MIN_BYTES: usize = 1 << 10;

/// The part of the prompt of `/v1/completions` that identifies a conversation.
const PROMPT_BYTES: usize = 4 << 10;

/// Headers in which clients name a session: Claude Code, opencode and kilo (two names), Open WebUI.
const SESSION_HEADERS: [&str; 4] =
    ["x-claude-code-session-id", "x-session-affinity", "x-session-id", "x-openwebui-chat-id"];

/// The parts of a request that identify its conversation.
#[derive(Clone, Copy)]
pub struct Prompt<'a> {
    /// The route.
    pub endpoint: Endpoint,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The body.
    pub body: &'a [u8],
    /// The positions of the prompt's fields in the body.
    pub spans: &'a PromptSpans,
    /// The backend's name of the model.
    pub model: &'a str,
    /// The id of the API key.
    pub api_key: Option<&'a str>,
    /// Which requests may share a home.
    pub isolation: CacheIsolation,
}

/// True if a request may have a key: the route has a prompt, and the body is not short. The body is not read.
pub fn may_have_key(endpoint: Endpoint, body: &[u8]) -> bool {
    let has_prompt = matches!(
        endpoint,
        Endpoint::ChatCompletions | Endpoint::Completions | Endpoint::Messages | Endpoint::Responses
    );
    has_prompt && body.len() >= MIN_BYTES
}

/// Returns the key of a request's conversation. `None` if the body or the head is short, unless the client names a
/// session; if the prompt cannot be read; and on routes without a prompt. A request that continues a stored response is
/// pinned to the worker that made it, and needs no key.
pub fn of_request(key: &HashKey, prompt: &Prompt<'_>) -> Option<u64> {
    if !may_have_key(prompt.endpoint, prompt.body) {
        return None;
    }
    let body = PromptFields::new(prompt.body, prompt.spans);
    let mut head = PromptHasher::new(key);
    head.field("endpoint", prompt.endpoint.as_str().as_bytes());
    head.field("model", prompt.model.as_bytes());
    if prompt.isolation == CacheIsolation::Key {
        head.field("key", prompt.api_key.unwrap_or_default().as_bytes());
    }
    let has_session = add_session(&mut head, prompt, &body);
    let head_bytes = if prompt.endpoint == Endpoint::Completions {
        head.prompt(body.get(PromptField::Prompt)?, PROMPT_BYTES)
    } else if prompt.endpoint == Endpoint::Responses {
        head.responses(&body)?
    } else {
        head.chat(&body)?
    };
    (has_session || head_bytes >= MIN_BYTES).then(|| head.finish())
}

/// Adds the names of the session that the client sends; returns true if there is one.
fn add_session(head: &mut PromptHasher, prompt: &Prompt<'_>, body: &PromptFields<'_>) -> bool {
    let headers = SESSION_HEADERS.iter().filter_map(|name| Some((*name, prompt.headers.get(*name)?.as_bytes())));
    let fields = [
        ("prompt_cache_key", body.get(PromptField::PromptCacheKey)),
        ("user", body.get(PromptField::User)),
        ("metadata.user_id", body.metadata_user_id()),
    ];
    let fields = fields.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let mut has_session = false;
    for (name, value) in headers.chain(fields).filter(|(_, value)| !value.is_empty() && *value != b"\"\"") {
        head.field(name, value);
        has_session = true;
    }
    has_session
}
