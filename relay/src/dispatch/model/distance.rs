//! How far workers are from the relay, and how much load a near one may have before a request goes farther.
//!
//! The shell compares the labels of relay and worker. Without labels, all workers are equally far.

/// How far a worker is from the relay, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Distance {
    /// In the relay's zone, or the relay has no labels.
    #[default]
    Zone,
    /// In the relay's cluster.
    Cluster,
    /// In another cluster, or without labels.
    Elsewhere,
}

impl Distance {
    /// All distances, the nearest first.
    pub const ALL: [Self; 3] = [Self::Zone, Self::Cluster, Self::Elsewhere];
}

/// How much more load a nearer worker may have than a farther one and still be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spill {
    /// Running requests.
    pub requests: u32,
    /// Bytes of backlog, for workers that are placed by it.
    pub bytes: u64,
}

impl Default for Spill {
    fn default() -> Self {
        Self { requests: 4, bytes: 64 << 10 }
    }
}
