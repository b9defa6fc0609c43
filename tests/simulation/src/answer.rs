//! The bytes of a request and its response: both sides derive them from the plan.

use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::plan::RequestPlan;
use crate::secrets;

/// The body of a backend's error response.
pub const BACKEND_ERROR: &str = r#"{"error":{"message":"planned","type":"server_error","code":"planned"}}"#;

/// Returns the request's body.
pub fn prompt(plan: &RequestPlan) -> Bytes {
    let content = format!("{} {}", secrets::PROMPT, filler(plan.nonce, plan.prompt_bytes));
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let before = plan.conversation.map(|number| {
        let first = format!("{} {}", secrets::PROMPT, filler(number, HEAD_BYTES));
        [message("user", &first), message("assistant", "a reply")]
    });
    let messages: Vec<_> = before.into_iter().flatten().chain([message("user", &content)]).collect();
    let body = json!({
        "model": plan.model,
        "stream": plan.answer.streams,
        "nonce": plan.nonce,
        "messages": messages,
    });
    Bytes::from(body.to_string())
}

/// Returns the number of the request with this body.
pub fn nonce_of(body: &[u8]) -> Option<usize> {
    let body: Value = serde_json::from_slice(body).ok()?;
    usize::try_from(body.get("nonce")?.as_u64()?).ok()
}

/// Returns the response in the pieces that the backend writes.
pub fn pieces(plan: &RequestPlan) -> Vec<Bytes> {
    let answer = &plan.answer;
    let texts = (0..answer.pieces).map(|index| filler(plan.nonce * 1000 + index, answer.piece_bytes));
    if answer.streams {
        let event =
            |(index, text)| format!("data: {}\n\n", json!({ "nonce": plan.nonce, "index": index, "text": text }));
        let end = "data: [DONE]\n\n".to_owned();
        texts.enumerate().map(event).chain([end]).map(Bytes::from).collect()
    } else {
        let whole = json!({ "nonce": plan.nonce, "text": texts.collect::<String>() }).to_string();
        let size = whole.len().div_ceil(answer.pieces);
        whole.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect()
    }
}

/// Returns the whole response.
pub fn whole(plan: &RequestPlan) -> Vec<u8> {
    pieces(plan).concat()
}

/// The length of the text with which all turns of a conversation begin. Below 1 KiB, the relay recognizes none.
const HEAD_BYTES: usize = 2_000;

/// The length of the random text that all requests and responses are cut from; a prompt has at most 200,000 bytes.
const FILLER_BYTES: usize = 1 << 19;
static FILLER: LazyLock<String> = LazyLock::new(|| {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz012345";
    let mut state = 1_u64;
    let letter = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(LETTERS[(state >> 59) as usize])
    };
    (0..FILLER_BYTES).map(letter).collect()
});

/// Returns text of that length; where it begins in the random text depends on the seed.
fn filler(seed: usize, bytes: usize) -> &'static str {
    let start = seed.wrapping_mul(7_919) % (FILLER_BYTES - bytes);
    &FILLER[start..start + bytes]
}
