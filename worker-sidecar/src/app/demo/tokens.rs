//! Words and tokens, and the two routes for them.
//!
//! A word includes the white space before it, so the joined words are the text. A token is a piece of one word of at
//! most six bytes, about the size of a real model's. Its id is its bytes as a number after a leading 1: it can be
//! converted back into text without a vocabulary, and stays below 2^53, which JSON readers need.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};

use super::CONTEXT_TOKENS;
use super::answer::text_of_messages;
use super::reply::{DemoError, Dialect, parse};

const PIECE_BYTES: usize = 6;

/// `POST /tokenize`, in vLLM's shape.
pub(super) async fn tokenize(body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, DemoError> {
    let body = parse(Dialect::OpenAi, body)?;
    let text = match &body["prompt"] {
        Value::String(prompt) => prompt.clone(),
        Value::Null => {
            text_of_messages(&body["messages"])
                .map_err(|problem| DemoError::invalid(Dialect::OpenAi, "messages", &problem))?
                .all
        }
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            return Err(DemoError::invalid(Dialect::OpenAi, "prompt", "prompt must be a string"));
        }
    };
    let ids: Vec<u64> = pieces(&text).map(id_of).collect();
    let strings: Vec<&str> = pieces(&text).collect();
    Ok(Json(json!({"count": ids.len(), "max_model_len": CONTEXT_TOKENS, "tokens": ids, "token_strs": strings})))
}

/// `POST /detokenize`, in vLLM's shape.
pub(super) async fn detokenize(body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, DemoError> {
    let body = parse(Dialect::OpenAi, body)?;
    let refused = || DemoError::invalid(Dialect::OpenAi, "tokens", "tokens must be a list of ids from /tokenize");
    let mut bytes = Vec::new();
    for id in body["tokens"].as_array().ok_or_else(refused)? {
        bytes.extend(bytes_of(id.as_u64().ok_or_else(refused)?).ok_or_else(refused)?);
    }
    let text = String::from_utf8(bytes).map_err(|_| refused())?;
    Ok(Json(json!({"prompt": text})))
}

pub(super) fn count(text: &str) -> usize {
    pieces(text).count()
}

/// Returns the words of `text`, each with the white space before it.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len());
        let end = rest[start..].find(char::is_whitespace).map_or(rest.len(), |length| start + length);
        let (word, after) = rest.split_at(end);
        rest = after;
        (!word.is_empty()).then_some(word)
    })
}

/// Returns the tokens of `text` as text.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    words(text).flat_map(|word| {
        let mut rest = word;
        std::iter::from_fn(move || {
            let ends = rest.char_indices().map(|(at, letter)| at + letter.len_utf8());
            let (piece, after) = rest.split_at(ends.take_while(|&end| end <= PIECE_BYTES).last().unwrap_or(0));
            rest = after;
            (!piece.is_empty()).then_some(piece)
        })
    })
}

fn id_of(piece: &str) -> u64 {
    piece.bytes().fold(1, |id, byte| id << 8 | u64::from(byte))
}

/// Returns the text bytes of an id; `None` for a number that is no id.
fn bytes_of(id: u64) -> Option<Vec<u8>> {
    let bytes = id.to_be_bytes();
    let lead = bytes.iter().position(|&byte| byte != 0)?;
    (bytes[lead] == 1 && bytes.len() - lead - 1 <= PIECE_BYTES).then(|| bytes[lead + 1..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_words_reproduce_text() {
        for text in ["", " ", "one", "  two words ", "a\n\nb\tc", "naïve 日本語 🦀🦀 end"] {
            assert_eq!(words(text).collect::<String>(), text);
            assert_eq!(pieces(text).collect::<String>(), text);
        }
        assert_eq!(words("You said: hi").collect::<Vec<_>>(), ["You", " said:", " hi"]);
    }

    #[test]
    fn token_id_decodes_to_its_piece() {
        for piece in ["a", " hello"[..6].as_ref(), "\0\0", "日本", "🦀"] {
            assert_eq!(bytes_of(id_of(piece)).as_deref(), Some(piece.as_bytes()));
            assert!(id_of(piece) < 1 << 53);
        }
        for number in [0, 2, u64::MAX, 1 << 56] {
            assert_eq!(bytes_of(number), None, "{number}");
        }
    }
}
