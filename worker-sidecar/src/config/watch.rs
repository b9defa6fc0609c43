//! Reads `worker.yaml` again when its content changed.
//!
//! By content, each second: a mounted ConfigMap changes by swapping symbolic links, which file notifications miss. A file
//! that cannot be used leaves the last good settings in force, and says so once.

use std::path::PathBuf;
use std::time::Duration;

use super::file::File;
use super::{SettingError, Settings, read_config};
use crate::cli::Args;

const INTERVAL: Duration = Duration::from_secs(1);

/// Calls `apply` with the settings after each change of the file, and `refuse` when they cannot be used. Never returns.
pub async fn watch(args: Args, path: PathBuf, apply: impl Fn(Settings), refuse: impl Fn(&SettingError)) {
    let mut seen = read_config(&path).ok();
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // A small file on a local disk or in memory: cheaper than a trip to another thread.
        let read = read_config(&path);
        let text = read.as_ref().ok().cloned();
        if text == seen {
            continue;
        }
        seen = text;
        match read.and_then(|text| File::parse(&path, &text)).and_then(|file| Settings::resolve(&args, &file)) {
            Ok(settings) => apply(settings),
            Err(error) => refuse(&error),
        }
    }
}
