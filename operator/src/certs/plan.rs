//! What comes next, as a pure function of the time, the Secret, and what the API server has been told.
//!
//! The order of the questions is the safety of it: first that there is a working pair at all, then that the API server
//! trusts it, then what is merely due. Each answer is one write; the next question is asked of what that write left.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::Policy;

/// From when until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first moment.
    pub not_before: SystemTime,
    /// The last.
    pub not_after: SystemTime,
}

impl Validity {
    /// Whether it is valid now.
    pub fn covers(self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// Whether two thirds of its time are over.
    fn is_due(self, now: SystemTime) -> bool {
        let whole = self.not_after.duration_since(self.not_before).unwrap_or_default();
        now >= self.not_before + whole * 2 / 3
    }
}

/// Who signed the served certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signer {
    /// The authority.
    Current,
    /// The one before.
    Previous,
}

/// The served certificate, if it goes with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// From when until when.
    pub validity: Validity,
    /// Who signed it; nobody that the Secret knows.
    pub signer: Option<Signer>,
    /// Whether it is valid for all of the Service's names.
    pub names: bool,
}

/// What a Secret of ours holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The authority's certificate.
    pub authority: Option<Validity>,
    /// Whether the authority's key is there and fits.
    pub can_sign: bool,
    /// The certificate of the authority before.
    pub previous: Option<Validity>,
    /// The served certificate.
    pub leaf: Option<Leaf>,
}

/// The Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// There is none.
    Nothing,
    /// It is not labelled as ours.
    Foreign,
    /// It is.
    Ours(Contents),
}

/// What the API server has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// There is no webhook configuration, so nobody calls.
    NoConfiguration,
    /// Something else than what the Secret says.
    Differs,
    /// What the Secret says, for so long.
    For(Duration),
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Nothing can: the Secret is somebody else's.
    Refuse,
    /// A new authority and a certificate of it at once. Calls fail until it is published.
    Replace(Reason),
    /// A new authority beside the present one, which still signs for what is served.
    NewAuthority(Reason),
    /// A new certificate.
    NewLeaf(Reason),
    /// The old authority goes.
    ForgetPrevious,
    /// The API server is told.
    Publish,
}

/// Why something is made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There was none.
    Missing,
    /// What is there cannot be used.
    Unusable,
    /// The authority is not valid at this time.
    AuthorityNotValid,
    /// The certificate is not valid at this time.
    LeafNotValid,
    /// The Service has other names.
    Names,
    /// Two thirds of its time are over.
    Due,
    /// The authority's key is gone.
    KeyLost,
    /// There is a new authority, and the API server trusts it.
    AuthorityTrusted,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "there was none",
            Self::Unusable => "what was there could not be used",
            Self::AuthorityNotValid => "the authority was not valid at this time",
            Self::LeafNotValid => "it was not valid at this time",
            Self::Names => "the Service has other names",
            Self::Due => "two thirds of its time were over",
            Self::KeyLost => "the authority's key was lost",
            Self::AuthorityTrusted => "the API server trusts the new authority",
        })
    }
}

/// What comes next.
pub fn plan(now: SystemTime, held: &Held, published: Published, policy: &Policy) -> Action {
    let contents = match held {
        // Nobody calls, and the configuration is to own the Secret.
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

/// The served certificate, if a client that trusts our authorities accepts it.
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
        // The new authority lost its key before it signed anything. A third beside the two is not worth the rules for it.
        (false, _) => Action::Replace(Reason::KeyLost),
        (true, true) => Action::NewLeaf(Reason::AuthorityTrusted),
        (true, false) => Action::Wait,
    }
}

fn when_due(now: SystemTime, contents: &Contents, authority: Validity, leaf: Validity, policy: &Policy) -> Action {
    // The certificate first: when the authority changes, it must last until the API server has heard. One that ends with its
    // authority would be followed by one that ends then too, over and over: there the authority's turn comes first.
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
