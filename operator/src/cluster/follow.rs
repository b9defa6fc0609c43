//! Follows one object by its name.
//!
//! kube's watcher is not used, because it lists first, and the operator may only get and watch these objects. The watch
//! starts at any state (version 0). Continuing from the object's own version would not work: the API server no longer
//! has that version in memory when the object has not changed for days. The watch may therefore deliver a state that is
//! older than a previous one. A writer writes with the version that it read, and reads again after a conflict.

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures_util::TryStreamExt;
use kube::Resource;
use kube::api::{Api, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::apply::display_kube_error;

/// The duration of one watch. Then the object is read again, which also finds a deletion that fell between two watches.
const WATCH_SECS: u32 = 290;
/// The time after which a silent connection is considered dead.
const SILENCE: Duration = Duration::from_secs(WATCH_SECS as u64 + 10);
/// The pause between two watches that ended normally.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after failures. It is also the longest interval between two reads of the object.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A watch that lasted this long was healthy.
const LASTED: Duration = Duration::from_secs(10);

/// Passes every observed state of the object to `see`, `None` for its absence. The same state may be passed twice. This
/// never ends.
pub async fn follow<K>(api: &Api<K>, name: &str, mut see: impl FnMut(Option<K>)) -> std::convert::Infallible
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        if let Err(error) = once(api, name, &mut see).await {
            warn!(
                name,
                path = api.resource_url(),
                error = display_kube_error(&error),
                "failed to watch an object; retrying"
            );
        }
        pause = if began.elapsed() >= LASTED { PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        tokio::time::sleep(pause).await;
    }
}

/// Reads the object, then watches it until the server or the network ends the watch.
async fn once<K>(api: &Api<K>, name: &str, mut see: impl FnMut(Option<K>)) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    see(api.get_opt(name).await?);
    // With bookmarks, an API server of 1.34 or later treats version 0 as a streaming list, which it rejects on etcd
    // 3.4.
    let params =
        WatchParams::default().fields(&format!("metadata.name={name}")).timeout(WATCH_SECS).disable_bookmarks();
    let mut events = pin!(api.watch(&params, "0").await?);
    loop {
        let Ok(event) = tokio::time::timeout(SILENCE, events.try_next()).await else {
            debug!(name, "watch timed out; restarting it");
            return Ok(());
        };
        match event? {
            None => return Ok(()),
            Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => see(Some(object)),
            Some(WatchEvent::Deleted(_)) => see(None),
            Some(WatchEvent::Bookmark(_)) => {}
            Some(WatchEvent::Error(status)) => return Err(kube::Error::Api(status)),
        }
    }
}
