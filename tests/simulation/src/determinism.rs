//! Makes time and randomness depend on the seed.
//!
//! A program's external inputs are the network, the time and random bytes. turmoil provides the first, and tokio's
//! timers. std (for `Instant`, `SystemTime` and the keys of every `HashMap`) and the crates get the other two from
//! libc. This file replaces those two functions, for threads that have [`entered`](enter) a simulation, so that the
//! code under test stays unchanged. All other threads get the kernel's results.

// The purpose of this file is to replace two C functions.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use libc::{c_int, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};

/// The monotonic clock at the start: late enough that subtracting hours does not underflow.
const START: Duration = Duration::from_secs(10_000_000);

/// The wall clock at the start: 2026-01-01.
const WALL_START: Duration = Duration::from_secs(1_767_225_600);

thread_local! {
    /// The state of the random generator while this thread simulates.
    static RANDOM: Cell<Option<u64>> = const { Cell::new(None) };
    /// Time since [`START`] as known to the driver: used where no host runs.
    static ELAPSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The `Instant` that is [`START`].
    static EPOCH: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The offset of the wall clock, in milliseconds.
    static WALL_OFFSET: Cell<i64> = const { Cell::new(0) };
    /// Reading tokio's clock may call this code again.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `simulation` on its own thread, whose time and randomness depend only on `seed`.
pub fn enter<T: Send + 'static>(seed: u64, simulation: impl FnOnce() -> T + Send + 'static) -> thread::Result<T> {
    let thread = thread::Builder::new().name(format!("seed {seed}")).stack_size(16 << 20).spawn(move || {
        RANDOM.set(Some(seed));
        EPOCH.set(Some(Instant::now()));
        simulation()
    });
    thread.expect("the system starts a thread").join()
}

/// Sets the elapsed time, between two steps of the simulation.
pub fn advance_to(elapsed: Duration) {
    ELAPSED.set(elapsed);
}

/// Moves the wall clock of all hosts; the monotonic one is unaffected.
pub fn jump_wall_clock(by_ms: i64) {
    WALL_OFFSET.set(WALL_OFFSET.get() + by_ms);
}

/// Returns the time since the start: that of the running host, with the millisecond resolution of its timers.
pub fn elapsed() -> Duration {
    if ASKING.replace(true) {
        return ELAPSED.get();
    }
    let in_host = tokio::runtime::Handle::try_current().is_ok();
    let elapsed = match EPOCH.get() {
        Some(epoch) if in_host => tokio::time::Instant::now().into_std().saturating_duration_since(epoch),
        Some(_) | None => ELAPSED.get(),
    };
    ASKING.set(false);
    elapsed
}

/// SplitMix64: every seed yields a different sequence, also neighbouring ones.
fn next_random() -> Option<u64> {
    let state = RANDOM.get()?.wrapping_add(0x9e37_79b9_7f4a_7c15);
    RANDOM.set(Some(state));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    Some(mixed ^ (mixed >> 31))
}

/// Replaces libc's function.
///
/// # Safety
/// As for libc's function: `buffer` is valid for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    if RANDOM.get().is_none() {
        // SAFETY: the caller guarantees what the system call requires.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, len, flags) } as ssize_t;
    }
    let mut written = 0;
    while written < len {
        let bytes = next_random().unwrap_or_default().to_ne_bytes();
        let part = bytes.len().min(len - written);
        // SAFETY: `written + part <= len`, and the caller guarantees `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast::<u8>().add(written), part) };
        written += part;
    }
    len as ssize_t
}

/// Replaces libc's function.
///
/// # Safety
/// As for libc's function: `time` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    let now = match clock {
        libc::CLOCK_MONOTONIC | libc::CLOCK_MONOTONIC_RAW | libc::CLOCK_MONOTONIC_COARSE | libc::CLOCK_BOOTTIME => {
            START
        }
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => WALL_START,
        _ => Duration::ZERO,
    };
    if RANDOM.get().is_none() || now.is_zero() {
        // SAFETY: the caller guarantees what the system call requires.
        return unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as c_int;
    }
    let mut now = now + elapsed();
    if matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        let offset = WALL_OFFSET.get();
        let by = Duration::from_millis(offset.unsigned_abs());
        now = if offset < 0 { now.saturating_sub(by) } else { now + by };
    }
    // SAFETY: the caller guarantees that it is valid for writing.
    unsafe {
        (*time).tv_sec = now.as_secs() as libc::time_t;
        (*time).tv_nsec = libc::c_long::from(now.subsec_nanos());
    }
    0
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::SystemTime;

    use super::*;

    fn everything_random() -> (Vec<u32>, [u8; 16], u64) {
        let order: HashSet<u32> = (0..100).collect();
        let mut bytes = [0; 16];
        // SAFETY: the buffer has the given length.
        unsafe { getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        let jitter = modelrelay_worker::link::random();
        (order.into_iter().collect(), bytes, jitter.to_bits())
    }

    #[test]
    fn seed_determines_maps_bytes_and_crate_randomness() {
        let first = enter(7, everything_random).unwrap();
        assert_eq!(first, enter(7, everything_random).unwrap());
        let other = enter(8, everything_random).unwrap();
        assert!(first.0 != other.0 && first.1 != other.1 && first.2 != other.2);
    }

    #[test]
    fn time_advances_only_explicitly_and_wall_clock_jumps() {
        enter(1, || {
            let (start, wall) = (Instant::now(), SystemTime::now());
            assert_eq!((start.elapsed(), wall.elapsed().unwrap()), (Duration::ZERO, Duration::ZERO));
            advance_to(Duration::from_secs(3));
            jump_wall_clock(-5_000);
            assert_eq!(start.elapsed(), Duration::from_secs(3));
            assert_eq!(wall.duration_since(SystemTime::now()).unwrap(), Duration::from_secs(2));
        })
        .unwrap();
    }

    #[test]
    fn other_threads_keep_kernel_clock() {
        let before = SystemTime::UNIX_EPOCH + WALL_START;
        assert!(SystemTime::now() > before + Duration::from_secs(86_400));
    }
}
