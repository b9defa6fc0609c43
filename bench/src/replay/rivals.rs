//! The rules of other routers, as plainly as they are described. They send each request at once; if its worker is busy,
//! it waits there.

pub mod oracle;

use std::collections::{BTreeMap, HashMap};

use super::Time;
use super::cache::BlockCache;
use super::policy::{Router, Sent};
use super::worker::Served;
use super::workload::Turn;

/// Chooses a worker.
pub trait Rule {
    /// Chooses the worker of a request, given the number of unfinished requests of each worker.
    fn choose(&mut self, turn: &Turn, loads: &[u32]) -> usize;
    /// The number of workers.
    fn workers(&self) -> usize;
}

/// A router that sends each request at once.
#[derive(Debug)]
pub struct Immediate<R> {
    rule: R,
    loads: Vec<u32>,
    workers: HashMap<usize, usize>,
}

impl<R: Rule> Immediate<R> {
    /// Creates a router with this rule.
    pub fn new(rule: R) -> Self {
        let loads = vec![0; rule.workers()];
        Self { rule, loads, workers: HashMap::new() }
    }
}

impl<R: Rule> Router for Immediate<R> {
    fn arrive(&mut self, id: usize, turn: &Turn, _: Time, sent: &mut Vec<Sent>) {
        let worker = self.rule.choose(turn, &self.loads);
        self.loads[worker] += 1;
        self.workers.insert(id, worker);
        sent.push(Sent { id, worker });
    }

    fn end(&mut self, id: usize, _: &Turn, _: &Served, _: Time, _: &mut Vec<Sent>) {
        if let Some(worker) = self.workers.remove(&id) {
            self.loads[worker] -= 1;
        }
    }
}

/// Places of each worker on the ring.
const PLACES: u64 = 100;

/// The load that a worker may have, as a multiple of the mean.
const BOUND: f64 = 1.25;

/// Consistent hashing with bounded loads: the first worker on the ring whose load is below the bound.
#[derive(Debug)]
pub struct BoundedHash {
    ring: BTreeMap<u64, usize>,
    workers: usize,
}

impl BoundedHash {
    /// Creates a ring of workers.
    pub fn new(workers: usize) -> Self {
        let place = |worker| move |place| (mix(1 + worker as u64 * PLACES + place), worker);
        Self { ring: (0..workers).flat_map(|worker| (0..PLACES).map(place(worker))).collect(), workers }
    }
}

impl Rule for BoundedHash {
    fn choose(&mut self, turn: &Turn, loads: &[u32]) -> usize {
        let total = loads.iter().sum::<u32>() + 1;
        let bound = (BOUND * f64::from(total) / self.workers as f64).ceil();
        let hash = mix(!turn.conversation);
        let places = self.ring.range(hash..).chain(self.ring.range(..hash)).map(|(_, worker)| *worker);
        let mut free = places.filter(|worker| f64::from(loads[*worker] + 1) <= bound);
        free.next().expect("not all workers are above the mean load")
    }

    fn workers(&self) -> usize {
        self.workers
    }
}

/// The finalizer of splitmix64.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The part of a prompt that must match for the cache to decide.
const CACHE_THRESHOLD: f64 = 0.5;

/// Loads are unbalanced if the largest exceeds the smallest by this number …
const BALANCE_ABSOLUTE: u32 = 32;

/// … and by this factor.
const BALANCE_RELATIVE: f64 = 1.0001;

/// The blocks of a worker's tree: 2^24 characters, at four characters a token.
const TREE_BLOCKS: usize = (1 << 24) / (4 * super::cache::BLOCK_TOKENS as usize);

/// The rule of sglang's router: a tree of the prompts that each worker was sent. The longest match wins if it is long
/// enough, otherwise the smallest tree; the lowest load wins while loads are unbalanced.
#[derive(Debug)]
pub struct PrefixTree {
    trees: Vec<BlockCache>,
}

impl PrefixTree {
    /// Creates empty trees.
    pub fn new(workers: usize) -> Self {
        Self { trees: vec![BlockCache::new(TREE_BLOCKS); workers] }
    }
}

impl Rule for PrefixTree {
    fn choose(&mut self, turn: &Turn, loads: &[u32]) -> usize {
        let workers = 0..self.trees.len();
        let (low, high) = (*loads.iter().min().unwrap_or(&0), *loads.iter().max().unwrap_or(&0));
        let unbalanced = high - low > BALANCE_ABSOLUTE && f64::from(high) > BALANCE_RELATIVE * f64::from(low);
        let matching: Vec<_> = self.trees.iter().map(|tree| tree.matching(&turn.blocks)).collect();
        let longest = *matching.iter().max().unwrap_or(&0);
        let worker = if unbalanced {
            workers.min_by_key(|worker| loads[*worker])
        } else if longest as f64 > CACHE_THRESHOLD * turn.blocks.len() as f64 {
            workers.rev().max_by_key(|worker| matching[*worker])
        } else {
            workers.min_by_key(|worker| (self.trees[*worker].len(), loads[*worker]))
        };
        let worker = worker.expect("a case has workers");
        self.trees[worker].insert(&turn.blocks);
        worker
    }

    fn workers(&self) -> usize {
        self.trees.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(conversation: u64, blocks: &[u32]) -> Turn {
        Turn { at: Time::ZERO, client: 0, tokens: 5000, bytes: 0, output: 1, conversation, blocks: blocks.into() }
    }

    #[test]
    fn bounded_hash_keeps_worker_below_bound() {
        let mut rule = BoundedHash::new(4);
        let home = rule.choose(&turn(7, &[]), &[0; 4]);
        assert_eq!(rule.choose(&turn(7, &[]), &[5; 4]), home);
        let mut loads = [0; 4];
        loads[home] = 5;
        assert_ne!(rule.choose(&turn(7, &[]), &loads), home);
        let spread: std::collections::HashSet<_> = (0..50).map(|key| rule.choose(&turn(key, &[]), &[0; 4])).collect();
        assert_eq!(spread.len(), 4);
    }

    #[test]
    fn prefix_tree_follows_match_unless_unbalanced() {
        let mut rule = PrefixTree::new(2);
        assert_eq!(rule.choose(&turn(0, &[0, 1]), &[0, 0]), 0);
        assert_eq!(rule.choose(&turn(0, &[2, 3]), &[1, 0]), 1);
        assert_eq!(rule.choose(&turn(0, &[2, 3, 4]), &[0, 30]), 1);
        assert_eq!(rule.choose(&turn(0, &[2, 3, 4]), &[0, 33]), 0);
    }
}
