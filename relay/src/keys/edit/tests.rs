use std::time::Duration;

use super::super::KeyLimits;
use super::*;

fn fields(json: &str) -> KeyFields {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"))
}

fn edits(json: &str) -> KeyEdits {
    KeyEdits::try_from(fields(json)).unwrap_or_else(|error| panic!("{json}: {error}"))
}

fn record(json: &str) -> KeyRecord {
    NewKey::try_from(fields(json)).and_then(NewKey::into_fresh).unwrap_or_else(|error| panic!("{json}: {error}")).record
}

#[test]
fn new_key_has_requested_limits() {
    let json =
        r#"{"name":" a ","expires_at":"1970-01-02T00:00:00Z","max_in_flight":3,"models":["m"],"providers":null}"#;
    let record = record(json);
    let expected = KeyLimits {
        models: Some(vec!["m".to_owned()]),
        expires_at: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(86_400)),
        max_in_flight: Some(3),
        ..KeyLimits::default()
    };
    assert_eq!((&*record.name, &record.limits, record.revision), ("a", &expected, 0));
}

#[test]
fn edit_changes_named_fields_only() {
    let mut key = record(r#"{"name":"a","max_in_flight":3,"max_queue_percent":50,"models":["m"]}"#);
    let before = key.clone();
    assert!(edits(r#"{"max_in_flight":1,"models":null}"#).apply(&mut key));
    let limits = KeyLimits { max_in_flight: Some(1), models: None, ..before.limits.clone() };
    assert_eq!(key, KeyRecord { limits, revision: 1, ..before });
}

#[test]
fn weight_and_class_have_defaults() {
    let mut key = record(r#"{"name":"a","weight":2.5,"class":"batch"}"#);
    assert_eq!((key.weight.hundredths(), key.class), (250, Class::Batch));
    assert!(edits(r#"{"weight":null,"class":null}"#).apply(&mut key));
    assert_eq!((key.weight, key.class), (Weight::default(), Class::Normal));
    assert_eq!(record(r#"{"name":"a"}"#).class, Class::Normal);
}

#[test]
fn edit_without_effect_keeps_revision() {
    let mut key = record(r#"{"name":"a","max_in_flight":3}"#);
    let before = key.clone();
    for json in ["{}", r#"{"name":"a"}"#, r#"{"max_in_flight":3,"expires_at":null}"#] {
        assert!(!edits(json).apply(&mut key), "{json}");
    }
    assert_eq!(key, before);
}

#[test]
fn rejected_field_is_named_with_allowed_values() {
    let long = |length: usize| "x".repeat(length);
    for (json, parts) in [
        (r#"{"expire_at":"1970-01-02T00:00:00Z"}"#.to_owned(), ["expire_at", "expires_at, max_in_flight"]),
        (r#"{"name":""}"#.to_owned(), ["name: ", "1 to 128 characters"]),
        (r#"{"name":null}"#.to_owned(), ["name: ", "1 to 128 characters"]),
        (r#"{"name":"a\nb"}"#.to_owned(), ["name: ", "control"]),
        (format!(r#"{{"name":"{}"}}"#, long(129)), ["name: ", "1 to 128 characters"]),
        (r#"{"max_in_flight":0}"#.to_owned(), ["max_in_flight: ", "from 1 to 4294967295"]),
        (r#"{"max_in_flight":4294967296}"#.to_owned(), ["max_in_flight: ", "from 1 to 4294967295"]),
        (r#"{"max_in_flight":1.5}"#.to_owned(), ["max_in_flight: ", "whole number"]),
        (r#"{"max_queue_percent":101}"#.to_owned(), ["max_queue_percent: ", "from 1 to 100"]),
        (r#"{"max_queue_percent":"50"}"#.to_owned(), ["max_queue_percent: ", "from 1 to 100"]),
        (r#"{"models":[]}"#.to_owned(), ["models: ", "1 to 256 names"]),
        (r#"{"models":"m"}"#.to_owned(), ["models: ", "1 to 256 names"]),
        (format!(r#"{{"models":["{}"]}}"#, long(257)), ["models: ", "at most 256 characters"]),
        (r#"{"providers":[""]}"#.to_owned(), ["providers: ", "1 to 256 names"]),
        (r#"{"tokens_per_minute":0}"#.to_owned(), ["tokens_per_minute: ", "from 1 to 1000000000000"]),
        (r#"{"tokens_per_day":1e3}"#.to_owned(), ["tokens_per_day: ", "whole number"]),
        (r#"{"weight":0}"#.to_owned(), ["weight: ", "from 0.01 to 100"]),
        (r#"{"weight":"1"}"#.to_owned(), ["weight: ", "from 0.01 to 100"]),
        (r#"{"class":"fast"}"#.to_owned(), ["class: ", "interactive, normal or batch"]),
        (r#"{"expires_at":"soon"}"#.to_owned(), ["expires_at: ", "2026-12-01T00:00:00Z"]),
    ] {
        let KeyStoreError::Invalid(why) = KeyEdits::try_from(fields(&json)).expect_err(&json) else {
            panic!("{json} is invalid");
        };
        assert!(parts.iter().all(|part| why.contains(part)), "{json}: {why}");
    }
}

#[test]
fn new_key_needs_name() {
    let error = NewKey::try_from(fields("{}")).expect_err("no name");
    assert!(matches!(&error, KeyStoreError::Invalid(why) if why.starts_with("name: missing")), "{error}");
}

#[test]
fn duplicate_field_and_other_json_are_errors() {
    for json in [r#"{"max_in_flight":1,"max_in_flight":2}"#, "[]", "null", "{"] {
        assert!(serde_json::from_str::<KeyFields>(json).is_err(), "{json}");
    }
}

#[test]
fn requested_fields_are_listed_with_short_values() {
    let long = "x".repeat(300);
    let fields = fields(&format!(r#"{{"max_in_flight":1,"models":null,"name":"{long}"}}"#));
    let expected = format!("max_in_flight=1 models=null name=\"{}…", "x".repeat(255));
    assert_eq!(fields.to_string(), expected);
}
