//! Planted values that must not turn up where they do not belong.

/// What admits workers.
pub const WORKER_SECRET: &str = "planted-worker-secret-4a1d";

/// What admits to `/admin`.
pub const ADMIN_TOKEN: &str = "planted-admin-token-93c7";

/// A credential that clients send for the backend, which may have it.
pub const CLIENT_KEY: &str = "sk-planted-client-key-77b0";

/// Begins every prompt.
pub const PROMPT: &str = "planted-prompt-58e2";

/// Must not come to a backend.
pub const NOT_FOR_BACKENDS: [&str; 2] = [WORKER_SECRET, ADMIN_TOKEN];

/// Must not be logged.
pub const NOT_FOR_LOGS: [&str; 4] = [WORKER_SECRET, ADMIN_TOKEN, CLIENT_KEY, PROMPT];
