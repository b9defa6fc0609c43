//! Reads `worker.yaml` again when its content changed.
//!
//! By content, each second: a mounted ConfigMap changes by swapping symbolic links, which file notifications miss. A file
//! that cannot be used leaves the last good settings in force, and says so once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::file::File;
use super::{SettingError, Settings, read_config};
use crate::cli::Args;

const INTERVAL: Duration = Duration::from_secs(1);

/// Calls `apply` with the settings after each change of the file, and `refuse` when they cannot be used. Never returns.
pub async fn watch(args: Args, path: PathBuf, apply: impl Fn(Settings), refuse: impl Fn(&SettingError)) {
    let mut key_file = key_file(&args, &read_config(&path).and_then(|text| File::parse(&path, &text)));
    let mut seen = contents(&path, key_file.as_deref());
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // Small files on a local disk or in memory: cheaper than a trip to another thread.
        let now = contents(&path, key_file.as_deref());
        if now == seen {
            continue;
        }
        let file = read_config(&path).and_then(|text| File::parse(&path, &text));
        key_file = self::key_file(&args, &file).or(key_file);
        seen = contents(&path, key_file.as_deref());
        match file.and_then(|file| Settings::resolve(&args, &file)) {
            Ok(settings) => apply(settings),
            Err(error) => refuse(&error),
        }
    }
}

/// What a change is told by: the file, and the backend's key, which it names. (The worker's secret is looked at for itself.)
fn contents(path: &Path, key_file: Option<&Path>) -> [Option<String>; 2] {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    [read(path), key_file.and_then(read)]
}

fn key_file(args: &Args, file: &Result<File, SettingError>) -> Option<PathBuf> {
    let named = || file.as_ref().ok()?.backend.api_key_file.clone();
    args.backend_api_key_file.clone().or_else(named).filter(|path| !path.as_os_str().is_empty())
}
