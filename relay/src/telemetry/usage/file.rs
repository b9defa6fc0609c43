//! `USAGE_FILE`: a JSON object per line with the sums that were added to a row.
//!
//! The rows of the ledger are the sums over all lines. The file is written again with one line per row at the start,
//! once a day, and when it has grown to twice that size: a new file is written, synced, and renamed over the old one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;

use modelrelay_platform::files;
use tracing::{error, warn};

use super::day::Day;
use super::table::{RowKey, UsageFilter, UsageRow, UsageTable};
use crate::telemetry::append_file::{AppendFile, next_to};

/// The size below which the file is not written again while the relay runs: about 12,000 lines.
pub(super) const MIN_REWRITE_BYTES: u64 = 4 << 20;

/// The longest line: names have at most 256 characters, each of which JSON may escape with twelve bytes.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// The most damaged lines that are reported one by one.
const MAX_REPORTS: u64 = 10;

/// The file of one relay.
#[derive(Debug)]
pub(super) struct UsageFile {
    lines: AppendFile,
    /// The size at which it is written again.
    rewrite_at: u64,
    min_rewrite: u64,
    /// Locked as long as this relay runs, since two relays that write one file would lose sums.
    _lock: File,
}

impl UsageFile {
    /// Opens or creates the file, reads the rows of `first` and later days, and writes it again without the rest.
    pub(super) fn open(path: &Path, first: Day, min_rewrite: u64) -> io::Result<(Self, UsageTable)> {
        // A link is followed now: a rename over it would replace the link, not its target.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        if fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::other("it is no regular file"));
        }
        let lock = lock(&path)?;
        // An error of a write is noticed now, and not after a day of requests.
        let lines = AppendFile::open_limited(path.clone(), u64::MAX)?;
        let mut read = read(&path)?;
        read.table.expire(first);
        let mut file = Self { lines, rewrite_at: min_rewrite, min_rewrite, _lock: lock };
        if read.damaged > 0 {
            keep_damaged(&path, read.damaged);
        }
        if let Err(error) = file.rewrite(&read.table) {
            warn!(file = %path.display(), %error, "cannot write the usage file again; it grows until this is possible");
        }
        Ok((file, read.table))
    }

    /// The path.
    pub(super) fn path(&self) -> &Path {
        self.lines.path()
    }

    /// Appends sums. After an error, none of them are in the file.
    pub(super) fn append(&mut self, added: &UsageTable) -> io::Result<()> {
        let mut lines = Vec::new();
        encode(added, &mut lines)?;
        self.lines.write(&lines)
    }

    /// Makes what was written survive a failure of the machine.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.lines.sync()
    }

    /// True if the file should be written again.
    pub(super) fn is_grown(&self) -> bool {
        fs::metadata(self.path()).is_ok_and(|file| file.len() >= self.rewrite_at)
    }

    /// Writes the file again with one line per row; after an error, the old one is unchanged.
    pub(super) fn rewrite(&mut self, table: &UsageTable) -> io::Result<()> {
        let path = self.path();
        let written = files::replace_private(path, &next_to(path, ".new"), |file| encode(table, file));
        if let (Ok(_), Err(error)) = (&written, files::sync_folder(files::folder_of(path))) {
            // The new file is in place; only its name may not survive a failure of the machine.
            warn!(file = %path.display(), %error, "cannot sync the folder of the usage file");
        }
        if written.is_err() {
            // The next attempt is not made with each line.
            self.rewrite_at = self.rewrite_at.saturating_add(self.min_rewrite);
        }
        self.rewrite_at = written?.saturating_mul(2).max(self.min_rewrite);
        Ok(())
    }
}

/// Locks a file next to the usage file, which is replaced and therefore no place for a lock.
fn lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = files::with_mode(options.append(true).create(true), files::OWNER_ONLY).open(next_to(path, ".lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => {
            Err(io::Error::other("another relay writes it; each relay needs a file of its own"))
        }
        // Some network file systems have no locks.
        Err(fs::TryLockError::Error(_)) => Ok(file),
    }
}

fn encode(table: &UsageTable, writer: &mut impl Write) -> io::Result<()> {
    for row in table.rows(&UsageFilter::default()) {
        serde_json::to_writer(&mut *writer, &row)?;
        writer.write_all(b"\n")?;
    }
    Ok(())
}

struct ReadLines {
    table: UsageTable,
    /// The number of lines that have no meaning, without an incomplete last one.
    damaged: u64,
}

fn read(path: &Path) -> io::Result<ReadLines> {
    let mut reader = BufReader::new(File::open(path)?);
    let (mut table, mut damaged, mut number, mut line) = (UsageTable::default(), 0, 0u64, Vec::new());
    while next_line(&mut reader, &mut line)? {
        number += 1;
        let is_complete = line.last() == Some(&b'\n');
        match serde_json::from_slice::<UsageRow<'_>>(&line) {
            Ok(row) => add(&mut table, &row),
            Err(_) if line.trim_ascii().is_empty() => {}
            Err(_) if !is_complete => {
                let file = path.display();
                warn!(%file, line = number, "the last line of the usage file is incomplete and is skipped; the relay was killed while it wrote");
            }
            Err(problem) => {
                damaged += 1;
                if damaged <= MAX_REPORTS {
                    error!(file = %path.display(), line = number, %problem, "a line of the usage file is damaged and is skipped");
                }
            }
        }
    }
    Ok(ReadLines { table, damaged })
}

/// Reads a line with its end, cut to the longest one.
fn next_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let read = Read::take(&mut *reader, MAX_LINE_BYTES).read_until(b'\n', line)?;
    if read as u64 == MAX_LINE_BYTES && line.last() != Some(&b'\n') {
        reader.skip_until(b'\n')?;
        line.push(b'\n');
    }
    Ok(read > 0)
}

fn add(table: &mut UsageTable, row: &UsageRow<'_>) {
    let key = RowKey { key_id: row.key_id.as_deref().map(Arc::from), model: row.model.as_ref().into() };
    table.add(row.day, key, row.key.as_deref(), &row.sums);
}

/// Copies a damaged file before it is written again without the damaged lines.
fn keep_damaged(path: &Path, lines: u64) {
    let (file, copy) = (path.display(), next_to(path, ".damaged"));
    match fs::copy(path, &copy) {
        Ok(_) => {
            let copy = copy.display();
            error!(%file, %copy, lines, "damaged lines of the usage file are skipped; a copy of it is kept");
        }
        Err(error) => {
            error!(%file, %error, lines, "damaged lines of the usage file are skipped; it cannot be copied");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::usage::sums::{RequestCounts, UsageSums};

    const FIRST: &str = "2026-01-01";

    fn open(path: &Path) -> (UsageFile, UsageTable) {
        UsageFile::open(path, Day::parse(FIRST).unwrap(), 1000).unwrap()
    }

    fn sums(tokens: u64) -> UsageSums {
        UsageSums {
            requests: RequestCounts { answered: 1, failed: 2, cancelled: 3, refused: 4 },
            input_tokens: tokens,
            cached_tokens: 5,
            output_tokens: 6,
            estimated_input_tokens: 7,
            estimated_output_tokens: 8,
            slot_time: Duration::from_micros(1_500_001),
            wait_time: Duration::from_millis(20),
        }
    }

    fn table(day: &str, id: Option<&str>, tokens: u64) -> UsageTable {
        let mut table = UsageTable::default();
        let key = RowKey { key_id: id.map(Into::into), model: "qwen \"7b\"".into() };
        table.add(Day::parse(day).unwrap(), key, id.map(|_| "läptop"), &sums(tokens));
        table
    }

    fn rows(table: &UsageTable) -> Vec<String> {
        table.rows(&UsageFilter::default()).map(|row| serde_json::to_string(&row).unwrap()).collect()
    }

    #[test]
    fn appended_sums_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let (mut file, empty) = open(&path);
        assert!(empty.is_empty());
        let mut expected = UsageTable::default();
        for added in
            [table("2026-11-25", Some("k1"), 1), table("2026-11-25", Some("k1"), 2), table("2026-11-26", None, 3)]
        {
            file.append(&added).unwrap();
            expected.merge(&added);
        }
        file.sync().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 3);
        let first = r#"{"day":"2026-11-25","key_id":"k1","key":"läptop","model":"qwen \"7b\"","requests":{"answered":1,"failed":2,"cancelled":3,"refused":4},"input_tokens":1,"cached_tokens":5,"output_tokens":6,"estimated_input_tokens":7,"estimated_output_tokens":8,"slot_seconds":1.500001,"wait_seconds":0.02}"#;
        assert_eq!(text.lines().next(), Some(first));
        drop(file);
        let (_file, again) = open(&path);
        assert_eq!(rows(&again), rows(&expected));
        // One line per row from now on.
        assert_eq!(fs::read_to_string(&path).unwrap().lines().collect::<Vec<_>>(), rows(&expected));
    }

    #[test]
    fn grown_file_is_written_again_with_same_sums() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let (mut file, mut total) = open(&path);
        let mut largest = 0;
        for tokens in 0..100 {
            let added = table("2026-11-25", Some("k1"), tokens);
            file.append(&added).unwrap();
            total.merge(&added);
            largest = largest.max(fs::metadata(&path).unwrap().len());
            if file.is_grown() {
                file.rewrite(&total).unwrap();
            }
        }
        assert!((1000..1400).contains(&largest), "{largest}");
        drop(file);
        assert_eq!(rows(&open(&path).1), rows(&total));
        let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }

    #[test]
    fn incomplete_last_line_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let [first, second] = [1, 2].map(|tokens| rows(&table("2026-11-25", None, tokens)).remove(0));
        fs::write(&path, format!("{first}\n{}", &second[..second.len() / 2])).unwrap();
        assert_eq!(rows(&open(&path).1), [&*first]);
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{first}\n"));
        assert!(!next_to(&path, ".damaged").exists());
    }

    #[test]
    fn damaged_line_is_skipped_and_kept_in_copy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let good = rows(&table("2026-11-25", None, 1)).remove(0);
        let long = "x".repeat(3 * MAX_LINE_BYTES as usize);
        let wrong_day = good.replace("2026-11-25", "2026-11-31");
        let text = format!("garbage\n{good}\n{wrong_day}\n{long}\n\n{good}\n");
        fs::write(&path, &text).unwrap();
        assert_eq!(
            rows(&open(&path).1),
            [good
                .replace("\"input_tokens\":1", "\"input_tokens\":2")
                .replace(
                    "\"answered\":1,\"failed\":2,\"cancelled\":3,\"refused\":4",
                    "\"answered\":2,\"failed\":4,\"cancelled\":6,\"refused\":8"
                )
                .replace("\"cached_tokens\":5,\"output_tokens\":6", "\"cached_tokens\":10,\"output_tokens\":12")
                .replace(
                    "\"estimated_input_tokens\":7,\"estimated_output_tokens\":8",
                    "\"estimated_input_tokens\":14,\"estimated_output_tokens\":16"
                )
                .replace("1.500001", "3.000002")
                .replace("0.02", "0.04")]
        );
        assert_eq!(fs::read_to_string(next_to(&path, ".damaged")).unwrap(), text);
    }

    #[test]
    fn days_before_first_are_deleted_at_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let [old, new] = ["2025-12-31", FIRST].map(|day| rows(&table(day, None, 1)).remove(0));
        fs::write(&path, format!("{old}\n{new}\n")).unwrap();
        assert_eq!(rows(&open(&path).1), [&*new]);
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{new}\n"));
    }

    #[test]
    fn second_relay_is_refused_until_first_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.jsonl");
        let first = open(&path);
        let error = UsageFile::open(&path, Day::parse(FIRST).unwrap(), 1000).unwrap_err();
        assert!(error.to_string().contains("another relay"), "{error}");
        drop(first);
        open(&path);
    }

    #[cfg(unix)]
    #[test]
    fn file_is_private_and_link_is_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["usage.jsonl", "link.jsonl"].map(|name| folder.path().join(name));
        fs::write(&path, "").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let (mut file, _) = open(&link);
        file.append(&table("2026-11-25", None, 1)).unwrap();
        file.rewrite(&table("2026-11-25", None, 1)).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(UsageFile::open(Path::new("/dev/null"), Day::parse(FIRST).unwrap(), 1000).is_err());
    }
}
