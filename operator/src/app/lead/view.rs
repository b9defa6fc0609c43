//! One replica's knowledge of the lease, and its next step.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;

use super::{LEASE_DURATION, RENEW_DEADLINE, RENEW_INTERVAL};

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

    /// Records that the lease could not be read: meanwhile it may exist, and be renewed.
    pub(super) fn observe_nothing(&mut self) {
        self.missing_since = None;
    }

    /// Records what was read, and returns the next step.
    pub(super) fn observe(&mut self, lease: Option<Lease>, instance: &str, now: Instant) -> Next {
        let Some(lease) = lease else { return self.observe_missing(now) };
        self.missing_since = None;
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).filter(|holder| !holder.is_empty());
        let leads = self.until_deadline(now).is_some();
        let is_own = match holder {
            // Another writer changed the lease, or an earlier process of the same Pod held it.
            Some(holder) => holder == instance,
            None => leads,
        };
        let seconds = spec.and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok());
        // A leader that releases the lease removes its duration.
        if is_own || (holder.is_none() && seconds.is_none()) {
            return Next::Acquire(Box::new(lease));
        }
        self.held = None;
        let version = &lease.metadata.resource_version;
        let since = match &self.observed {
            Some((known, since)) if known == version => *since,
            Some(_) | None => now,
        };
        self.observed = Some((version.clone(), since));
        // A user may have shortened it, and its leader goes by its own.
        let duration = seconds.map_or(LEASE_DURATION, Duration::from_secs).max(LEASE_DURATION);
        let left = duration.saturating_sub(now - since);
        if left.is_zero() { Next::Acquire(Box::new(lease)) } else { Next::Wait(left.min(RENEW_INTERVAL)) }
    }

    /// A missing lease is left to its leader, which recreates it with its next renewal, or else stops in time.
    fn observe_missing(&mut self, now: Instant) -> Next {
        // Another replica would have to wait.
        if self.until_deadline(now).is_some() {
            return Next::Create;
        }
        // A lease that was there may have been renewed just before it was deleted. The margin is that of an expiry.
        let patience = if self.observed.is_some() { LEASE_DURATION } else { RENEW_DEADLINE };
        let left = patience.saturating_sub(now - *self.missing_since.get_or_insert(now));
        if left.is_zero() { Next::Create } else { Next::Wait(left) }
    }
}
