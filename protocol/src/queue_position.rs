//! The position of a waiting request in the queue, and the headers by which a client learns it.

/// The position of a request among those that wait for its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePosition {
    /// Its position, from 1; of a request that was not accepted, the one that it would have had.
    pub position: u32,
    /// The number of requests that wait for the model.
    pub waiting: u32,
}

impl QueuePosition {
    /// The position behind `ahead` requests, of `waiting`.
    pub fn behind(ahead: usize, waiting: usize) -> Self {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Self { position: count(ahead.saturating_add(1)), waiting: count(waiting) }
    }

    /// The headers of an error response.
    pub fn headers(&self) -> [(&'static str, String); 2] {
        [
            ("x-modelrelay-queue-position", self.position.to_string()),
            ("x-modelrelay-queue-length", self.waiting.to_string()),
        ]
    }
}
