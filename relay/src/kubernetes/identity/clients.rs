//! The accounts of clients' tokens.

use std::sync::Arc;
use std::time::SystemTime;

use modelrelay_protocol::secret::Secret;

use super::claims::Claims;
use super::{Denial, Identities, ServiceAccount, TokenReviewOutcome};

impl Identities {
    /// Identifies the account of a client's token, without waiting if the token was reviewed lately. It is reviewed
    /// only if it could be valid. A `suspect` is an address that failed often; `rejected` is called if a review that
    /// this call waited for rejected the token.
    pub async fn account_of_client(
        self: &Arc<Self>,
        token: &str,
        suspect: bool,
        rejected: impl FnOnce(),
    ) -> Result<ServiceAccount, Denial> {
        let claims = Claims::read(token, &self.audience, SystemTime::now())
            .map_err(|why| Denial::Refused(why.description(&self.audience)))?;
        match self.review_outcome(&Secret::new(token), &claims, suspect).await? {
            (TokenReviewOutcome::Genuine(account), _) => Ok(account),
            (TokenReviewOutcome::Refused, waited) => {
                if waited {
                    rejected();
                }
                Err(Denial::Refused("the cluster rejected the ServiceAccount token".to_owned()))
            }
        }
    }

    /// The audience that tokens must be issued for.
    pub fn audience(&self) -> &str {
        &self.audience
    }
}
