//! Every label value that is not a name from the configuration or from a worker, and the bound of those that are.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

/// Stands for an unbounded value: a request without a provider, a model that is not registered.
pub const UNKNOWN: &str = "unknown";

/// Stands for all values beyond the [`FirstValues`].
pub(super) const OTHER: &str = "other";

/// The values of a label that have series of their own: the first ones, since the relay's start.
#[derive(Debug)]
pub(super) struct FirstValues<T> {
    most: usize,
    known: Mutex<HashSet<T>>,
}

impl<T: Eq + Hash> FirstValues<T> {
    pub(super) fn new(most: usize) -> Self {
        Self { most, known: Mutex::default() }
    }

    /// True if the value has series of its own.
    pub(super) fn has_room<Q>(&self, value: &Q) -> bool
    where
        T: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = T> + ?Sized,
    {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(value) || known.len() < self.most && known.insert(value.to_owned())
    }
}

/// Defines a label with a fixed set of values.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident => $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// Every value, in the order of the declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The label's value.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

label! {
    /// How a request ended.
    Outcome {
        /// A status below 400, and the response was complete.
        Ok => "ok",
        /// The request was wrong, according to the relay or the backend (4xx).
        ClientError => "client_error",
        /// The backend failed or broke off.
        UpstreamError => "upstream_error",
        /// The queue was full.
        QueueFull => "queue_full",
        /// A request of a higher class took its place in the queue.
        Displaced => "displaced",
        /// No worker was free in time.
        QueueTimeout => "queue_timeout",
        /// It took longer than its timeout.
        RequestTimeout => "request_timeout",
        /// No worker supports it.
        NoWorker => "no_worker",
        /// Its worker was lost after the first byte.
        WorkerLost => "worker_lost",
        /// Its workers were lost too often.
        RequeueExhausted => "requeue_exhausted",
        /// The client disconnected, or an admin cancelled it.
        Cancelled => "cancelled",
        /// No valid key, or not for this request.
        Unauthorized => "unauthorized",
        /// No worker has the model.
        ModelNotFound => "model_not_found",
        /// Its provider is disabled.
        ProviderDisabled => "provider_disabled",
        /// Its provider was removed.
        ProviderDeleted => "provider_deleted",
        /// The relay is shutting down.
        Draining => "draining",
        /// The model was not loaded in time.
        ModelLoading => "model_loading",
        /// The model cannot be loaded.
        BackendUnavailable => "backend_unavailable",
        /// A model swap ended it.
        Severed => "severed",
        /// The client read too slowly.
        SlowClient => "slow_client",
        /// The response was too long.
        StreamLimit => "stream_limit",
        /// The memory budget was full.
        Overloaded => "overloaded",
    }
}

label! {
    /// How a wait in the queue ended.
    QueueOutcome {
        /// Sent to a worker.
        Dispatched => "dispatched",
        /// No worker was free in time.
        Timeout => "timeout",
        /// Cancelled by the client, an admin, or the end of its provider.
        Cancelled => "cancelled",
    }
}

label! {
    /// Why a request went back into the queue.
    RequeueReason {
        /// Its worker's link broke.
        WorkerLost => "worker_lost",
        /// Its worker fell silent.
        HeartbeatTimeout => "heartbeat_timeout",
        /// Its worker is draining.
        Draining => "draining",
        /// Its worker had no free slot after all.
        AtCapacity => "at_capacity",
        /// A model swap ended it.
        SeveredBySwap => "severed_by_swap",
        /// Its backend refused the connection.
        BackendUnreachable => "backend_unreachable",
        /// Its backend reset the connection.
        BackendReset => "backend_reset",
        /// Its worker sent nothing of a response in time.
        FirstByteTimeout => "first_byte_timeout",
        /// Its model could not be loaded there.
        LoadFailed => "load_failed",
    }
}

label! {
    /// The stage of a request when it was cancelled.
    Stage {
        /// In the queue.
        Queued => "queued",
        /// At a worker.
        InFlight => "in_flight",
    }
}

label! {
    /// The SDK that retried.
    ClientKind {
        /// OpenAI's SDK.
        OpenAi => "openai",
        /// Anthropic's SDK.
        Anthropic => "anthropic",
        /// Another SDK.
        Other => "other",
    }
}

label! {
    /// Kinds of tokens in a backend's usage.
    TokenKind {
        /// Tokens of the prompt.
        Input => "input",
        /// Generated tokens.
        Output => "output",
        /// Tokens of the prompt that were already in a cache.
        CachedInput => "cached_input",
    }
}

label! {
    /// The result of a worker's connection.
    ConnectionResult {
        /// Registered.
        Accepted => "accepted",
        /// No valid secret or token.
        AuthFailed => "auth_failed",
        /// Its token could not be reviewed.
        Unverified => "unverified",
        /// Too many failures from its address.
        RateLimited => "rate_limited",
        /// Not a WebSocket, or no valid registration.
        BadProtocol => "bad_protocol",
        /// Its provider is disabled.
        ProviderDisabled => "provider_disabled",
        /// No such provider.
        ProviderNotFound => "provider_not_found",
        /// Its provider, or its address, has too many links.
        TooManyLinks => "too_many_links",
        /// The relay is shutting down.
        Draining => "draining",
    }
}

label! {
    /// Why a worker's link ended.
    DisconnectReason {
        /// The worker closed it.
        ClosedByWorker => "closed_by_worker",
        /// The link broke.
        ConnectionLost => "connection_lost",
        /// Silent for three heartbeats.
        HeartbeatTimeout => "heartbeat_timeout",
        /// It stopped reading.
        WriteTimeout => "write_timeout",
        /// A violation of the protocol.
        ProtocolError => "protocol_error",
        /// A message over the limit.
        MessageTooLarge => "message_too_large",
        /// A message for which the budget has no room.
        MemoryFull => "memory_full",
        /// A large message that arrives too slowly.
        SlowMessage => "slow_message",
        /// The same worker dialled again.
        Replaced => "replaced",
        /// The same worker has another link here.
        Duplicate => "duplicate",
        /// Its secret was removed, or its token is no longer valid.
        AuthFailed => "auth_failed",
        /// Drained.
        Drained => "drained",
        /// The drain deadline passed.
        DrainTimeout => "drain_timeout",
        /// Its provider was removed.
        ProviderDeleted => "provider_deleted",
        /// The relay is shutting down.
        RelayShutdown => "relay_shutdown",
    }
}

label! {
    /// The API of a failed login.
    Realm {
        /// The client API.
        Client => "client",
        /// The worker socket.
        Worker => "worker",
        /// The admin API.
        Admin => "admin",
    }
}
