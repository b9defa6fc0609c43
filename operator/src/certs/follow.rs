//! Following one object by its name.
//!
//! Not kube's watcher, because that one lists first, and the operator may only get and watch these objects. The watch asks
//! for any state (version 0) and what follows. To continue from the object's own version would not do: that is long out of
//! the server's memory when the object has not changed for days. So a state may be shown that is older than one before;
//! whoever writes, writes with the version that it saw, and looks again at a conflict.

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures_util::TryStreamExt;
use kube::Resource;
use kube::api::{Api, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::inject::said;

/// For one watch; then the object is read again, which also finds a deletion that fell between two watches.
const WATCH_SECS: u32 = 290;
/// A connection that died without a word is noticed after this.
const SILENCE: Duration = Duration::from_secs(WATCH_SECS as u64 + 10);
/// Between two watches, when all is well.
const PAUSE: Duration = Duration::from_secs(1);
/// At most, when it is not: then the object is at least read so often.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A watch that lasted so long was well.
const LASTED: Duration = Duration::from_secs(10);

/// Shows every state of the object that is seen, `None` for its absence; the same one may be shown twice. It never ends.
pub(super) async fn follow<K>(api: &Api<K>, name: &str, mut see: impl FnMut(Option<K>)) -> std::convert::Infallible
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
                error = said(&error),
                "an object could not be followed; it is tried again"
            );
        }
        pause = if began.elapsed() >= LASTED { PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        tokio::time::sleep(pause).await;
    }
}

/// Reads the object, then watches it until the server or the network ends that.
async fn once<K>(api: &Api<K>, name: &str, mut see: impl FnMut(Option<K>)) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    see(api.get_opt(name).await?);
    // With bookmarks, an API server of 1.34 or later takes version 0 for a streaming list, which it refuses on etcd 3.4.
    let params =
        WatchParams::default().fields(&format!("metadata.name={name}")).timeout(WATCH_SECS).disable_bookmarks();
    let mut events = pin!(api.watch(&params, "0").await?);
    loop {
        let Ok(event) = tokio::time::timeout(SILENCE, events.try_next()).await else {
            debug!(name, "a watch went silent");
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
