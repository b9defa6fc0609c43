//! The rules by which keys are deleted.

use std::time::{Duration, SystemTime};

use super::KeyRecord;

/// Deletes keys that were revoked at least `kept` ago; `None` keeps them all. A key that was revoked before the time of
/// revocations was stored is kept from now on. True if anything changed.
pub(super) fn forget_revoked(records: &mut Vec<KeyRecord>, kept: Option<Duration>, now: SystemTime) -> bool {
    let Some(kept) = kept else { return false };
    let before = records.len();
    records.retain(|record| !is_over(record, kept, now));
    let mut changed = records.len() < before;
    for record in records.iter_mut().filter(|record| lacks_time(record)) {
        record.revoked_at = Some(now);
        changed = true;
    }
    changed
}

/// True if [`forget_revoked`] would change the key.
pub(super) fn is_due(record: &KeyRecord, kept: Option<Duration>, now: SystemTime) -> bool {
    kept.is_some_and(|kept| is_over(record, kept, now) || lacks_time(record))
}

fn is_over(record: &KeyRecord, kept: Duration, now: SystemTime) -> bool {
    let age = record.revoked_at.and_then(|revoked_at| now.duration_since(revoked_at).ok());
    record.revoked && age.is_some_and(|age| age >= kept)
}

fn lacks_time(record: &KeyRecord) -> bool {
    record.revoked && record.revoked_at.is_none()
}

/// Deletes the oldest key that is revoked or expired, except the one with the id `kept`; `false` if there is none.
pub(super) fn forget_useless(records: &mut Vec<KeyRecord>, kept: &str, now: SystemTime) -> bool {
    let is_useless = |record: &KeyRecord| {
        record.id != kept && (record.revoked || record.limits.expires_at.is_some_and(|expires_at| now >= expires_at))
    };
    let useless = records.iter().enumerate().filter(|(_, record)| is_useless(record));
    // Another relay may not know yet of a recent revocation.
    let since = |record: &KeyRecord| record.revoked_at.or(record.limits.expires_at).unwrap_or(record.created_at);
    let oldest = useless.min_by_key(|(_, record)| since(record)).map(|(index, _)| index);
    oldest.map(|index| records.remove(index)).is_some()
}

#[cfg(test)]
mod tests {
    use super::super::KeyLimits;
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn day(number: u32) -> SystemTime {
        SystemTime::UNIX_EPOCH + DAY * number
    }

    fn record(id: &str, created_at: SystemTime) -> KeyRecord {
        KeyRecord::new(id.to_owned(), "n".to_owned(), [0; 32], created_at)
    }

    fn revoked(id: &str, revoked_at: Option<SystemTime>) -> KeyRecord {
        KeyRecord { revoked: true, revoked_at, ..record(id, day(0)) }
    }

    fn ids(records: &[KeyRecord]) -> Vec<&str> {
        records.iter().map(|record| &*record.id).collect()
    }

    #[test]
    fn revoked_key_is_forgotten_after_its_time() {
        let keys = [record("used", day(0)), revoked("early", Some(day(10))), revoked("late", Some(day(11)))];
        let after = |now| {
            let mut records = keys.to_vec();
            assert_eq!(
                keys.iter().any(|key| is_due(key, Some(DAY * 90), now)),
                forget_revoked(&mut records, Some(DAY * 90), now)
            );
            ids(&records).join(" ")
        };
        let just_before = day(100) - Duration::from_millis(1);
        assert_eq!(
            [just_before, day(100), day(101), day(5)].map(after),
            ["used early late", "used late", "used", "used early late"]
        );
    }

    #[test]
    fn revoked_key_without_time_is_kept_from_now() {
        let mut records = vec![revoked("old", None)];
        assert!(is_due(&records[0], Some(DAY), day(50)) && forget_revoked(&mut records, Some(DAY), day(50)));
        assert_eq!(records[0].revoked_at, Some(day(50)));
        assert!(!forget_revoked(&mut records, Some(DAY), day(50)));
        assert!(forget_revoked(&mut records, Some(DAY), day(51)) && records.is_empty());
    }

    #[test]
    fn revoked_keys_stay_without_limit() {
        let mut records = vec![revoked("old", None), revoked("timed", Some(day(0)))];
        let before = records.clone();
        assert!(!records.iter().any(|record| is_due(record, None, day(9999))));
        assert!(!forget_revoked(&mut records, None, day(9999)));
        assert_eq!(records, before);
    }

    #[test]
    fn oldest_unusable_key_is_forgotten() {
        let expiring = |id: &str, created_at, expires_at| KeyRecord {
            limits: KeyLimits { expires_at: Some(expires_at), ..KeyLimits::default() },
            ..record(id, created_at)
        };
        let mut records = vec![
            record("used", day(1)),
            KeyRecord { created_at: day(5), ..revoked("revoked", Some(day(6))) },
            expiring("expired", day(4), day(10)),
            expiring("expires", day(2), day(50)),
            expiring("kept", day(1), day(10)),
        ];
        let mut forgotten = Vec::new();
        while forget_useless(&mut records, "kept", day(20)) {
            forgotten.push(records.len());
        }
        assert_eq!((forgotten, ids(&records)), (vec![4, 3], vec!["used", "expires", "kept"]));
    }
}
