//! A cache of prompts in blocks, as inference engines have one: the least recently used block leaves first.

use std::collections::VecDeque;

/// The number of a block. The same block always follows the same blocks.
pub type Block = u32;

/// The tokens of a block.
pub const BLOCK_TOKENS: u32 = 512;

/// A set of blocks of limited size.
#[derive(Clone, Debug)]
pub struct BlockCache {
    capacity: usize,
    /// By block: the time of its last use; 0 if it is not in the cache.
    used: Vec<u64>,
    /// Uses in order. Those that are not the last one of their block are skipped.
    order: VecDeque<(Block, u64)>,
    len: usize,
    clock: u64,
}

impl BlockCache {
    /// Creates an empty cache for this number of blocks.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, used: Vec::new(), order: VecDeque::new(), len: 0, clock: 0 }
    }

    /// The number of blocks at the beginning of a prompt that are in the cache.
    pub fn matching(&self, prompt: &[Block]) -> usize {
        prompt.iter().take_while(|block| self.used.get(**block as usize).is_some_and(|used| *used > 0)).count()
    }

    /// Uses all blocks of a prompt, the first one last: the end of a prompt leaves before its beginning.
    pub fn insert(&mut self, prompt: &[Block]) {
        for block in prompt.iter().rev() {
            let index = *block as usize;
            if self.used.len() <= index {
                self.used.resize(index + 1, 0);
            }
            self.len += usize::from(self.used[index] == 0);
            self.clock += 1;
            self.used[index] = self.clock;
            self.order.push_back((*block, self.clock));
        }
        while self.len > self.capacity
            && let Some((block, used)) = self.order.pop_front()
        {
            if self.used[block as usize] == used {
                self.used[block as usize] = 0;
                self.len -= 1;
            }
        }
        if self.order.len() > 2 * self.len + 1024 {
            let used = &self.used;
            self.order.retain(|(block, at)| used[*block as usize] == *at);
        }
    }

    /// The number of blocks in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the cache has no block.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_oldest_prompt_leaves_first() {
        let mut cache = BlockCache::new(5);
        cache.insert(&[0, 1, 2]);
        cache.insert(&[0, 3, 4, 5]);
        assert_eq!((cache.len(), cache.matching(&[0, 1, 2]), cache.matching(&[0, 3, 4, 5])), (5, 2, 4));
        cache.insert(&[6]);
        assert_eq!((cache.len(), cache.matching(&[0, 1]), cache.matching(&[0, 3, 4, 5])), (5, 1, 4));
    }

    #[test]
    fn repeated_use_keeps_blocks_and_bounds_memory() {
        let mut cache = BlockCache::new(3);
        cache.insert(&[9]);
        for block in 10..10_000 {
            cache.insert(&[9]);
            cache.insert(&[block]);
        }
        assert_eq!(cache.matching(&[9]), 1);
        assert!(cache.order.len() <= 2 * cache.len + 1025, "{}", cache.order.len());
    }
}
