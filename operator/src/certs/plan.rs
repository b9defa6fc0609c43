//! Determines the next action as a pure function of the time, the Secret, and the bundle that the API server has.
//!
//! The order of the checks is what makes this safe: first that there is a working pair at all, then that the API server
//! trusts it, then what is merely due. Each action is one write, and the next check sees the state after that write.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::Policy;

/// A certificate's period of validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first valid moment.
    pub not_before: SystemTime,
    /// The end of the period.
    pub not_after: SystemTime,
}

impl Validity {
    /// True if `now` is within the period.
    pub fn covers(self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// True if two thirds of the period are over.
    fn is_due(self, now: SystemTime) -> bool {
        let whole = self.not_after.duration_since(self.not_before).unwrap_or_default();
        now >= self.not_before + whole * 2 / 3
    }
}

/// The authority that signed the served certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signer {
    /// The current authority.
    Current,
    /// The previous authority.
    Previous,
}

/// The served certificate, if it matches its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its period of validity.
    pub validity: Validity,
    /// The authority that signed it; `None` if the Secret contains no such authority.
    pub signer: Option<Signer>,
    /// True if it is valid for all of the Service's names.
    pub names: bool,
}

/// The contents of the operator's Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The authority's certificate.
    pub authority: Option<Validity>,
    /// True if the authority's key exists and matches.
    pub can_sign: bool,
    /// The previous authority's certificate.
    pub previous: Option<Validity>,
    /// The served certificate.
    pub leaf: Option<Leaf>,
}

/// The state of the Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// There is none.
    Nothing,
    /// It is not labelled as the operator's.
    Foreign,
    /// It belongs to the operator.
    Ours(Contents),
}

/// The bundle that the API server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// There is no webhook configuration, so the webhook is not called.
    NoConfiguration,
    /// It differs from the Secret.
    Differs,
    /// It has matched the Secret for this duration.
    For(Duration),
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Do nothing.
    Wait,
    /// Do nothing, because the Secret belongs to another owner.
    Refuse,
    /// Create an authority and a certificate signed by it at once. Calls fail until it is published.
    Replace(Reason),
    /// Create an authority alongside the current one, which still signs the served certificate.
    NewAuthority(Reason),
    /// Create a certificate.
    NewLeaf(Reason),
    /// Remove the old authority.
    ForgetPrevious,
    /// Publish the bundle to the API server.
    Publish,
}

/// The reason that a certificate or an authority is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There was none.
    Missing,
    /// The existing one cannot be used.
    Unusable,
    /// The authority is not valid at this time.
    AuthorityNotValid,
    /// The certificate is not valid at this time.
    LeafNotValid,
    /// The Service has other names.
    Names,
    /// Two thirds of its lifetime are over.
    Due,
    /// The authority's key is lost.
    KeyLost,
    /// There is a new authority, and the API server trusts it.
    AuthorityTrusted,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "none existed",
            Self::Unusable => "the existing one was unusable",
            Self::AuthorityNotValid => "the authority was not yet valid or expired",
            Self::LeafNotValid => "the certificate was not yet valid or expired",
            Self::Names => "the names of the Service changed",
            Self::Due => "two thirds of its lifetime had passed",
            Self::KeyLost => "the authority's key is missing",
            Self::AuthorityTrusted => "the API server trusts the new authority",
        })
    }
}

/// Returns the next action.
pub fn plan(now: SystemTime, held: &Held, published: Published, policy: &Policy) -> Action {
    let contents = match held {
        // The webhook is not called, and the configuration has to own the Secret.
        Held::Nothing if published == Published::NoConfiguration => return Action::Wait,
        Held::Nothing => return Action::Replace(Reason::Missing),
        Held::Foreign => return Action::Refuse,
        Held::Ours(contents) => contents,
    };
    let Some(authority) = contents.authority else {
        return Action::Replace(Reason::Unusable);
    };
    if !authority.covers(now) {
        return Action::Replace(Reason::AuthorityNotValid);
    }
    let (leaf, signer) = match usable(now, contents.leaf) {
        Ok(usable) => usable,
        Err(reason) if contents.can_sign => return Action::NewLeaf(reason),
        Err(reason) => return Action::Replace(reason),
    };
    if published == Published::Differs {
        return Action::Publish;
    }
    match signer {
        Signer::Previous => when_trusted(contents.can_sign, published, policy),
        Signer::Current => when_due(now, contents, authority, leaf, policy),
    }
}

/// Returns the served certificate, if a client that trusts the operator's authorities accepts it.
fn usable(now: SystemTime, leaf: Option<Leaf>) -> Result<(Validity, Signer), Reason> {
    let leaf = leaf.ok_or(Reason::Unusable)?;
    let signer = leaf.signer.ok_or(Reason::Unusable)?;
    if !leaf.validity.covers(now) {
        return Err(Reason::LeafNotValid);
    }
    if !leaf.names {
        return Err(Reason::Names);
    }
    Ok((leaf.validity, signer))
}

fn when_trusted(can_sign: bool, published: Published, policy: &Policy) -> Action {
    let trusted = match published {
        Published::NoConfiguration => true,
        Published::Differs => false,
        Published::For(time) => time >= policy.settle,
    };
    match (can_sign, trusted) {
        // The new authority lost its key before it signed anything. Supporting a third authority is not worth the rules
        // for it.
        (false, _) => Action::Replace(Reason::KeyLost),
        (true, true) => Action::NewLeaf(Reason::AuthorityTrusted),
        (true, false) => Action::Wait,
    }
}

fn when_due(now: SystemTime, contents: &Contents, authority: Validity, leaf: Validity, policy: &Policy) -> Action {
    // The certificate is renewed first: when the authority changes, it must last until every API server has received
    // the new one. A certificate that ends with its authority would be followed by one that ends then too, over and
    // over, so in that case the authority is renewed first.
    if contents.can_sign && leaf.is_due(now) && leaf.not_after < authority.not_after {
        return Action::NewLeaf(Reason::Due);
    }
    if let Some(previous) = contents.previous {
        let served_for = now.duration_since(leaf.not_before).unwrap_or_default();
        if served_for >= policy.overlap || !previous.covers(now) {
            return Action::ForgetPrevious;
        }
        return Action::Wait;
    }
    if !contents.can_sign {
        return Action::NewAuthority(Reason::KeyLost);
    }
    if authority.is_due(now) {
        return Action::NewAuthority(Reason::Due);
    }
    Action::Wait
}

#[cfg(test)]
mod tests;
