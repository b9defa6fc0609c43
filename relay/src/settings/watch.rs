//! Follows `relay.yaml` while the relay runs.
//!
//! Each second the file and the secret files it names are read again and compared by content, because a change of a
//! mounted Secret (a swapped symlink) shows in no modification time that could be trusted. On Linux, a change in the
//! file's folder is reported, and the files are read at once. A valid change is passed on.
//! An invalid one leaves the previous configuration in effect, is logged once, and shows in [`ConfigStatus`] and in
//! `config_last_reload_successful` until the file is valid again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use modelrelay_platform::folder::FolderWatch;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::settings::cli::Args;
use crate::settings::config::{Config, Sources};
use crate::settings::error::ConfigError;
use crate::system::blocking;
use crate::system::file_watch::INTERVAL;
use crate::telemetry::metrics::Metrics;

/// The minimum time between two reads: the folder may contain files that other programs write continuously.
const LEAST_INTERVAL: Duration = Duration::from_millis(50);

/// The configuration's status, for `/readyz` and `/admin/state`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigStatus {
    /// The hash of the active configuration.
    pub hash: String,
    /// The time at which it was loaded.
    pub loaded_at: SystemTime,
    /// Why the present file is not in effect; `None` if it is.
    pub last_error: Option<String>,
}

/// The active configuration and its status.
#[derive(Clone)]
pub struct ConfigWatch {
    configs: watch::Receiver<Arc<Config>>,
    status: Arc<ArcSwap<ConfigStatus>>,
}

impl ConfigWatch {
    /// Starts with a loaded configuration and follows its file, if it has one, until the returned value and all its
    /// clones are dropped. Needs a tokio runtime.
    pub fn start(args: Args, config: Config, metrics: Arc<Metrics>) -> Self {
        Self::start_every(INTERVAL, args, config, metrics)
    }

    fn start_every(interval: Duration, args: Args, config: Config, metrics: Arc<Metrics>) -> Self {
        let path = config.config_file.clone();
        let follower = Follower::new(args, &config, metrics);
        let status = Arc::clone(&follower.status);
        let (sender, configs) = watch::channel(Arc::new(config));
        if let Some(path) = path {
            tokio::spawn(follow(follower, path, interval, sender));
        }
        Self { configs, status }
    }

    /// The active configuration.
    pub fn current(&self) -> Arc<Config> {
        Arc::clone(&self.configs.borrow())
    }

    /// Waits for a configuration that this value has not returned yet; never completes without a file.
    pub async fn next(&mut self) -> Arc<Config> {
        if self.configs.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        Arc::clone(&self.configs.borrow_and_update())
    }

    /// The status, for `/readyz`; it needs no lock.
    pub fn status(&self) -> Arc<ConfigStatus> {
        self.status.load_full()
    }
}

impl std::fmt::Debug for ConfigWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigWatch").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// The result of one read of the file.
enum ConfigRead {
    Unchanged,
    Changed(Box<Config>),
    Refused(ConfigError),
}

struct Follower {
    args: Args,
    status: Arc<ArcSwap<ConfigStatus>>,
    metrics: Arc<Metrics>,
}

async fn follow(mut follower: Follower, path: PathBuf, interval: Duration, sender: watch::Sender<Arc<Config>>) {
    let mut ticks = tokio::time::interval(interval);
    // After a suspension of the machine one read is enough.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut folder = FolderWatch::around(&path);
    loop {
        tokio::select! {
            () = sender.closed() => return,
            _ = ticks.tick() => {}
            () = folder.changed() => {}
        }
        // A file on a network mount may be slow, and must not block a worker thread.
        let here = path.clone();
        let reading = blocking::run(move || {
            let found = follower.read(&here);
            (follower, found)
        });
        let Ok((back, found)) = reading.await else {
            return;
        };
        follower = back;
        if let Some(config) = found {
            sender.send_replace(Arc::new(config));
        }
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(interval.min(LEAST_INTERVAL)) => {}
        }
    }
}

impl Follower {
    fn new(args: Args, config: &Config, metrics: Arc<Metrics>) -> Self {
        metrics.config_loaded(&config.hash);
        let status = ConfigStatus { hash: config.hash.clone(), loaded_at: SystemTime::now(), last_error: None };
        Self { args, status: Arc::new(ArcSwap::from_pointee(status)), metrics }
    }

    fn read(&self, path: &Path) -> Option<Config> {
        self.handle(read_config(&self.args, path, &self.status.load().hash))
    }

    /// Records the result; returns a configuration that has to become active.
    fn handle(&self, read: ConfigRead) -> Option<Config> {
        let before = self.status.load_full();
        match read {
            ConfigRead::Unchanged => {
                if before.last_error.is_some() {
                    tracing::info!(hash = before.hash, "configuration file reverted to the active configuration");
                    self.metrics.config_loaded(&before.hash);
                    self.status.store(Arc::new(ConfigStatus { last_error: None, ..(*before).clone() }));
                }
                None
            }
            ConfigRead::Changed(config) => {
                tracing::info!(hash = config.hash, "configuration loaded");
                for warning in &config.warnings {
                    tracing::warn!("{warning}");
                }
                self.metrics.config_loaded(&config.hash);
                let status = ConfigStatus { hash: config.hash.clone(), loaded_at: SystemTime::now(), last_error: None };
                self.status.store(Arc::new(status));
                Some(*config)
            }
            ConfigRead::Refused(error) => {
                let error = error.to_string();
                if before.last_error.as_ref() != Some(&error) {
                    tracing::error!(error, "reload failed; keeping previous configuration");
                    self.metrics.config_refused();
                    self.status.store(Arc::new(ConfigStatus { last_error: Some(error), ..(*before).clone() }));
                }
                None
            }
        }
    }
}

fn read_config(args: &Args, path: &Path, hash: &str) -> ConfigRead {
    let sources = match Sources::read(path) {
        Ok(sources) if sources.hash() == hash => return ConfigRead::Unchanged,
        Ok(sources) => sources,
        Err(error) => return ConfigRead::Refused(error),
    };
    match Config::from_sources(args, &sources) {
        Ok(config) => ConfigRead::Changed(Box::new(config)),
        Err(error) => ConfigRead::Refused(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ONE: &str = "providers: [{name: one, workerSecrets: [{file: secret}]}]";

    struct Fixture {
        folder: tempfile::TempDir,
        args: Args,
        config: Config,
        follower: Follower,
    }

    fn fixture() -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("relay.yaml"), ONE).expect("a file");
        fs::write(folder.path().join("secret"), "first").expect("a file");
        let (args, config) = load(folder.path());
        let follower = Follower::new(args.clone(), &config, Arc::new(Metrics::new()));
        Fixture { folder, args, config, follower }
    }

    fn load(folder: &Path) -> (Args, Config) {
        let path = folder.join("relay.yaml");
        let args = Args::load_from(["relay", "--config", path.to_str().expect("utf-8")]).expect("valid");
        let config = Config::from_args(&args).expect("valid");
        (args, config)
    }

    impl Fixture {
        fn write(&self, name: &str, text: &str) {
            fs::write(self.folder.path().join(name), text).expect("a file");
        }

        fn read(&self) -> Option<Config> {
            self.follower.read(&self.folder.path().join("relay.yaml"))
        }

        fn status(&self) -> Arc<ConfigStatus> {
            self.follower.status.load_full()
        }

        fn reload_successful(&self) -> bool {
            let text = self.follower.metrics.render(&crate::telemetry::metrics::RelayGauges::default);
            text.contains("\nmodelrelay_config_last_reload_successful 1\n")
        }
    }

    #[test]
    fn changed_file_is_reported_once() {
        let fixture = fixture();
        assert!(fixture.read().is_none());
        fixture.write("relay.yaml", "providers: [{name: two}]");
        let config = fixture.read().expect("a change");
        assert_eq!((config.providers[0].name.as_str(), &fixture.status().hash), ("two", &config.hash));
        assert!(fixture.read().is_none());
    }

    #[test]
    fn changed_secret_is_reported() {
        let fixture = fixture();
        fixture.write("secret", "second");
        let provider = fixture.read().expect("a change").providers.remove(0);
        assert!(provider.admits("second", SystemTime::now()) && !provider.admits("first", SystemTime::now()));
    }

    #[test]
    fn invalid_file_keeps_previous_configuration_and_reports_error() {
        let fixture = fixture();
        fixture.write("relay.yaml", "providers: [{name: one, queue: {timeout: 30x}}]");
        assert!(fixture.read().is_none() && fixture.read().is_none());
        let status = fixture.status();
        let error = status.last_error.as_deref().expect("an error");
        assert!(error.contains("providers[0].queue.timeout: \"30x\""), "{error}");
        assert!(status.hash == fixture.config.hash && !fixture.reload_successful());
        fixture.write("relay.yaml", ONE);
        assert!(fixture.read().is_none());
        assert!(fixture.status().last_error.is_none() && fixture.reload_successful());
    }

    #[test]
    fn removed_or_emptied_file_is_invalid() {
        let fixture = fixture();
        fixture.write("relay.yaml", "");
        assert!(fixture.read().is_none() && fixture.status().last_error.is_some());
        fs::remove_file(fixture.folder.path().join("relay.yaml")).expect("removed");
        assert!(fixture.read().is_none());
        assert!(fixture.status().last_error.as_ref().is_some_and(|error| error.contains("cannot read the file")));
    }

    #[test]
    fn swapped_symlink_is_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        for (version, name) in [("v1", "one"), ("v2", "two")] {
            fs::create_dir(folder.path().join(version)).expect("a folder");
            fs::write(folder.path().join(version).join("relay.yaml"), format!("providers: [{{name: {name}}}]"))
                .expect("a file");
        }
        let link = |version: &str| {
            std::os::unix::fs::symlink(version, folder.path().join("..new")).expect("a link");
            fs::rename(folder.path().join("..new"), folder.path().join("..data")).expect("swapped");
        };
        link("v1");
        std::os::unix::fs::symlink("..data/relay.yaml", folder.path().join("relay.yaml")).expect("a link");
        let (args, config) = load(folder.path());
        let follower = Follower::new(args, &config, Arc::new(Metrics::new()));
        link("v2");
        let config = follower.read(&folder.path().join("relay.yaml")).expect("a change");
        assert_eq!(config.providers[0].name, "two");
    }

    #[tokio::test]
    async fn waiter_receives_new_configuration() {
        let fixture = fixture();
        let metrics = Arc::new(Metrics::new());
        let interval = Duration::from_millis(1);
        let mut watch = ConfigWatch::start_every(interval, fixture.args.clone(), fixture.config.clone(), metrics);
        fixture.write("relay.yaml", "providers: [{name: two}]");
        // If an editor is slower than the interval, the watch may see a half-written file; only the last state matters.
        let config = watch.next().await;
        assert_eq!(
            (config.providers[0].name.as_str(), &watch.status().hash, &watch.current().hash),
            ("two", &config.hash, &config.hash)
        );
    }

    /// Changes the file as a kubelet does, with an interval that never ends: only the folder's report is left.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn swapped_folder_is_read_before_next_interval() {
        let folder = tempfile::tempdir().expect("a folder");
        let publish = |name: &str| {
            fs::create_dir(folder.path().join(name)).expect("a folder");
            fs::write(folder.path().join(name).join("relay.yaml"), format!("providers: [{{name: {name}}}]"))
                .expect("a file");
            std::os::unix::fs::symlink(name, folder.path().join("..data_tmp")).expect("a link");
            fs::rename(folder.path().join("..data_tmp"), folder.path().join("..data")).expect("swapped");
        };
        publish("one");
        std::os::unix::fs::symlink("..data/relay.yaml", folder.path().join("relay.yaml")).expect("a link");
        let (args, config) = load(folder.path());
        let never = Duration::from_secs(1 << 30);
        let mut watch = ConfigWatch::start_every(never, args, config, Arc::new(Metrics::new()));
        // The first change may be seen by the first read, which is immediate.
        for name in ["two", "three", "four"] {
            publish(name);
            let config =
                tokio::time::timeout(Duration::from_secs(30), watch.next()).await.expect("the folder's report");
            assert_eq!(config.providers[0].name, name);
        }
    }

    #[tokio::test]
    async fn environment_configuration_is_not_watched() {
        let args = Args::load_from(["relay", "--worker-secret", "0123456789abcdef"]).expect("valid");
        let config = Config::from_args(&args).expect("valid");
        let watch = ConfigWatch::start(args, config, Arc::new(Metrics::new()));
        assert_eq!(watch.current().providers.len(), 1);
        assert!(watch.configs.has_changed().is_err(), "the sender is gone");
    }
}
