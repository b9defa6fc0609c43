//! Pauses of reading after messages that come too often.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::WorkerLink;

impl WorkerLink {
    /// Records an update of the worker's models. If updates come too often, reading pauses.
    pub fn pace_update(&self) {
        let pause = self.lock().pace.pause(Instant::now());
        self.pause_reading(pause);
    }

    /// The same for its reports on homes.
    pub fn pace_homes(&self) {
        let pause = self.lock().homes_pace.pause(Instant::now());
        self.pause_reading(pause);
    }

    /// Returns how long reading must pause before the worker's next message; resets the pause.
    pub fn take_read_pause(&self) -> Option<Duration> {
        if self.read_pause_millis.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(Duration::from_millis(self.read_pause_millis.swap(0, Ordering::Relaxed).into()))
    }

    fn pause_reading(&self, pause: Duration) {
        let millis = u32::try_from(pause.as_millis()).unwrap_or(u32::MAX);
        self.read_pause_millis.fetch_max(millis, Ordering::Relaxed);
    }
}
