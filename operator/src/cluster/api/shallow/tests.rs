use std::convert::Infallible;

use http_body_util::StreamBody;
use hyper::body::Frame;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Wraps a value in this number of lists.
fn nested(levels: usize, value: &str) -> String {
    format!("{}{value}{}", "[".repeat(levels), "]".repeat(levels))
}

/// Returns what is left of a response that arrives in these pieces.
fn read(content_type: &str, pieces: &[&[u8]]) -> Vec<u8> {
    let frames = pieces.iter().map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(piece))));
    let body = StreamBody::new(futures_util::stream::iter(frames.collect::<Vec<_>>()));
    let answer = Response::builder().header(CONTENT_TYPE, content_type).body(body).unwrap();
    let collected = futures_util::FutureExt::now_or_never(response(answer).into_body().collect());
    collected.expect("all of it is there").unwrap().to_bytes().to_vec()
}

fn cut(text: &str) -> String {
    String::from_utf8(read("application/json", &[text.as_bytes()])).unwrap()
}

#[test]
fn readable_json_passes_unchanged() {
    let deepest = nested(MAX_DEPTH, "7");
    for text in ["", "{}", r#"{"a": [1, "[[[", {"b": "\"]\\"}]}"#, &deepest] {
        assert_eq!(cut(text), text);
    }
}

#[test]
fn too_deep_values_become_null() {
    assert_eq!(cut(&nested(MAX_DEPTH + 1, "7")), nested(MAX_DEPTH, "null"));
    let deep = nested(5000, r#""]]]""#);
    let list = |value: &str| format!(r#"{{"items":[{{"spec":{value}}},{{"spec":"next"}}]}}"#);
    let read: Value = serde_json::from_str(&cut(&list(&deep))).unwrap();
    assert_eq!(read["items"][1], json!({"spec": "next"}));
    assert_eq!(cut(&list(&deep)), list(&nested(MAX_DEPTH - 3, "null")));
}

#[test]
fn each_watch_event_is_parsed_separately() {
    let deep = nested(200, "{}");
    let shallow = nested(MAX_DEPTH, "null");
    assert_eq!(cut(&format!("{deep}\n{{}}\n{deep}\n")), format!("{shallow}\n{{}}\n{shallow}\n"));
}

#[test]
fn non_json_passes_unchanged() {
    let deep = nested(200, "");
    assert_eq!(read("text/plain", &[deep.as_bytes()]), deep.as_bytes());
}

/// JSON whose depth is mostly around the limit.
fn json_around_the_limit() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("-1.5".to_owned()),
        "[a-c\\[\\]{}\"\\\\é]{0,6}".prop_map(|text| json!(text).to_string())
    ];
    let value = leaf.prop_recursive(6, 40, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec(inner, 0..4).prop_map(|items| {
                let field = |(index, item): (usize, &String)| format!(r#""{index}]\"":{item}"#);
                format!("{{{}}}", items.iter().enumerate().map(field).collect::<Vec<_>>().join(","))
            }),
        ]
    });
    (0..MAX_DEPTH + 5, value).prop_map(|(levels, value)| nested(levels, &value))
}

/// Computes the expected value independently, from the parsed value where parsing is possible.
fn expected(value: Value, depth: usize) -> Value {
    match value {
        Value::Array(_) | Value::Object(_) if depth == MAX_DEPTH => Value::Null,
        Value::Array(items) => items.into_iter().map(|item| expected(item, depth + 1)).collect(),
        Value::Object(fields) => fields.into_iter().map(|(key, value)| (key, expected(value, depth + 1))).collect(),
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => other,
    }
}

proptest! {
    #[test]
    fn chunk_boundaries_do_not_change_result(text in json_around_the_limit(), size in 1..9_usize) {
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
        let shallow = read("application/json", &pieces);
        prop_assert_eq!(&shallow, &cut(&text).into_bytes());
        let shallow: Value = serde_json::from_slice(&shallow).unwrap();
        prop_assert_eq!(shallow, expected(serde_json::from_str(&text).unwrap(), 0));
    }
}
