//! The parts of a request that the relay reads: the model, whether a stream is requested, and which response it
//! continues.
//!
//! Nothing else is validated, and no tree is built: the body is scanned once, and forwarded byte for byte, except for
//! the changes in [`rewrite`](super::rewrite).

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::multipart;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::span::{span_of, splice};
use crate::provider::conversation::{PromptField, PromptSpans};

/// The routing data of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The model's name, as the client wrote it.
    pub model: String,
    /// True if a stream is requested.
    pub stream: bool,
    /// The response that this one continues.
    pub previous_response_id: Option<String>,
    /// The positions of the prompt's fields; empty in a form, and if the prompt is not UTF-8.
    pub prompt: PromptSpans,
    span: ModelSpan,
}

/// The position of the model's name in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ModelSpan {
    place: Range<usize>,
    /// True if the name is a JSON string, not plain text.
    is_json: bool,
    /// Set if there is no name; a default one is inserted at the position, between these texts.
    around: Option<(String, &'static str)>,
}

impl Routed {
    /// True if the body must be rewritten for a backend to read this model's name in it.
    pub fn needs_rewrite(&self, id: &str) -> bool {
        self.model != id || self.names_no_model()
    }

    /// True if the body names no model.
    pub fn names_no_model(&self) -> bool {
        self.span.around.is_some()
    }
}

/// Parses a body by its content type: JSON, or a multipart form with a `model` field. A body that names no model means
/// the default one.
pub fn parse(content_type: Option<&str>, body: &[u8], default: Option<&str>) -> Result<Routed, ApiError> {
    match content_type.and_then(multipart::boundary) {
        Some(boundary) => parse_form(&boundary, body, default),
        None => parse_json(body, default),
    }
}

/// The body with the model's name replaced; every other byte stays.
pub fn with_model(body: &Bytes, routed: &Routed, id: &str) -> Bytes {
    let ModelSpan { place, is_json, around } = &routed.span;
    let (before, after) = around.as_ref().map_or(("", ""), |(before, after)| (before.as_str(), *after));
    let name = if *is_json { Cow::Owned(serde_json::Value::from(id).to_string()) } else { Cow::Borrowed(id) };
    splice(body, place, &[before, &name, after])
}

fn parse_json(body: &[u8], default: Option<&str>) -> Result<Routed, ApiError> {
    // A raw value must be UTF-8. The rest of the body is not validated, so that a prompt which is not only has no key.
    let is_text = || std::str::from_utf8(body).is_ok();
    let fields = scan(body, true).or_else(|error| if is_text() { Err(error) } else { scan(body, false) });
    let fields = fields.map_err(|error| invalid(&error))?;
    let (model, span) = json_model(body, fields.model, default)?;
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
    Ok(Routed { model, stream, previous_response_id, prompt: fields.prompt, span })
}

fn scan(body: &[u8], with_prompt: bool) -> serde_json::Result<Fields<'_>> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let fields = FieldsOf { body, with_prompt }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(fields)
}

fn json_model(body: &[u8], raw: Option<&RawValue>, default: Option<&str>) -> Result<(String, ModelSpan), ApiError> {
    let absent =
        |place, before: &str, after| ModelSpan { place, is_json: true, around: Some((before.to_owned(), after)) };
    let Some(raw) = raw else {
        let default = default.ok_or_else(missing_model)?;
        let is_blank = |byte: &&u8| byte.is_ascii_whitespace();
        let start = body.iter().take_while(is_blank).count() + 1;
        let is_empty = body[start..].iter().find(|byte| !is_blank(byte)) == Some(&b'}');
        let span = absent(start..start, "\"model\":", if is_empty { "" } else { "," });
        return Ok((default.to_owned(), span));
    };
    let place = span_of(raw, body);
    if let Some(default) = default.filter(|_| matches!(raw.get(), "null" | "\"\"")) {
        return Ok((default.to_owned(), absent(place, "", "")));
    }
    let model: String = serde_json::from_str(raw.get()).map_err(|_| wrong_type("model", "a string"))?;
    if model.is_empty() {
        return Err(missing_model());
    }
    Ok((model, ModelSpan { place, is_json: true, around: None }))
}

fn parse_form(boundary: &str, body: &[u8], default: Option<&str>) -> Result<Routed, ApiError> {
    let form = multipart::fields(boundary, body)
        .map_err(|problem| ApiError::new(ErrorKind::InvalidJson, format!("invalid multipart form: {problem}")))?;
    let mut models = form.iter().filter(|field| field.name == "model");
    let (model, span) = match (models.next(), models.next(), default) {
        (Some(field), None, _) => form_model(body, field.value.clone(), default)?,
        // A part can be inserted first if no bytes precede the parts.
        (None, None, Some(default)) if body.starts_with(format!("--{boundary}").as_bytes()) => {
            let before = format!("--{boundary}\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n");
            (default, ModelSpan { place: 0..0, is_json: false, around: Some((before, "\r\n")) })
        }
        (_, _, _) => {
            let message = "the form must have exactly one field `model`";
            return Err(ApiError::new(ErrorKind::MissingModel, message));
        }
    };
    let stream =
        form.iter().any(|field| field.name == "stream" && body[field.value.clone()].eq_ignore_ascii_case(b"true"));
    Ok(Routed { model: model.to_owned(), stream, previous_response_id: None, prompt: PromptSpans::default(), span })
}

fn form_model<'a>(
    body: &'a [u8],
    place: Range<usize>,
    default: Option<&'a str>,
) -> Result<(&'a str, ModelSpan), ApiError> {
    let model = std::str::from_utf8(&body[place.clone()]).map_err(|_| wrong_type("model", "text"))?;
    match (model, default) {
        ("", None) => Err(missing_model()),
        ("", Some(default)) => Ok((default, ModelSpan { place, is_json: false, around: Some((String::new(), "")) })),
        (model, _) => Ok((model, ModelSpan { place, is_json: false, around: None })),
    }
}

fn missing_model() -> ApiError {
    ApiError::new(ErrorKind::MissingModel, "the request must name a model: `model` must be a non-empty string")
}

fn wrong_type(field: &'static str, expected: &str) -> ApiError {
    ApiError::new(ErrorKind::InvalidJson, format!("`{field}` must be {expected}")).with_param(field)
}

fn invalid(error: &serde_json::Error) -> ApiError {
    // serde_json's messages name a position and never quote more than a field's name.
    if error.is_data() {
        ApiError::new(ErrorKind::InvalidJson, format!("invalid request body: {error}"))
    } else {
        ApiError::new(ErrorKind::InvalidJson, format!("the request body is not valid JSON: {error}"))
    }
}

struct Fields<'a> {
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    previous_response_id: Option<&'a RawValue>,
    prompt: PromptSpans,
}

/// Reads the fields of a body, with or without those of the prompt.
struct FieldsOf<'a> {
    body: &'a [u8],
    with_prompt: bool,
}

impl<'de> DeserializeSeed<'de> for FieldsOf<'de> {
    type Value = Fields<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldsOf<'de> {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let prompt = PromptSpans::default();
        let mut fields = Fields { model: None, stream: None, previous_response_id: None, prompt };
        while let Some(key) = map.next_key::<JsonKey>()? {
            match key {
                // Two readers of one body may use different ones: the relay the first, a backend the last.
                JsonKey::Model if fields.model.is_some() => {
                    return Err(serde::de::Error::custom("duplicate field `model`"));
                }
                JsonKey::Model => fields.model = Some(map.next_value()?),
                JsonKey::Stream => fields.stream = Some(map.next_value()?),
                JsonKey::PreviousResponseId => fields.previous_response_id = Some(map.next_value()?),
                JsonKey::Prompt(field) if self.with_prompt => {
                    fields.prompt.set(field, span_of(map.next_value()?, self.body));
                }
                JsonKey::Prompt(_) | JsonKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(fields)
    }
}

enum JsonKey {
    Model,
    Stream,
    PreviousResponseId,
    Prompt(PromptField),
    Other,
}

impl<'de> Deserialize<'de> for JsonKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(KeyVisitor)
    }
}

struct KeyVisitor;

impl Visitor<'_> for KeyVisitor {
    type Value = JsonKey;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a field name")
    }

    fn visit_bytes<E: serde::de::Error>(self, name: &[u8]) -> Result<JsonKey, E> {
        Ok(match name {
            b"model" => JsonKey::Model,
            b"stream" => JsonKey::Stream,
            b"previous_response_id" => JsonKey::PreviousResponseId,
            // Some readers, Go's among them, accept it as the model; and of two of them the last.
            _ if name.eq_ignore_ascii_case(b"model") => {
                return Err(serde::de::Error::custom("ambiguous field `model`: the field occurs in a different case"));
            }
            _ => PromptField::named(name).map_or(JsonKey::Other, JsonKey::Prompt),
        })
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<JsonKey, E> {
        self.visit_bytes(name.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(body: &[u8]) -> Result<Routed, String> {
        parse(Some("application/json"), body, None).map_err(|error| format!("{} {}", error.code(), error.message()))
    }

    #[test]
    fn model_stream_and_previous_response_are_read() {
        let routed =
            json(br#"{"stream":true,"model":"org/m:1","previous_response_id":"resp_1","x":[{"model":"no"}]}"#).unwrap();
        assert_eq!((routed.model.as_str(), routed.stream), ("org/m:1", true));
        assert_eq!(routed.previous_response_id.as_deref(), Some("resp_1"));
    }

    #[test]
    fn absent_or_null_stream_is_false() {
        for body in [&br#"{"model":"m"}"#[..], br#"{"model":"m","stream":null}"#, br#"{"model":"m","stream":false}"#] {
            assert!(!json(body).unwrap().stream);
        }
    }

    #[test]
    fn unroutable_body_is_rejected_naming_field() {
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
    fn other_fields_are_not_validated() {
        let deep = format!(r#"{{"model":"m","x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert!(json(deep.as_bytes()).is_ok());
        assert!(json(b"{\"model\":\"m\",\"x\":\"\xff\xfe\",\"\xff\":1}").is_ok());
        assert!(json(br#"{"model":"m","stream":1,"stream":true}"#).unwrap().stream);
    }

    #[test]
    fn prompt_without_utf8_is_routed_without_position() {
        let routed = |text: &[u8]| json(&[br#"{"model":"m","messages":[""#, text, br#""]}"#].concat()).unwrap();
        assert_ne!(routed(b"ok").prompt, PromptSpans::default());
        assert_eq!(routed(b"\xff").prompt, PromptSpans::default());
    }

    #[test]
    fn escaped_model_name_is_read_and_replaced() {
        let body = Bytes::from_static(br#"{"x":"\u0041", "model" : "a\u002fb" ,"y":1.0}"#);
        let routed = json(&body).unwrap();
        assert_eq!(routed.model, "a/b");
        let replaced = with_model(&body, &routed, "real\"one");
        assert_eq!(replaced, &br#"{"x":"\u0041", "model" : "real\"one" ,"y":1.0}"#[..]);
    }

    #[test]
    fn model_of_form_is_replaced_and_nothing_else() {
        let body = b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n\xff\x00\r\n\
            --B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B--\r\n";
        let content_type = Some("multipart/form-data; boundary=B");
        let routed = parse(content_type, body, None).unwrap();
        assert_eq!(routed.model, "whisper");
        let replaced = with_model(&Bytes::from_static(body), &routed, "whisper-large");
        let text = String::from_utf8_lossy(&replaced).replace("whisper-large", "whisper");
        assert_eq!(text, String::from_utf8_lossy(body));
        assert_eq!(parse(content_type, b"--B--\r\n", None).unwrap_err().code(), "missing_model");
    }

    #[test]
    fn body_without_model_gets_default() {
        for (body, expected) in [
            (&br#" {"x":1}"#[..], &br#" {"model":"d\"",""#[..]),
            (b"{ }", br#"{"model":"d\"" }"#),
            (br#"{"x":1,"model": null}"#, br#"{"x":1,"model": "d\""}"#),
            (br#"{"model":""}"#, br#"{"model":"d\""}"#),
        ] {
            let routed = parse(None, body, Some("d\"")).unwrap();
            assert!(routed.names_no_model() && routed.needs_rewrite("d\""), "{body:?}");
            let replaced = with_model(&Bytes::from_static(body), &routed, "d\"");
            assert!(replaced.starts_with(expected), "{replaced:?}");
            let again = parse(None, &replaced, None).unwrap();
            assert!(again.model == "d\"" && !again.needs_rewrite("d\""), "{replaced:?}");
        }
        assert_eq!(parse(None, br#"{"model":"m"}"#, Some("d")).unwrap().model, "m");
        assert_eq!(parse(None, br#"{"model":7}"#, Some("d")).unwrap_err().code(), "invalid_json");
    }

    #[test]
    fn form_without_model_gets_default() {
        let content_type = Some("multipart/form-data; boundary=B");
        let file = "--B\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n--B--\r\n";
        let empty = format!("--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n{file}");
        for body in [file.to_owned(), empty] {
            let routed = parse(content_type, body.as_bytes(), Some("d")).unwrap();
            assert!(routed.names_no_model() && routed.model == "d");
            let replaced = with_model(&Bytes::from(body), &routed, "e");
            assert!(replaced.ends_with(file.as_bytes()));
            assert_eq!(parse(content_type, &replaced, None).unwrap().model, "e");
        }
    }

    #[test]
    #[ignore = "a measurement: run it in a release build"]
    #[expect(clippy::print_stdout, reason = "its result")]
    fn measure_scan_of_long_prompt() {
        let reply = "\\\"x\\\" = 1;\\n".repeat(100);
        let message = format!(r#"{{"role":"assistant","content":"{reply}"}},"#);
        let body = format!(r#"{{"model":"m","messages":[{}0]}}"#, message.repeat((200 << 10) / message.len()));
        for with_prompt in [false, true] {
            let (rounds, begin) = (200, std::time::Instant::now());
            for _ in 0..rounds {
                assert!(scan(std::hint::black_box(body.as_bytes()), with_prompt).is_ok());
            }
            println!("{} bytes, positions of the prompt {with_prompt}: {:?}", body.len(), begin.elapsed() / rounds);
        }
    }
}
