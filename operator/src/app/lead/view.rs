//! One replica's knowledge of the lease, and its next step.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;

use super::{LEASE_DURATION, RENEW_DEADLINE, RENEW_INTERVAL};

/// A missing lease is left to its leader for this long, which recreates it with its next renewal. A new replica does not
/// wait for longer, because at the first installation there is no leader.
const FIRST_CHANCE: Duration = Duration::from_millis(5500);

/// The knowledge of the lease.
#[derive(Default)]
pub(super) struct LeaseView {
    /// The lease that this replica holds, as it was written last, and when that write began.
    held: Option<(Lease, Instant)>,
    /// The version that was observed last, and when it was first observed.
    observed: Option<(Option<String>, Instant)>,
    /// The time since which there is no lease.
    missing_since: Option<Instant>,
}

/// The next step.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Read the lease again after this time.
    Wait(Duration),
    /// Write this version with this replica as the holder.
    Acquire(Box<Lease>),
    /// Create the lease.
    Create,
}

impl LeaseView {
    /// Returns the lease if this replica holds it, so far as it knows.
    pub(super) fn held(&self) -> Option<Lease> {
        self.held.as_ref().map(|(lease, _)| lease.clone())
    }

    /// Records a successful write that began then.
    pub(super) fn acquired(&mut self, lease: Lease, began: Instant) {
        *self = Self { held: Some((lease, began)), ..Self::default() };
    }

    /// Returns the time until a leader without a further renewal must stop; `None` if this replica does not lead.
    pub(super) fn until_deadline(&self, now: Instant) -> Option<Duration> {
        let (_, renewed) = self.held.as_ref()?;
        Some(RENEW_DEADLINE.saturating_sub(now - *renewed)).filter(|left| !left.is_zero())
    }

    /// Records what was read, and returns the next step.
    pub(super) fn observe(&mut self, lease: Option<Lease>, instance: &str, now: Instant) -> Next {
        let Some(lease) = lease else { return self.observe_missing(now) };
        self.missing_since = None;
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).filter(|holder| !holder.is_empty());
        // Its own lease was changed by another writer, or an earlier process of the same Pod held it.
        if holder.is_none_or(|holder| holder == instance) {
            return Next::Acquire(Box::new(lease));
        }
        self.held = None;
        let version = &lease.metadata.resource_version;
        let since = match &self.observed {
            Some((known, since)) if known == version => *since,
            Some(_) | None => now,
        };
        self.observed = Some((version.clone(), since));
        let seconds = spec.and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok());
        let left = seconds.map_or(LEASE_DURATION, Duration::from_secs).saturating_sub(now - since);
        if left.is_zero() { Next::Acquire(Box::new(lease)) } else { Next::Wait(left.min(RENEW_INTERVAL)) }
    }

    fn observe_missing(&mut self, now: Instant) -> Next {
        // Another replica would have to wait.
        if self.until_deadline(now).is_some() {
            return Next::Create;
        }
        let is_new = self.observed.is_none() && self.held.is_none();
        let chance = if is_new { FIRST_CHANCE } else { RENEW_DEADLINE };
        let left = chance.saturating_sub(now - *self.missing_since.get_or_insert(now));
        if left.is_zero() { Next::Create } else { Next::Wait(left) }
    }
}
