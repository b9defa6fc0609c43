//! Compares what a builder made with the file that says what it should be.

use std::path::PathBuf;

/// `UPDATE_SNAPSHOTS=1` writes the file instead; the difference is then read before it is committed.
pub(crate) fn assert_matches(name: &str, actual: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("src/manifests/snapshots/{name}.yaml"));
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, actual).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    if let Some(line) = expected.lines().zip(actual.lines()).position(|(expected, actual)| expected != actual) {
        let of = |text: &str| text.lines().nth(line).unwrap_or_default().to_owned();
        panic!("{name}.yaml line {}: expected {:?}, built {:?}", line + 1, of(&expected), of(actual));
    }
    assert_eq!(expected.lines().count(), actual.lines().count(), "{name}.yaml has another number of lines");
}
