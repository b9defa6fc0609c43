//! `/v1/embeddings`: a bag of hashed words. Equal texts get equal vectors, and texts with shared words similar ones;
//! they mean nothing more.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};

use super::answer::given;
use super::reply::{DemoError, Dialect, parse_for_model};
use super::{Demo, tokens};

const DIALECT: Dialect = Dialect::OpenAi;
const DIMENSIONS: usize = 256;
const MAX_DIMENSIONS: u64 = 4096;

/// `POST /v1/embeddings`.
pub(super) async fn embeddings(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let inputs = inputs(&body["input"])
        .ok_or_else(|| DemoError::invalid(DIALECT, "input", "input must be text, tokens, or a list of either"))?;
    let dimensions = given(&body["dimensions"]).map_or(Some(DIMENSIONS as u64), Value::as_u64);
    let dimensions = dimensions.filter(|number| (1..=MAX_DIMENSIONS).contains(number)).ok_or_else(|| {
        let message = format!("dimensions must be 1 to {MAX_DIMENSIONS}");
        DemoError::invalid(DIALECT, "dimensions", &message)
    })? as usize;
    let in_base64 = match body["encoding_format"].as_str() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(DemoError::invalid(DIALECT, "encoding_format", "encoding_format must be float or base64"));
        }
    };
    let data: Vec<Value> = inputs
        .iter()
        .enumerate()
        .map(|(index, input)| {
            let vector = embed(&input.words, dimensions);
            let embedding = if in_base64 { json!(base64(&little_endian(&vector))) } else { json!(vector) };
            json!({"object": "embedding", "index": index, "embedding": embedding})
        })
        .collect();
    let count: usize = inputs.iter().map(|input| input.tokens).sum();
    Ok(Json(json!({
        "object": "list", "model": body["model"], "data": data, "usage": {"prompt_tokens": count, "total_tokens": count},
    })))
}

/// One text to embed, as words (of letters, or of token numbers) and its token count.
struct Input {
    words: Vec<String>,
    tokens: usize,
}

impl Input {
    fn of_text(text: &str) -> Self {
        let words = tokens::words(text).map(|word| word.trim().to_lowercase()).collect();
        Self { words, tokens: tokens::count(text) }
    }

    fn of_tokens(ids: &[Value]) -> Option<Self> {
        let words: Vec<String> = ids.iter().map(|id| id.as_u64().map(|id| id.to_string())).collect::<Option<_>>()?;
        Some(Self { tokens: words.len(), words })
    }
}

/// Parses a text, a list of texts, a list of token numbers, or a list of such lists; `None` for anything else.
fn inputs(input: &Value) -> Option<Vec<Input>> {
    match input {
        Value::String(text) => Some(vec![Input::of_text(text)]),
        Value::Array(list) if list.is_empty() => None,
        Value::Array(list) if list[0].is_number() => Some(vec![Input::of_tokens(list)?]),
        Value::Array(list) => list
            .iter()
            .map(|item| match item.as_array() {
                Some(ids) => Input::of_tokens(ids),
                None => item.as_str().map(Input::of_text),
            })
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
    }
}

/// Returns a vector of length one, whatever the words.
fn embed(words: &[String], dimensions: usize) -> Vec<f32> {
    let mut vector = vec![0.0_f32; dimensions];
    vector[0] = 0.01; // an empty text still has a direction
    for word in words {
        let hash = fnv1a(word.as_bytes());
        let place = (hash >> 1) % dimensions as u64;
        vector[place as usize] += if hash & 1 == 0 { 1.0 } else { -1.0 };
    }
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}

/// FNV-1a: the same on every machine and in every release, which the standard hasher does not guarantee.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn little_endian(vector: &[f32]) -> Vec<u8> {
    vector.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let letter = ALPHABET[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_standard() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (plain, encoded) in cases {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn embeddings_reflect_shared_words_at_unit_length() {
        let vector = |text: &str| embed(&Input::of_text(text).words, DIMENSIONS);
        let near = |a: &str, b: &str| vector(a).iter().zip(vector(b)).map(|(x, y)| x * y).sum::<f32>();
        assert_eq!(vector("The cat sat"), vector("the  CAT sat"));
        assert!(near("the cat sat", "the cat ran") > near("the cat sat", "quite another thing"));
        for text in ["", "one", "many many words here"] {
            assert!((near(text, text) - 1.0).abs() < 1e-5, "{text}");
        }
    }
}
