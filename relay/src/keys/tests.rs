use super::*;

const NOW: SystemTime = SystemTime::UNIX_EPOCH;

fn later(seconds: u64) -> SystemTime {
    NOW + Duration::from_secs(seconds)
}

fn key(limits: KeyLimits) -> (KeySet, String, String) {
    let fresh = generate::fresh().expect("random");
    let record = KeyRecord::new(fresh.id.clone(), "n".to_owned(), fresh.sha256, NOW);
    let record = KeyRecord { limits, ..record };
    (KeySet::default().renewed(vec![record]), fresh.id, fresh.whole)
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
fn changed_key_keeps_its_usage() {
    let (keys, id, whole) = key(KeyLimits { max_in_flight: Some(2), ..KeyLimits::default() });
    let _lease = keys.verify(&whole, later(60)).expect("valid").acquire().expect("room");
    let mut records = keys.records();
    records[0].limits.max_in_flight = Some(1);
    let changed = keys.renewed(records);
    let key = changed.lookup(&id).expect("the key");
    assert_eq!((key.info().in_flight, key.info().last_used_at), (1, Some(60)));
    assert_eq!(key.acquire().expect_err("full"), KeyLimit { max_in_flight: 1 });
}
