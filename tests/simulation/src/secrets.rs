//! Planted values that must not appear where they do not belong.

/// The secret with which workers authenticate.
pub const WORKER_SECRET: &str = "planted-worker-secret-4a1d";

/// The token for `/admin`.
pub const ADMIN_TOKEN: &str = "planted-admin-token-93c7";

/// A credential that clients send for the backend, which may receive it.
pub const CLIENT_KEY: &str = "sk-planted-client-key-77b0";

/// The suffix of every API key of the relays.
pub const RELAY_KEY: &str = "planted-relay-key-1f60";

/// The prefix of every prompt.
pub const PROMPT: &str = "planted-prompt-58e2";

/// Values that must not reach a backend.
pub const NOT_FOR_BACKENDS: [&str; 3] = [WORKER_SECRET, ADMIN_TOKEN, RELAY_KEY];

/// Values that must not be logged.
pub const NOT_FOR_LOGS: [&str; 5] = [WORKER_SECRET, ADMIN_TOKEN, CLIENT_KEY, RELAY_KEY, PROMPT];
