//! What of the prompts came from the cache of a worker's backend.

use modelrelay_protocol::message::TokenCounts;

use super::WorkerLink;

/// The tokens of the prompts of completed requests, as far as the backend reported how many of them were cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptTokens {
    /// All of them.
    pub read: u64,
    /// Those that were cached.
    pub cached: u64,
}

impl PromptTokens {
    /// Returns the share that was cached, from 0 to 1; `None` if nothing was reported.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.read > 0).then(|| self.cached as f64 / self.read as f64)
    }

    fn add(&mut self, tokens: &TokenCounts) {
        if let Some(cached) = tokens.cached_tokens {
            self.read = self.read.saturating_add(tokens.prompt_tokens);
            self.cached = self.cached.saturating_add(cached.min(tokens.prompt_tokens));
        }
    }
}

impl WorkerLink {
    /// Counts the prompt of a completed request.
    pub fn count_prompt(&self, tokens: &TokenCounts) {
        self.lock().prompts.add(tokens);
    }

    /// Returns the counts since the worker connected.
    pub fn prompt_tokens(&self) -> PromptTokens {
        self.lock().prompts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_prompts_with_reported_cache_count() {
        let mut prompts = PromptTokens::default();
        prompts.add(&TokenCounts { prompt_tokens: 100, cached_tokens: None, ..TokenCounts::default() });
        assert_eq!(prompts.hit_rate(), None);
        for cached in [Some(0), Some(50), Some(700)] {
            prompts.add(&TokenCounts { prompt_tokens: 100, cached_tokens: cached, ..TokenCounts::default() });
        }
        assert_eq!(prompts.hit_rate(), Some(0.5));
    }
}
