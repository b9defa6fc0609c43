//! Checks that a model fits before anything is unloaded for it.
//!
//! When two models exceed a GPU's memory, the second crashes, or worse, the first. A model of unknown size is never
//! blocked.

use std::fmt;

/// The memory that a model needs beyond its declared weights, in percent of them: context, graphs, fragmentation.
const OVERHEAD_PERCENT: u128 = 15;

/// A driver's measurement before a swap. Values that it cannot know are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Free on the device; also absent if the resident holds an unknown part of it.
    pub free: Option<u64>,
    /// The resident's memory there, which its eviction would free.
    pub held: Option<u64>,
    /// If the resident would be put to sleep: the host memory for its copy, and the host memory left below the limit of
    /// the control group (not of the node).
    pub sleep: Option<Sleep>,
}

/// The host memory for putting a resident to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleep {
    /// The size of the copy.
    pub copy: u64,
    /// The memory that is left for it.
    pub host_free: u64,
}

/// The known memory of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// As declared by the operator.
    pub declared: Option<u64>,
    /// As last measured.
    pub measured: Option<u64>,
}

/// The model does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that are needed.
    pub need: u64,
    /// Bytes that could be made free.
    pub have: u64,
    /// True for host memory, for the resident's copy while it sleeps; false for device memory.
    pub is_host: bool,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let (need, have) = (gib(self.need), gib(self.have));
        if self.is_host {
            write!(f, "the loaded model needs {need:.1} GiB of host memory to sleep, but only {have:.1} GiB are left")
        } else {
            write!(f, "it needs {need:.1} GiB, but only {have:.1} GiB can be freed")
        }
    }
}

impl Size {
    /// Returns the memory that it needs; `None` if nothing is known.
    pub fn need(self) -> Option<u64> {
        // A measurement includes context and graphs.
        let declared = self.declared.map(|size| percent_of(size, 100 + OVERHEAD_PERCENT));
        declared.max(self.measured)
    }
}

/// Checks that a model of this size fits once the resident is gone. `slot`: the slot's memory, as declared by the
/// operator.
pub fn check(size: Size, slot: Option<u64>, reading: &Reading) -> Result<(), Shortage> {
    if let Some(Sleep { copy, host_free }) = reading.sleep
        && copy > host_free
    {
        return Err(Shortage { need: copy, have: host_free, is_host: true });
    }
    let Some(need) = size.need() else { return Ok(()) };
    let measured = reading.free.map(|free| free.saturating_add(reading.held.unwrap_or(0)));
    match slot.into_iter().chain(measured).min() {
        Some(have) if have < need => Err(Shortage { need, have, is_host: false }),
        Some(_) | None => Ok(()),
    }
}

fn percent_of(bytes: u64, percent: u128) -> u64 {
    u64::try_from(u128::from(bytes) * percent / 100).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(bytes: u64) -> Size {
        Size { declared: Some(bytes), measured: None }
    }

    #[test]
    fn resident_memory_is_credited() {
        let reading = Reading { free: Some(20), held: Some(80), ..Reading::default() };
        assert_eq!(check(declared(86), None, &reading), Ok(()));
        assert_eq!(check(declared(88), None, &reading), Err(Shortage { need: 101, have: 100, is_host: false }));
    }

    #[test]
    fn larger_of_declared_and_measured_size_applies() {
        let size = Size { declared: Some(10), measured: Some(100) };
        assert_eq!(size.need(), Some(100), "what was measured has its overhead in it");
        assert_eq!(Size { declared: Some(100), measured: Some(110) }.need(), Some(115));
    }

    #[test]
    fn slot_size_limits_unmeasured_memory() {
        assert_eq!(check(declared(20), Some(24), &Reading::default()), Ok(()));
        assert_eq!(
            check(declared(22), Some(24), &Reading::default()),
            Err(Shortage { need: 25, have: 24, is_host: false })
        );
    }

    #[test]
    fn unknown_sizes_never_block() {
        let full = Reading { free: Some(0), ..Reading::default() };
        assert_eq!(check(Size::default(), Some(1), &full), Ok(()));
        assert_eq!(check(declared(1 << 40), None, &Reading::default()), Ok(()));
    }

    #[test]
    fn copy_exceeding_host_memory_is_shortage() {
        let reading = Reading { sleep: Some(Sleep { copy: 30, host_free: 20 }), ..Reading::default() };
        let shortage = check(declared(1), None, &reading).unwrap_err();
        assert_eq!(shortage, Shortage { need: 30, have: 20, is_host: true });
        assert!(shortage.to_string().contains("of host memory"), "{shortage}");
        let enough = Reading { sleep: Some(Sleep { copy: 30, host_free: 30 }), ..Reading::default() };
        assert_eq!(check(declared(1), None, &enough), Ok(()));
    }
}
