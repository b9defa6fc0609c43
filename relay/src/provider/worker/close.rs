//! The close codes and reasons that several parts of the relay send to a worker.

/// The close code and reason of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close {
    /// WebSocket close code.
    pub code: u16,
    /// Close reason.
    pub reason: &'static str,
}

/// Closed because the drain is complete.
pub const DRAINED: Close = Close { code: 1000, reason: "graceful shutdown complete" };
/// Closed because the process ends.
pub const RELAY_STOPPING: Close = Close { code: 1001, reason: "relay shutting down" };
/// Closed because the worker's secret was removed, or its token is no longer valid.
pub const SECRET_REMOVED: Close = Close { code: 1008, reason: "worker authentication failed" };
