//! The reasons in a Provider's conditions and Events. Programs compare them, and the manual explains them.

/// A reason and its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasonHelp {
    /// The name in conditions.
    pub name: &'static str,
    /// The meaning, and what to do.
    pub meaning: &'static str,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $constant:ident = $name:literal;)+) => {
        $($(#[doc = $doc])+ pub const $constant: &str = $name;)+

        /// All reasons, for the manual.
        pub const ALL: &[ReasonHelp] = &[$(ReasonHelp { name: $name, meaning: concat!($($doc),+) }),+];
    };
}

reasons! {
    /// At least one relay accepts requests.
    SERVING = "Serving";
    /// At least one relay accepts requests. `expectWorkers` is ignored, because a pool may be scaled to zero and only
    /// requests wake it.
    SCALES_FROM_ZERO = "ScalesFromZero";
    /// No relay Pod is ready. Inspect the Pods.
    NO_RELAY_READY = "NoRelayReady";
    /// `spec.enabled` is false: requests are rejected with `provider_disabled`.
    DISABLED = "Disabled";
    /// `spec.relay.replicas` is 0.
    SCALED_TO_ZERO = "ScaledToZero";
    /// Every relay Pod reports the newest configuration.
    CONFIGURATION_APPLIED = "ConfigurationApplied";
    /// A relay Pod has not reported the newest configuration yet; the message names it.
    WAITING_FOR_RELAYS = "WaitingForRelays";
    /// A relay Pod rejected the newest configuration and keeps the previous one; the message contains the error.
    CONFIGURATION_REFUSED = "ConfigurationRefused";
    /// The relay's Deployment is being rolled out.
    ROLLING_OUT = "RollingOut";
    /// The rollout makes no progress. Inspect the Pods; relays that still run keep serving.
    ROLLOUT_STUCK = "RolloutStuck";
    /// A new worker secret is being distributed to the relays; workers get it as soon as all relays accept it.
    ROTATING_SECRET = "RotatingSecret";
    /// The Provider is moving to the relay of `relayRef`; the message names the step. Its own relay serves until then.
    MOVING_RELAY = "MovingRelay";
    /// The spec is invalid; the message names the field. The previous configuration stays in effect.
    INVALID_SPEC = "InvalidSpec";
    /// A Secret that the spec names, or its key, is missing. The operator retries when it changes.
    SECRET_NOT_FOUND = "SecretNotFound";
    /// Relays cannot use the Secret of `relay.tls`; the message names the required change. The operator retries when
    /// the Secret changes.
    SECRET_INVALID = "SecretInvalid";
    /// An object with a name that the Provider needs belongs to another owner: rename or delete it, or rename the
    /// Provider.
    NAME_TAKEN = "NameTaken";
    /// The API server rejects an object because of the spec or a policy; the message contains the error.
    OBJECT_REFUSED = "ObjectRefused";
    /// The operator lacks permission to write an object, or a quota is exhausted. The operator retries.
    FORBIDDEN = "Forbidden";
    /// An object is still being deleted; it is recreated afterwards.
    TERMINATING = "Terminating";
    /// A request to the API server failed. The operator retries.
    API_ERROR = "ApiError";
    /// The Provider of `relayRef` does not exist.
    RELAY_NOT_FOUND = "RelayNotFound";
    /// The Provider of `relayRef` refers to another one itself: name the one that owns the relay.
    RELAY_CHAINED = "RelayChained";
    /// The Provider of `relayRef` is in another namespace and does not list this one in `relay.sharedWith`.
    RELAY_NOT_GRANTED = "RelayNotGranted";
    /// The Provider of `relayRef` is being deleted.
    RELAY_DELETING = "RelayDeleting";
    /// The relay of `relayRef` serves as many Providers as it can, or this Provider's models and secrets are too large
    /// for it.
    RELAY_FULL = "RelayFull";
    /// The condition does not apply.
    AS_EXPECTED = "AsExpected";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_follow_api_conventions() {
        for reason in ALL {
            let camel = reason.name.starts_with(|first: char| first.is_ascii_uppercase())
                && reason.name.chars().all(|character| character.is_ascii_alphanumeric());
            assert!(camel && !reason.meaning.trim().is_empty(), "{reason:?}");
        }
    }
}
