//! What the relay reads of a request: the model, whether a stream is wanted, and which response it continues.
//!
//! Nothing else is judged, and no tree is built: the body is walked once, and goes on byte for byte.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::multipart;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What a request says about where it should go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The model's name, as the client wrote it.
    pub model: String,
    /// Whether a stream is wanted.
    pub stream: bool,
    /// The response that this one continues.
    pub previous_response_id: Option<String>,
    /// Where the model's name stands in the body, and how it is spelled there.
    span: ModelSpan,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ModelSpan {
    Json(Range<usize>),
    Form(Range<usize>),
}

/// Reads a body by its content type: JSON, or a multipart form with a `model` field.
pub fn parse(content_type: Option<&str>, body: &[u8]) -> Result<Routed, ApiError> {
    match content_type.and_then(multipart::boundary) {
        Some(boundary) => parse_form(&boundary, body),
        None => parse_json(body),
    }
}

/// The body with the model's name replaced; every other byte stays.
pub fn with_model(body: &Bytes, routed: &Routed, id: &str) -> Bytes {
    let (range, name) = match &routed.span {
        ModelSpan::Json(range) => (range, Cow::Owned(serde_json::Value::from(id).to_string())),
        ModelSpan::Form(range) => (range, Cow::Borrowed(id)),
    };
    let mut replaced = BytesMut::with_capacity(body.len() + name.len());
    replaced.extend_from_slice(&body[..range.start]);
    replaced.extend_from_slice(name.as_bytes());
    replaced.extend_from_slice(&body[range.end..]);
    replaced.freeze()
}

fn parse_json(body: &[u8]) -> Result<Routed, ApiError> {
    let fields: Fields<'_> = serde_json::from_slice(body).map_err(|error| invalid(&error))?;
    let raw = fields.model.ok_or_else(missing_model)?;
    let model: String = serde_json::from_str(raw.get()).map_err(|_| wrong_type("model", "a string"))?;
    if model.is_empty() {
        return Err(missing_model());
    }
    let stream = match fields.stream {
        None => false,
        Some(raw) => serde_json::from_str::<Option<bool>>(raw.get())
            .map_err(|_| wrong_type("stream", "true or false"))?
            .unwrap_or(false),
    };
    let previous_response_id = match fields.previous_response_id {
        None => None,
        Some(raw) => serde_json::from_str(raw.get()).map_err(|_| wrong_type("previous_response_id", "a string"))?,
    };
    // The raw value borrows from the body, so its address is its place.
    let start = raw.get().as_ptr() as usize - body.as_ptr() as usize;
    let span = ModelSpan::Json(start..start + raw.get().len());
    Ok(Routed { model, stream, previous_response_id, span })
}

fn parse_form(boundary: &str, body: &[u8]) -> Result<Routed, ApiError> {
    let form = multipart::fields(boundary, body).map_err(|problem| {
        ApiError::new(ErrorKind::InvalidJson, format!("the multipart form cannot be read: {problem}"))
    })?;
    let mut models = form.iter().filter(|field| field.name == "model");
    let (Some(field), None) = (models.next(), models.next()) else {
        let message = "the form must have exactly one field `model`";
        return Err(ApiError::new(ErrorKind::MissingModel, message));
    };
    let model = std::str::from_utf8(&body[field.value.clone()]).map_err(|_| wrong_type("model", "text"))?;
    if model.is_empty() {
        return Err(missing_model());
    }
    let stream =
        form.iter().any(|field| field.name == "stream" && body[field.value.clone()].eq_ignore_ascii_case(b"true"));
    Ok(Routed {
        model: model.to_owned(),
        stream,
        previous_response_id: None,
        span: ModelSpan::Form(field.value.clone()),
    })
}

fn missing_model() -> ApiError {
    ApiError::new(ErrorKind::MissingModel, "the request must name a model: `model` must be a non-empty string")
}

fn wrong_type(field: &'static str, expected: &str) -> ApiError {
    ApiError::new(ErrorKind::InvalidJson, format!("`{field}` must be {expected}")).with_param(field)
}

fn invalid(error: &serde_json::Error) -> ApiError {
    // serde_json's messages name a place and never quote more than a field's name.
    if error.is_data() {
        ApiError::new(ErrorKind::InvalidJson, format!("the request body is not as expected: {error}"))
    } else {
        ApiError::new(ErrorKind::InvalidJson, format!("the request body is not valid JSON: {error}"))
    }
}

struct Fields<'a> {
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    previous_response_id: Option<&'a RawValue>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields { model: None, stream: None, previous_response_id: None };
        while let Some(key) = map.next_key::<Key>()? {
            match key {
                // Two readers of one body may pick different ones: the relay by the first, a backend by the last.
                Key::Model if fields.model.is_some() => {
                    return Err(serde::de::Error::custom("`model` is there twice"));
                }
                Key::Model => fields.model = Some(map.next_value()?),
                Key::Stream => fields.stream = Some(map.next_value()?),
                Key::PreviousResponseId => fields.previous_response_id = Some(map.next_value()?),
                Key::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(fields)
    }
}

enum Key {
    Model,
    Stream,
    PreviousResponseId,
    Other,
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(KeyVisitor)
    }
}

struct KeyVisitor;

impl Visitor<'_> for KeyVisitor {
    type Value = Key;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a field name")
    }

    fn visit_bytes<E: serde::de::Error>(self, name: &[u8]) -> Result<Key, E> {
        Ok(match name {
            b"model" => Key::Model,
            b"stream" => Key::Stream,
            b"previous_response_id" => Key::PreviousResponseId,
            // Some readers, Go's among them, take it for the model; and of two of them the last.
            _ if name.eq_ignore_ascii_case(b"model") => {
                return Err(serde::de::Error::custom("`model` is written in another case; backends may read either"));
            }
            _ => Key::Other,
        })
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Key, E> {
        self.visit_bytes(name.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(body: &[u8]) -> Result<Routed, String> {
        parse(Some("application/json"), body).map_err(|error| format!("{} {}", error.code(), error.message()))
    }

    #[test]
    fn model_stream_and_previous_response_are_read() {
        let routed =
            json(br#"{"stream":true,"model":"org/m:1","previous_response_id":"resp_1","x":[{"model":"no"}]}"#).unwrap();
        assert_eq!((routed.model.as_str(), routed.stream), ("org/m:1", true));
        assert_eq!(routed.previous_response_id.as_deref(), Some("resp_1"));
    }

    #[test]
    fn an_absent_or_null_stream_is_false() {
        for body in [&br#"{"model":"m"}"#[..], br#"{"model":"m","stream":null}"#, br#"{"model":"m","stream":false}"#] {
            assert!(!json(body).unwrap().stream);
        }
    }

    #[test]
    fn what_cannot_be_routed_is_refused_and_says_which_field() {
        for (body, code, field) in [
            (&b"not json"[..], "invalid_json", "JSON"),
            (b"", "invalid_json", "JSON"),
            (b"[1]", "invalid_json", "object"),
            (br#"{"model":"m"} x"#, "invalid_json", "JSON"),
            (br#"{"a":1}"#, "missing_model", "model"),
            (br#"{"model":""}"#, "missing_model", "model"),
            (br#"{"model":null}"#, "invalid_json", "model"),
            (br#"{"model":7}"#, "invalid_json", "model"),
            (br#"{"model":"a","model":"b"}"#, "invalid_json", "model"),
            (br#"{"model":"a","Model":"b"}"#, "invalid_json", "model"),
            (br#"{"MODEL":"a"}"#, "invalid_json", "model"),
            (br#"{"model":"a","stream":"yes"}"#, "invalid_json", "stream"),
            (br#"{"model":"a","previous_response_id":3}"#, "invalid_json", "previous_response_id"),
        ] {
            let error = json(body).unwrap_err();
            assert!(error.starts_with(code) && error.contains(field), "{body:?}: {error}");
        }
    }

    #[test]
    fn nothing_else_is_judged() {
        let deep = format!(r#"{{"model":"m","x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert!(json(deep.as_bytes()).is_ok());
        assert!(json(b"{\"model\":\"m\",\"x\":\"\xff\xfe\",\"\xff\":1}").is_ok());
        assert!(json(br#"{"model":"m","stream":1,"stream":true}"#).unwrap().stream);
    }

    #[test]
    fn an_escaped_model_name_is_read_and_replaced_as_it_stands() {
        let body = Bytes::from_static(br#"{"x":"\u0041", "model" : "a\u002fb" ,"y":1.0}"#);
        let routed = json(&body).unwrap();
        assert_eq!(routed.model, "a/b");
        let replaced = with_model(&body, &routed, "real\"one");
        assert_eq!(replaced, &br#"{"x":"\u0041", "model" : "real\"one" ,"y":1.0}"#[..]);
    }

    #[test]
    fn a_forms_model_is_read_and_replaced_with_every_other_byte_kept() {
        let body = b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n\xff\x00\r\n\
            --B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B--\r\n";
        let content_type = Some("multipart/form-data; boundary=B");
        let routed = parse(content_type, body).unwrap();
        assert_eq!(routed.model, "whisper");
        let replaced = with_model(&Bytes::from_static(body), &routed, "whisper-large");
        let text = String::from_utf8_lossy(&replaced).replace("whisper-large", "whisper");
        assert_eq!(text, String::from_utf8_lossy(body));
        assert_eq!(parse(content_type, b"--B--\r\n").unwrap_err().code(), "missing_model");
    }
}
