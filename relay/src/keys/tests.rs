use super::*;

const NOW: SystemTime = SystemTime::UNIX_EPOCH;

fn later(seconds: u64) -> SystemTime {
    NOW + Duration::from_secs(seconds)
}

fn key(limits: KeyLimits) -> (KeySet, String, String) {
    let fresh = generate::fresh().expect("random");
    let record = KeyRecord {
        id: fresh.id.clone(),
        name: "n".to_owned(),
        sha256: fresh.sha256,
        created_at: NOW,
        last_used_at: None,
        revoked: false,
        limits,
    };
    (KeySet::default().renewed(vec![record]), fresh.id, fresh.whole)
}

#[test]
fn oldest_unusable_key_is_forgotten() {
    let record = |id: &str, age: u64, revoked: bool, expires_at: Option<SystemTime>| KeyRecord {
        id: id.to_owned(),
        name: "n".to_owned(),
        sha256: [0; 32],
        created_at: later(1000 - age),
        last_used_at: None,
        revoked,
        limits: KeyLimits { expires_at, ..KeyLimits::default() },
    };
    let mut records = vec![
        record("used", 900, false, None),
        record("revoked", 500, true, None),
        record("expired", 600, false, Some(later(10))),
        record("expires", 800, false, Some(later(5000))),
    ];
    let mut forgotten = Vec::new();
    while forget_useless(&mut records, later(2000)) {
        forgotten.push(records.len());
    }
    assert_eq!(forgotten, [3, 2]);
    assert_eq!(records.iter().map(|record| &*record.id).collect::<Vec<_>>(), ["used", "expires"]);
}

#[test]
fn only_whole_key_verifies() {
    let (keys, id, whole) = key(KeyLimits::default());
    assert_eq!(keys.verify(&whole, NOW).expect("valid").id(), id);
    let wrong = [
        String::new(),
        whole[..whole.len() - 1].to_owned(),
        format!("{whole}x"),
        whole.to_uppercase(),
        format!("mr-{id}-"),
        format!("mr-other-{id}"),
    ];
    for presented in wrong {
        assert_eq!(keys.verify(&presented, NOW).expect_err(&presented), KeyRejection::Unknown);
    }
}

#[test]
fn key_is_rejected_from_its_expiry() {
    let (keys, _, whole) = key(KeyLimits { expires_at: Some(later(10)), ..KeyLimits::default() });
    assert!(keys.verify(&whole, later(9)).is_ok());
    assert_eq!(keys.verify(&whole, later(10)).expect_err("expired"), KeyRejection::Expired);
}

#[test]
fn key_without_limits_allows_everything() {
    let (keys, _, whole) = key(KeyLimits::default());
    let key = keys.verify(&whole, NOW).expect("valid");
    assert!(key.allows_provider("any") && key.allows_model("any"));
    let leases: Vec<_> = (0..1000).map(|_| key.acquire().expect("no limit")).collect();
    assert_eq!(key.info().in_flight, 1000);
    drop(leases);
    assert_eq!(key.info().in_flight, 0);
}

#[test]
fn key_with_limits_allows_only_listed_names() {
    let list = |name: &str| Some(vec![name.to_owned()]);
    let (keys, _, whole) = key(KeyLimits { providers: list("local"), models: list("m"), ..KeyLimits::default() });
    let key = keys.verify(&whole, NOW).expect("valid");
    assert!(key.allows_provider("local") && !key.allows_provider("other"));
    assert!(key.allows_model("m") && !key.allows_model("M"));
}

#[test]
fn in_flight_limit_spans_snapshots() {
    let (keys, id, whole) = key(KeyLimits { max_in_flight: Some(2), ..KeyLimits::default() });
    let key = keys.verify(&whole, NOW).expect("valid");
    let first = key.acquire().expect("room");
    let renewed = keys.renewed(keys.records());
    let same = renewed.lookup(&id).expect("the key");
    let _second = same.acquire().expect("room");
    assert_eq!(key.acquire().expect_err("full"), KeyLimit { max_in_flight: 2 });
    drop(first);
    assert!(same.acquire().is_ok());
}

#[test]
fn last_use_is_listed_and_never_decreases() {
    let (keys, id, whole) = key(KeyLimits::default());
    assert_eq!(keys.lookup(&id).expect("the key").info().last_used_at, None);
    keys.verify(&whole, later(60)).expect("valid");
    keys.verify(&whole, later(30)).expect("valid");
    let info = keys.renewed(keys.records()).lookup(&id).expect("the key").info();
    assert_eq!((info.last_used.as_deref(), info.last_used_at), (Some("1970-01-01T00:01:00.000Z"), Some(60)));
}

#[test]
fn listed_key_shows_prefix_but_no_secret() {
    let (keys, id, whole) = key(KeyLimits { max_in_flight: Some(1), ..KeyLimits::default() });
    let key = keys.verify(&whole, NOW).expect("valid");
    let json = serde_json::to_value(key.info()).expect("json");
    assert_eq!((json["prefix"].clone(), json["max_in_flight"].clone()), (format!("mr-{id}").into(), 1.into()));
    let secret = whole.rsplit('-').next().expect("a secret");
    for text in [json.to_string(), format!("{key:?}"), format!("{keys:?}")] {
        assert!(!text.contains(secret) && !text.contains("sha256"), "{text}");
    }
}

#[test]
fn new_key_request_is_validated() {
    let limits = KeyLimits::default;
    assert!(NewKey::new("  fine ", limits()).is_ok());
    for (name, limits) in [
        ("", limits()),
        ("a\nb", limits()),
        (&"x".repeat(129), limits()),
        ("a", KeyLimits { max_in_flight: Some(0), ..limits() }),
        ("a", KeyLimits { max_queue_percent: Some(0), ..limits() }),
        ("a", KeyLimits { max_queue_percent: Some(101), ..limits() }),
        ("a", KeyLimits { models: Some(Vec::new()), ..limits() }),
        ("a", KeyLimits { providers: Some(vec![String::new()]), ..limits() }),
    ] {
        assert!(matches!(NewKey::new(name, limits), Err(KeyStoreError::Invalid(_))));
    }
}

#[test]
fn key_request_accepts_limits_but_no_unknown_field() {
    let new_key =
        |json: &str| serde_json::from_str::<KeyRequest>(json).ok().and_then(|request| NewKey::try_from(request).ok());
    assert_eq!(new_key(r#"{"name":"a"}"#), NewKey::new("a", KeyLimits::default()).ok());
    let limits = KeyLimits { expires_at: Some(later(86_400)), max_in_flight: Some(3), ..KeyLimits::default() };
    let json = r#"{"name":"a","expires_at":"1970-01-02T00:00:00Z","max_in_flight":3,"models":null}"#;
    assert_eq!(new_key(json), NewKey::new("a", limits).ok());
    for json in [r#"{"name":"a","expire_at":"1970-01-02T00:00:00Z"}"#, r#"{"name":"a","expires_at":"soon"}"#, "{}"] {
        assert_eq!(new_key(json), None, "{json}");
    }
}
