//! Failed worker logins: which addresses have to wait.
//!
//! Five failures within a minute from one address lock it for a minute: it gets 429 with `Retry-After` in place of 401,
//! so that a worker with a stale secret backs off and the log is not flooded.
//!
//! **A valid secret is never locked out.** Many workers share one address (a NAT, a cluster's egress), so a neighbour's
//! stale secret must not keep them away; and a login that presents a valid secret cannot be one of the failures. The
//! caller therefore compares the secret first and passes the outcome to [`Lockout::judge`]; the response to a *wrong*
//! secret is the same as if the lockout had been checked first. The price: a lock does not slow an attacker who
//! guesses. A generated secret does not need that, and a short one cannot rely on it (the configuration warns about
//! short ones). The same holds for tokens, which another server verifies: those of a locked address wait in a lane of
//! their own ([`crate::kubernetes::identity`]).
//!
//! Records are bounded: at most [`MAX_RECORDS`], of which the oldest are evicted; IPv6 is tracked by /64, which is the
//! network of one host; a record is deleted ten minutes after its last failure. Time is injected.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderMap;
use modelrelay_protocol::cidr::{Cidr, masked};

/// Addresses that are remembered at once.
pub const MAX_RECORDS: usize = 65_536;
/// Failures within [`WINDOW`] that lock an address.
pub const FAILURES_UNTIL_LOCKED: usize = 5;
/// The time within which those failures lock an address, and the duration of the lock.
pub const WINDOW: Duration = Duration::from_secs(60);
/// The time after its last failure at which a record is deleted.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// The most proxies of one `X-Forwarded-For` that are evaluated; a longer chain is not a real one.
const MAX_HOPS: usize = 32;

/// The result of a worker's login.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockoutOutcome {
    /// The secret is valid.
    Admitted,
    /// The secret is not valid: 401.
    Refused,
    /// The secret is not valid, and neither were the last ones from this address: 429.
    Locked {
        /// For `Retry-After`, at least 1.
        retry_after_secs: u64,
    },
}

/// The failed logins of all addresses.
#[derive(Debug, Default)]
pub struct Lockout {
    /// Locked once per login of a worker, never for a request.
    records: Mutex<Records>,
}

impl Lockout {
    /// Creates a lockout without failures.
    pub fn new() -> Self {
        Self::default()
    }

    /// Judges one login from `address`. A failure is recorded, unless the address is locked already.
    pub fn judge(&self, address: IpAddr, secret_is_valid: bool, now: Instant) -> LockoutOutcome {
        if secret_is_valid {
            return LockoutOutcome::Admitted;
        }
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.forget_old(now);
        records.handle_failure(network_of(address), now)
    }

    /// The remaining seconds of an address's lock, at least 1; `None` if it is not locked.
    pub fn locked_for(&self, address: IpAddr, now: Instant) -> Option<u64> {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let until = records.locked_until(network_of(address))?;
        (until > now).then(|| seconds_up(until - now))
    }

    /// The number of tracked addresses.
    pub fn len(&self) -> usize {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).by_address.len()
    }

    /// True if no failure is tracked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The client's address of a connection: the peer's, or, from a trusted proxy, the nearest in `X-Forwarded-For` that is
/// not itself a trusted proxy. Addresses to the left of that, which a client may have written, are never evaluated.
pub fn client_address(peer: IpAddr, headers: &HeaderMap, trusted_proxies: &[Cidr]) -> IpAddr {
    let mut address = peer.to_canonical();
    let lines = headers.get_all("x-forwarded-for").iter().rev();
    let hops = lines.flat_map(|line| line.to_str().unwrap_or("").rsplit(','));
    for hop in hops.take(MAX_HOPS) {
        if !trusted_proxies.iter().any(|network| network.contains(address)) {
            break;
        }
        match parse_hop(hop) {
            Some(next) => address = next,
            None => break,
        }
    }
    address
}

/// Proxies write an address, sometimes with a port, IPv6 then in brackets.
fn parse_hop(hop: &str) -> Option<IpAddr> {
    let hop = hop.trim();
    let address = hop.parse::<IpAddr>().ok();
    let address = address.or_else(|| hop.parse::<std::net::SocketAddr>().ok().map(|socket| socket.ip()));
    let bracketed = || hop.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6);
    address.or_else(bracketed).map(|address| address.to_canonical())
}

/// The network that counts as one address: one host can use all of its /64.
pub fn network_of(address: IpAddr) -> IpAddr {
    let address = address.to_canonical();
    if address.is_ipv4() { address } else { masked(address, 64).unwrap_or(address) }
}

#[derive(Debug, Default)]
struct Records {
    by_address: HashMap<IpAddr, Record>,
    /// Addresses by the order of their last failure, oldest first.
    by_age: BTreeMap<u64, IpAddr>,
    next_order: u64,
}

#[derive(Debug)]
struct Record {
    order: u64,
    /// The last failures, at most [`FAILURES_UNTIL_LOCKED`].
    failures: VecDeque<Instant>,
    last_failure: Instant,
    locked_until: Option<Instant>,
}

impl Records {
    fn handle_failure(&mut self, address: IpAddr, now: Instant) -> LockoutOutcome {
        if let Some(until) = self.locked_until(address)
            && until > now
        {
            // Not recorded: the lock ends at the time that `Retry-After` stated.
            return LockoutOutcome::Locked { retry_after_secs: seconds_up(until - now) };
        }
        let order = self.next_order;
        self.next_order += 1;
        let record = self.by_address.entry(address).or_insert_with(|| Record {
            order,
            failures: VecDeque::with_capacity(FAILURES_UNTIL_LOCKED),
            last_failure: now,
            locked_until: None,
        });
        self.by_age.remove(&record.order);
        self.by_age.insert(order, address);
        record.order = order;
        record.handle_failure(now);
        self.make_room();
        LockoutOutcome::Refused
    }

    fn locked_until(&self, address: IpAddr) -> Option<Instant> {
        self.by_address.get(&address).and_then(|record| record.locked_until)
    }

    fn make_room(&mut self) {
        while self.by_address.len() > MAX_RECORDS
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.by_address.remove(&oldest);
        }
    }

    fn forget_old(&mut self, now: Instant) {
        while let Some(entry) = self.by_age.first_entry() {
            let fresh = self
                .by_address
                .get(entry.get())
                .is_some_and(|record| now.saturating_duration_since(record.last_failure) < FORGOTTEN_AFTER);
            if fresh {
                break;
            }
            self.by_address.remove(&entry.remove());
        }
    }
}

impl Record {
    fn handle_failure(&mut self, now: Instant) {
        self.last_failure = now;
        self.locked_until = None;
        self.failures.retain(|failure| now.saturating_duration_since(*failure) < WINDOW);
        self.failures.push_back(now);
        if self.failures.len() >= FAILURES_UNTIL_LOCKED {
            self.failures.clear();
            self.locked_until = Some(now + WINDOW);
        }
    }
}

fn seconds_up(duration: Duration) -> u64 {
    duration.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn fail_times(lockout: &Lockout, address: IpAddr, times: usize, now: Instant) {
        for _ in 0..times {
            assert_eq!(lockout.judge(address, false, now), LockoutOutcome::Refused);
        }
    }

    #[test]
    fn sixth_failure_in_one_minute_is_locked() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        fail_times(&lockout, HERE, 5, now);
        let later = now + Duration::from_millis(1_500);
        assert_eq!(lockout.judge(HERE, false, later), LockoutOutcome::Locked { retry_after_secs: 59 });
        assert_eq!(lockout.judge(THERE, false, later), LockoutOutcome::Refused);
    }

    #[test]
    fn valid_secret_passes_while_address_is_locked() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        fail_times(&lockout, HERE, 5, now);
        assert_eq!(lockout.judge(HERE, true, now), LockoutOutcome::Admitted);
        assert!(matches!(lockout.judge(HERE, false, now), LockoutOutcome::Locked { .. }));
    }

    #[test]
    fn remaining_lock_time_is_reported() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        assert_eq!(lockout.locked_for(HERE, now), None);
        fail_times(&lockout, HERE, 4, now);
        assert_eq!(lockout.locked_for(HERE, now), None);
        fail_times(&lockout, HERE, 1, now);
        assert_eq!((lockout.locked_for(HERE, now), lockout.locked_for(THERE, now)), (Some(60), None));
        assert_eq!(lockout.locked_for(HERE, now + WINDOW), None);
    }

    #[test]
    fn lock_ends_on_time_despite_further_attempts() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        fail_times(&lockout, HERE, 5, now);
        for second in 1..60 {
            assert!(matches!(
                lockout.judge(HERE, false, now + Duration::from_secs(second)),
                LockoutOutcome::Locked { .. }
            ));
        }
        assert_eq!(lockout.judge(HERE, false, now + WINDOW), LockoutOutcome::Refused);
    }

    #[test]
    fn widely_spaced_failures_never_lock() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        for step in 0..100 {
            assert_eq!(lockout.judge(HERE, false, now + Duration::from_secs(15 * step)), LockoutOutcome::Refused);
        }
    }

    #[test]
    fn ipv6_is_grouped_by_64_except_mapped_ipv4() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        for host in 1..=5 {
            assert_eq!(lockout.judge(address(&format!("2001:db8::{host}")), false, now), LockoutOutcome::Refused);
        }
        assert!(matches!(lockout.judge(address("2001:db8::ffff:1"), false, now), LockoutOutcome::Locked { .. }));
        assert_eq!(lockout.judge(address("2001:db8:0:1::1"), false, now), LockoutOutcome::Refused);
        fail_times(&lockout, HERE, 5, now);
        assert!(matches!(lockout.judge(address("::ffff:192.0.2.1"), false, now), LockoutOutcome::Locked { .. }));
    }

    #[test]
    fn records_are_gone_after_ten_minutes() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        fail_times(&lockout, HERE, 1, now);
        fail_times(&lockout, THERE, 1, now + FORGOTTEN_AFTER - Duration::from_secs(1));
        assert_eq!(lockout.len(), 2);
        fail_times(&lockout, THERE, 1, now + FORGOTTEN_AFTER);
        assert_eq!(lockout.len(), 1);
    }

    #[test]
    fn number_of_remembered_addresses_is_bounded() {
        let (lockout, now) = (Lockout::new(), Instant::now());
        for number in 0..u32::try_from(MAX_RECORDS).expect("fits") + 100 {
            lockout.judge(IpAddr::from(number.to_be_bytes()), false, now);
        }
        assert_eq!(lockout.len(), MAX_RECORDS);
        assert_eq!(lockout.records.lock().expect("not poisoned").by_age.len(), MAX_RECORDS);
    }

    #[test]
    fn forwarded_address_is_accepted_only_from_trusted_proxy() {
        let proxies = ["10.0.0.0/8".parse().expect("a network")];
        let mut headers = HeaderMap::new();
        headers.append("x-forwarded-for", "6.6.6.6, 203.0.113.9".parse().expect("a value"));
        headers.append("x-forwarded-for", "10.0.0.7".parse().expect("a value"));
        assert_eq!(client_address(HERE, &headers, &proxies), HERE);
        assert_eq!(client_address(address("10.0.0.1"), &headers, &proxies), address("203.0.113.9"));
        assert_eq!(client_address(address("::ffff:10.0.0.1"), &headers, &proxies), address("203.0.113.9"));
        assert_eq!(client_address(address("10.0.0.1"), &HeaderMap::new(), &proxies), address("10.0.0.1"));
    }

    #[test]
    fn malformed_forwarded_header_yields_last_valid_address() {
        let proxies = ["10.0.0.0/8".parse().expect("a network")];
        let mut headers = HeaderMap::new();
        headers.append("x-forwarded-for", "1.1.1.1, unknown, [fd00::1]:80, 10.0.0.2:1234".parse().expect("a value"));
        assert_eq!(client_address(address("10.0.0.1"), &headers, &proxies), address("fd00::1"));
    }
}
