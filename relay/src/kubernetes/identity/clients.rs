//! The accounts of clients' tokens.

use std::sync::Arc;
use std::time::SystemTime;

use modelrelay_protocol::secret::Secret;

use super::claims::Claims;
use super::{BegunReview, Denial, Identities, ServiceAccount, TokenReviewOutcome, outcome_of};

/// The account of a client's token.
#[derive(Debug)]
pub enum ClientAccount {
    /// It is known.
    Known(ServiceAccount),
    /// It is being reviewed.
    Pending(PendingAccount),
}

/// A review to wait for.
pub struct PendingAccount(BegunReview);

impl Identities {
    /// Identifies the account of a client's token, without waiting if the token was reviewed lately. It is reviewed only if it could
    /// be valid. A `suspect` is an address that failed often.
    pub fn account_of_client(self: &Arc<Self>, token: &str, suspect: bool) -> Result<ClientAccount, Denial> {
        let claims = Claims::read(token, &self.audience, SystemTime::now())
            .map_err(|why| Denial::Refused(why.description(&self.audience)))?;
        match self.begin_review(&Secret::new(token), &claims, suspect) {
            BegunReview::Known(outcome) => account_of(outcome).map(ClientAccount::Known),
            pending @ BegunReview::Pending(_) => Ok(ClientAccount::Pending(PendingAccount(pending))),
        }
    }

    /// The audience that tokens must be issued for.
    pub fn audience(&self) -> &str {
        &self.audience
    }
}

impl PendingAccount {
    /// Waits for the result.
    pub async fn wait(self) -> Result<ServiceAccount, Denial> {
        account_of(outcome_of(self.0).await?)
    }
}

impl std::fmt::Debug for PendingAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingAccount").finish_non_exhaustive()
    }
}

fn account_of(outcome: TokenReviewOutcome) -> Result<ServiceAccount, Denial> {
    match outcome {
        TokenReviewOutcome::Genuine(account) => Ok(account),
        TokenReviewOutcome::Refused => Err(Denial::Refused("the cluster rejected the ServiceAccount token".to_owned())),
    }
}
