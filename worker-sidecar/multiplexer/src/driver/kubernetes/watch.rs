//! Follows the Pods of one Deployment: a list, then the changes after it, and a new list whenever the watch ends.
//!
//! A watch that fails (the API server restarts, a Role lacks `watch`, a version is too old) costs nothing but time:
//! Pods are listed again each second.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::api::{Api, PodChange, Watch};
use super::pods::{self, Pod, PodsState};
use crate::driver::DriverError;

/// The least time between two lists.
const LIST_PAUSE: Duration = Duration::from_secs(1);

/// The Pods of a Deployment, and how they are followed.
#[derive(Debug)]
pub(super) struct Followed<'a> {
    api: &'a Api,
    selector: String,
    /// By name; `None` before the first list.
    pods: Option<BTreeMap<String, Pod>>,
    watch: Option<Watch>,
    next_list: Instant,
    /// The reason why they are currently unknown.
    trouble: Option<DriverError>,
}

impl<'a> Followed<'a> {
    pub(super) fn new(api: &'a Api, selector: String) -> Self {
        Self { api, selector, pods: None, watch: None, next_list: Instant::now(), trouble: None }
    }

    /// Waits until something has changed, or may have. Fails only if waiting would not help. The future may be dropped
    /// and called again.
    pub(super) async fn change(&mut self) -> Result<(), DriverError> {
        if let Some(watch) = &mut self.watch {
            let change = watch.next().await;
            let pods = self.pods.get_or_insert_default();
            match change {
                Some(PodChange::Is(pod)) => drop(pods.insert(pod.metadata.name.clone(), *pod)),
                Some(PodChange::Gone(pod)) => drop(pods.remove(&pod.metadata.name)),
                None => self.watch = None,
            }
            return Ok(());
        }
        sleep_until(self.next_list).await;
        self.next_list = Instant::now() + LIST_PAUSE;
        match self.list().await {
            Ok(()) => self.trouble = None,
            Err(error @ DriverError::Silent { .. }) => {
                tracing::info!(%error, "cannot determine the Pods of a Deployment");
                self.trouble = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn list(&mut self) -> Result<(), DriverError> {
        let list = self.api.pods(&self.selector).await?;
        self.pods = Some(list.pods.into_iter().map(|pod| (pod.metadata.name.clone(), pod)).collect());
        match self.api.watch(&self.selector, &list.version).await {
            Ok(watch) => self.watch = Some(watch),
            Err(error) => tracing::info!(%error, "cannot watch Pods; listing them every second"),
        }
        Ok(())
    }

    /// Returns the number of Pods that hold, or may hold, a GPU; `None` while it is unknown.
    pub(super) fn number(&self) -> Option<usize> {
        Some(self.pods.as_ref()?.values().filter(|pod| pod.is_there()).count())
    }

    pub(super) fn pods_state(&self) -> PodsState<'_> {
        match (&self.pods, &self.trouble) {
            (_, Some(trouble)) => PodsState::Waiting(trouble.to_string()),
            (Some(pods), None) => pods::pods_state(pods.values()),
            (None, None) => PodsState::Waiting("its Pods are not known yet".to_owned()),
        }
    }
}
