//! Estimates of the tokens of requests whose backends report none: for the ledger, limits of tokens, and shares.

use modelrelay_protocol::paths::Endpoint;

use super::RequestRecord;
use crate::dispatch::{TOKEN_BYTES, TokenUsage};
use crate::provider::response::Received;

/// The estimated tokens of a request's body of this size. Sound and pictures are no text, and to count tokens costs
/// none.
pub fn input_estimate(endpoint: Endpoint, bytes: u64) -> u64 {
    let is_text = !matches!(endpoint, Endpoint::Audio | Endpoint::Images);
    if is_text && !is_free(endpoint) { bytes.div_ceil(TOKEN_BYTES) } else { 0 }
}

/// The estimated tokens of a response so far: one per event of a stream, and else one per four bytes.
pub fn output_estimate(endpoint: Endpoint, received: &Received) -> u64 {
    match received.data_lines {
        _ if !generates_text(endpoint) => 0,
        0 => received.bytes.div_ceil(TOKEN_BYTES),
        lines => lines,
    }
}

/// True for routes on which a backend computes no tokens.
pub fn is_free(endpoint: Endpoint) -> bool {
    matches!(endpoint, Endpoint::CountTokens | Endpoint::Tokenize | Endpoint::Models)
}

impl RequestRecord {
    /// Returns what the request's key is charged for it at its end, as reported by the backend or estimated. `None` if
    /// that is the charge of its beginning: nothing was generated, or the backend returned an error; and for requests
    /// without a key, which are in order of arrival, whatever they have used.
    pub fn usage(&self) -> Option<TokenUsage> {
        self.api_key.as_ref()?;
        if let Some(tokens) = self.progress().token_counts {
            return Some(TokenUsage { input: tokens.prompt_tokens, output: tokens.completion_tokens });
        }
        let received = self.response.received();
        let output = output_estimate(self.endpoint, &received);
        let is_generated = output > 0 && !received.is_error() && !self.is_stored;
        is_generated.then(|| TokenUsage::estimated(self.body_bytes, output))
    }
}

fn generates_text(endpoint: Endpoint) -> bool {
    match endpoint {
        Endpoint::ChatCompletions
        | Endpoint::Completions
        | Endpoint::Responses
        | Endpoint::Messages
        | Endpoint::Native => true,
        Endpoint::CountTokens
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Score
        | Endpoint::Classify
        | Endpoint::Images
        | Endpoint::Audio
        | Endpoint::Tokenize
        | Endpoint::Models
        | Endpoint::Other => false,
    }
}
