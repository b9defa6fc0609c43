//! The request for usage that the relay adds to the body of a stream: `"stream_options":{"include_usage":true}`.
//!
//! Backends report the usage of a stream only if its body contains that. The relay needs it to charge limits of tokens
//! exactly. Every other byte of the body stays.

use std::ops::Range;

use bytes::Bytes;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::span::{span_of, splice};

/// A change to a body: a text in place of some of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    place: Range<usize>,
    text: &'static str,
}

impl Edit {
    /// Returns the change that makes the JSON body of a stream request usage. `None` if it does already, or if backends
    /// could read its options in different ways: if a field occurs twice or in a different case, or has another type.
    pub fn of(body: &[u8]) -> Option<Self> {
        let body_start = body.iter().position(|byte| *byte == b'{')? + 1;
        let request = Member::find(body, "stream_options").ok()?;
        let Some(options) = request.value else {
            let text = if request.is_alone {
                r#""stream_options":{"include_usage":true}"#
            } else {
                r#""stream_options":{"include_usage":true},"#
            };
            return Some(Self { place: body_start..body_start, text });
        };
        let place = span_of(options, body);
        if options.get() == "null" {
            return Some(Self { place, text: r#"{"include_usage":true}"# });
        }
        let usage = Member::find(options.get().as_bytes(), "include_usage").ok()?;
        match usage.value.map(|value| (value.get(), span_of(value, body))) {
            Some(("false" | "null", place)) => Some(Self { place, text: "true" }),
            Some(_) => None,
            None => {
                let text = if usage.is_alone { r#""include_usage":true"# } else { r#""include_usage":true,"# };
                Some(Self { place: place.start + 1..place.start + 1, text })
            }
        }
    }

    /// Returns the size of a body after the change.
    pub fn len_of(&self, body: &[u8]) -> usize {
        body.len() - self.place.len() + self.text.len()
    }

    /// Returns the body after the change.
    pub fn apply(&self, body: &[u8]) -> Bytes {
        splice(body, &self.place, &[self.text])
    }
}

/// A member of an object.
struct Member<'a> {
    value: Option<&'a RawValue>,
    /// True if the object has no other members.
    is_alone: bool,
}

impl<'a> Member<'a> {
    /// Reads one member of an object; an error if its name occurs twice, or in a different case.
    fn find(json: &'a [u8], name: &'static str) -> serde_json::Result<Self> {
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        deserializer.deserialize_map(Find { name })
    }
}

struct Find {
    name: &'static str,
}

impl<'de> Visitor<'de> for Find {
    type Value = Member<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut member = Member { value: None, is_alone: true };
        while let Some(is_named) = map.next_key_seed(Name(self.name))? {
            if !is_named {
                member.is_alone = false;
                map.next_value::<IgnoredAny>()?;
            } else if member.value.replace(map.next_value()?).is_some() {
                return Err(A::Error::custom("the field occurs twice"));
            }
        }
        Ok(member)
    }
}

/// Compares the name of a member.
struct Name(&'static str);

impl<'de> serde::de::DeserializeSeed<'de> for Name {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_bytes(self)
    }
}

impl Visitor<'_> for Name {
    type Value = bool;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a field name")
    }

    fn visit_bytes<E: Error>(self, name: &[u8]) -> Result<bool, E> {
        let is_named = name == self.0.as_bytes();
        // Some readers, Go's among them, accept it.
        let is_ambiguous = !is_named && name.eq_ignore_ascii_case(self.0.as_bytes());
        if is_ambiguous { Err(E::custom("the field occurs in a different case")) } else { Ok(is_named) }
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<bool, E> {
        self.visit_bytes(name.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(body: &str) -> Option<String> {
        let edit = Edit::of(body.as_bytes())?;
        let changed = edit.apply(body.as_bytes());
        assert_eq!(changed.len(), edit.len_of(body.as_bytes()));
        Some(String::from_utf8(changed.to_vec()).unwrap())
    }

    #[test]
    fn request_for_usage_is_added_and_nothing_else() {
        for (body, expected) in [
            (
                r#" { "stream" : true,"x":1.0 } "#,
                r#" {"stream_options":{"include_usage":true}, "stream" : true,"x":1.0 } "#,
            ),
            ("{}", r#"{"stream_options":{"include_usage":true}}"#),
            (r#"{"stream_options" : null}"#, r#"{"stream_options" : {"include_usage":true}}"#),
            (r#"{"a":"{","stream_options":{}}"#, r#"{"a":"{","stream_options":{"include_usage":true}}"#),
            (r#"{"stream_options":{ "b" : [2] }}"#, r#"{"stream_options":{"include_usage":true, "b" : [2] }}"#),
            (
                r#"{"stream_options":{"include_usage": false ,"b":2}}"#,
                r#"{"stream_options":{"include_usage": true ,"b":2}}"#,
            ),
            (r#"{"stream_options":{"include_usage":null}}"#, r#"{"stream_options":{"include_usage":true}}"#),
            (
                r#"{"stream\u005foptions":{"include\u005fusage":false}}"#,
                r#"{"stream\u005foptions":{"include\u005fusage":true}}"#,
            ),
            (
                r#"{"x":{"stream_options":null,"include_usage":true}}"#,
                r#"{"stream_options":{"include_usage":true},"x":{"stream_options":null,"include_usage":true}}"#,
            ),
        ] {
            assert_eq!(edited(body).as_deref(), Some(expected));
            assert!(serde_json::from_str::<serde_json::Value>(expected).is_ok());
            assert_eq!(edited(expected), None, "it requests usage already");
        }
    }

    #[test]
    fn ambiguous_or_wrong_options_stay() {
        for body in [
            r#"{"stream_options":{"include_usage":true}}"#,
            r#"{"stream_options":{"include_usage":1}}"#,
            r#"{"stream_options":{"include_usage":"no"}}"#,
            r#"{"stream_options":{"include_usage":false,"include_usage":false}}"#,
            r#"{"stream_options":{"Include_Usage":false}}"#,
            r#"{"stream_options":[]}"#,
            r#"{"stream_options":7}"#,
            r#"{"stream_options":"{}"}"#,
            r#"{"stream_options":null,"stream_options":null}"#,
            r#"{"Stream_Options":{}}"#,
            "[]",
            "",
        ] {
            assert_eq!(Edit::of(body.as_bytes()), None, "{body}");
        }
    }

    #[test]
    fn text_of_body_may_be_anything() {
        let deep = format!(r#"{{"x":{}{},"y":"{}"}}"#, "[".repeat(100_000), "]".repeat(100_000), "z".repeat(1 << 20));
        assert!(edited(&deep).is_some_and(|body| body.ends_with(&deep[1..])));
        let body = b"{\"x\":\"\xff\",\"stream_options\":{\"\xfe\":1}}";
        assert_eq!(Edit::of(body), None, "the options are no text");
        let body = b"{\"\xff\":\"\xff\"}";
        assert!(Edit::of(body).is_some_and(|edit| edit.apply(body).ends_with(b"\"\xff\"}")));
    }
}
