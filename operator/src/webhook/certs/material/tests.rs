use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn names() -> Vec<String> {
    vec!["webhook.system.svc".to_owned(), "webhook".to_owned()]
}

fn made(now: SystemTime) -> Data {
    let mut data = Data::new();
    new_authority(&mut data, now, DAY * 3650, false).unwrap();
    new_leaf(&mut data, now, DAY * 90, &names()).unwrap();
    data
}

fn garbage() -> ByteString {
    ByteString(b"garbage".to_vec())
}

#[test]
fn generated_material_is_readable_and_signed() {
    let now = SystemTime::now();
    let data = made(now);
    let contents = contents(&data, &names());
    assert!(contents.can_sign);
    assert_eq!(contents.previous, None);
    let leaf = contents.leaf.unwrap();
    assert_eq!((leaf.signer, leaf.names), (Some(Signer::Current), true));
    for (validity, lifetime) in [(leaf.validity, DAY * 90), (contents.authority.unwrap(), DAY * 3650)] {
        assert!(validity.covers(now) && validity.covers(now - BACKDATED + DAY / 1000));
        // Certificates have a resolution of whole seconds.
        assert!(validity.not_after <= now + lifetime && validity.not_after > now + lifetime - Duration::from_secs(2));
    }
}

#[test]
fn other_service_name_is_detected() {
    let other = vec!["other.system.svc".to_owned()];
    assert!(!contents(&made(SystemTime::now()), &other).leaf.unwrap().names);
}

#[test]
fn new_authority_next_to_old_keeps_certificate() {
    let now = SystemTime::now();
    let mut data = made(now);
    let before = data.clone();
    new_authority(&mut data, now, DAY, true).unwrap();
    assert_eq!(data[keys::CERTIFICATE], before[keys::CERTIFICATE]);
    let after = contents(&data, &names());
    assert_eq!(after.previous, contents(&before, &names()).authority);
    assert_eq!(after.leaf.unwrap().signer, Some(Signer::Previous));

    new_leaf(&mut data, now, DAY, &names()).unwrap();
    assert_eq!(contents(&data, &names()).leaf.unwrap().signer, Some(Signer::Current));
}

#[test]
fn bundle_contains_current_and_previous_authority() {
    let now = SystemTime::now();
    let mut data = made(now);
    assert_eq!(CertificateDer::pem_slice_iter(&bundle(&data)).count(), 1);
    new_authority(&mut data, now, DAY, true).unwrap();
    let both: Vec<_> = CertificateDer::pem_slice_iter(&bundle(&data)).map(Result::unwrap).collect();
    assert_eq!(both.len(), 2);
    assert_ne!(both[0], both[1]);
}

#[test]
fn certificate_does_not_outlive_its_authority() {
    let now = SystemTime::now();
    let mut data = Data::new();
    new_authority(&mut data, now, DAY, false).unwrap();
    new_leaf(&mut data, now, DAY * 90, &names()).unwrap();
    let contents = contents(&data, &names());
    assert_eq!(contents.leaf.unwrap().validity.not_after, contents.authority.unwrap().not_after);
}

#[test]
fn garbage_is_neither_certificate_nor_key() {
    let data = made(SystemTime::now());
    let with = |key: &str, value: ByteString| {
        let mut data = data.clone();
        data.insert(key.to_owned(), value);
        contents(&data, &names())
    };
    assert_eq!(with(keys::AUTHORITY, garbage()).authority, None);
    assert!(!with(keys::AUTHORITY_KEY, garbage()).can_sign);
    assert_eq!(with(keys::CERTIFICATE, garbage()).leaf, None);
    assert_eq!(with(keys::KEY, garbage()).leaf, None);
    assert_eq!(contents(&Data::new(), &names()).authority, None);
    // Text around a certificate would be sent to the API server, which rejects it.
    let mut noisy = data[keys::AUTHORITY].clone();
    noisy.0.splice(0..0, *b"hello\n");
    assert_eq!(with(keys::AUTHORITY, noisy).authority, None);
}

#[test]
fn mismatched_keys_are_rejected() {
    let (data, other) = (made(SystemTime::now()), made(SystemTime::now()));
    let with = |key: &str| {
        let mut data = data.clone();
        data.insert(key.to_owned(), other[key].clone());
        contents(&data, &names())
    };
    assert!(!with(keys::AUTHORITY_KEY).can_sign);
    assert_eq!(with(keys::KEY).leaf, None);
    let mut pair = data.clone();
    for key in [keys::KEY, keys::CERTIFICATE] {
        pair.insert(key.to_owned(), other[key].clone());
    }
    assert_eq!(contents(&pair, &names()).leaf.unwrap().signer, None);
}

#[test]
fn errors_name_secret_key_without_its_value() {
    let mut data = made(SystemTime::now());
    data.insert(keys::KEY.to_owned(), ByteString(b"sesame".to_vec()));
    let error = served(&data).err().unwrap().to_string();
    assert!(error.starts_with("tls.key: ") && !error.contains("sesame"), "{error}");
    data.remove(keys::CERTIFICATE);
    assert_eq!(served(&data).err().unwrap().to_string(), "tls.crt is missing");
}
