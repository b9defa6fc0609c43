//! Reads `worker.yaml` again when its content has changed.
//!
//! The content is compared each second: a mounted ConfigMap changes by swapping symbolic links, which file
//! notifications miss. A file that cannot be used leaves the last good settings in effect, and is logged once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Args;
use super::file::File;
use super::{SettingError, Settings, read_config};

const INTERVAL: Duration = Duration::from_secs(1);

/// Calls `apply` with the settings after each change of the file, or `refuse` if they cannot be used. Never returns.
pub async fn watch(args: Args, path: PathBuf, apply: impl Fn(Settings), refuse: impl Fn(&SettingError)) {
    let mut key_files = key_files(&args, &read_config(&path).and_then(|text| File::parse(&path, &text)));
    let mut seen = contents(&path, &key_files);
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // Small files on a local disk or in memory: reading is cheaper than a switch to another thread.
        let now = contents(&path, &key_files);
        if now == seen {
            continue;
        }
        let file = read_config(&path).and_then(|text| File::parse(&path, &text));
        if file.is_ok() {
            key_files = self::key_files(&args, &file);
        }
        seen = contents(&path, &key_files);
        match file.and_then(|file| Settings::resolve(&args, &file)) {
            Ok(settings) => apply(settings),
            Err(error) => refuse(&error),
        }
    }
}

/// Returns the content that is compared: the file, and the backends' keys that it names. (The worker's secret is
/// watched separately.)
fn contents(path: &Path, key_files: &[PathBuf]) -> Vec<Option<String>> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    std::iter::once(path).chain(key_files.iter().map(PathBuf::as_path)).map(read).collect()
}

fn key_files(args: &Args, file: &Result<File, SettingError>) -> Vec<PathBuf> {
    let file = file.as_ref().ok();
    let named = || file?.backend.as_ref()?.api_key_file.clone();
    let of_backend = args.backend_api_key_file.clone().or_else(named);
    let of_slots = file.and_then(|file| file.multiplexer.as_ref()).into_iter().flat_map(|block| block.key_files());
    of_backend.into_iter().chain(of_slots.cloned()).filter(|path| !path.as_os_str().is_empty()).collect()
}
