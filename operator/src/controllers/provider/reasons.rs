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
    /// At least one relay takes requests.
    SERVING = "Serving";
    /// It serves; `expectWorkers` is ignored, because a pool may be at zero and needs requests to be woken.
    SCALES_FROM_ZERO = "ScalesFromZero";
    /// No relay Pod is ready. See the Pods.
    NO_RELAY_READY = "NoRelayReady";
    /// `spec.enabled` is false: requests are answered with `provider_disabled`.
    DISABLED = "Disabled";
    /// `spec.relay.replicas` is 0.
    SCALED_TO_ZERO = "ScaledToZero";
    /// Every relay Pod reports the newest configuration.
    CONFIGURATION_APPLIED = "ConfigurationApplied";
    /// A relay Pod has not reported the newest configuration yet; the message names it.
    WAITING_FOR_RELAYS = "WaitingForRelays";
    /// A relay Pod refuses the newest configuration and keeps the one before; the message says why.
    CONFIGURATION_REFUSED = "ConfigurationRefused";
    /// The relay's Deployment is being rolled out.
    ROLLING_OUT = "RollingOut";
    /// Its roll-out does not get on. See the Pods; relays that still run keep serving.
    ROLLOUT_STUCK = "RolloutStuck";
    /// The relays are told of a new worker secret; workers get it as soon as all have it.
    ROTATING_SECRET = "RotatingSecret";
    /// The spec says something that cannot be; the message names the place. What ran before keeps running.
    INVALID_SPEC = "InvalidSpec";
    /// A Secret that the spec names, or its key, is missing. It is looked for again and again.
    SECRET_NOT_FOUND = "SecretNotFound";
    /// Relays cannot serve with the Secret of `relay.tls`; the message says what to change in it. It is looked at again and again.
    SECRET_INVALID = "SecretInvalid";
    /// An object of a needed name exists and is somebody else's: rename or delete it, or rename the Provider.
    NAME_TAKEN = "NameTaken";
    /// The API server refuses an object, by the spec's fault or a policy's; the message says why.
    OBJECT_REFUSED = "ObjectRefused";
    /// The operator may not write an object, or a quota is used up. It is tried again.
    FORBIDDEN = "Forbidden";
    /// An object is still being deleted and is made again afterwards.
    TERMINATING = "Terminating";
    /// The API server could not be asked; it is tried again.
    API_ERROR = "ApiError";
    /// Nothing of the kind.
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
