//! Planted values that must not turn up where they do not belong.

/// What admits workers.
pub const WORKER_SECRET: &str = "planted-worker-secret-4a1d";

/// What admits to `/admin`.
pub const ADMIN_TOKEN: &str = "planted-admin-token-93c7";

/// A credential that clients send for the backend, which may have it.
pub const CLIENT_KEY: &str = "sk-planted-client-key-77b0";

/// Ends every API key of the relays.
pub const RELAY_KEY: &str = "planted-relay-key-1f60";

/// Begins every prompt.
pub const PROMPT: &str = "planted-prompt-58e2";

/// Must not come to a backend.
pub const NOT_FOR_BACKENDS: [&str; 3] = [WORKER_SECRET, ADMIN_TOKEN, RELAY_KEY];

/// Must not be logged.
pub const NOT_FOR_LOGS: [&str; 5] = [WORKER_SECRET, ADMIN_TOKEN, CLIENT_KEY, RELAY_KEY, PROMPT];
