use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A moment long after the epoch, plus this number of days.
fn day(days: u32) -> SystemTime {
    SystemTime::UNIX_EPOCH + DAY * (20_000 + days)
}

fn life(from: u32, to: u32) -> Validity {
    Validity { not_before: day(from), not_after: day(to) }
}

/// An authority of ten years and a certificate of ninety days, both created on day 0.
fn fresh() -> Contents {
    Contents {
        authority: Some(life(0, 3650)),
        can_sign: true,
        previous: None,
        leaf: Some(Leaf { validity: life(0, 90), signer: Some(Signer::Current), names: true }),
    }
}

fn leaf(validity: Validity, signer: Option<Signer>) -> Option<Leaf> {
    Some(Leaf { validity, signer, names: true })
}

fn next(now: SystemTime, contents: Contents) -> Action {
    plan(now, &SecretState::Ours(contents), Published::For(HOUR), &Policy::default())
}

#[test]
fn missing_secret_is_created() {
    let missing = Action::Replace(IssueReason::Missing);
    assert_eq!(plan(day(0), &SecretState::Nothing, Published::Differs, &Policy::default()), missing);
}

#[test]
fn missing_secret_without_webhook_configuration_waits() {
    assert_eq!(plan(day(0), &SecretState::Nothing, Published::NoConfiguration, &Policy::default()), Action::Wait);
}

#[test]
fn foreign_secret_is_refused() {
    assert_eq!(plan(day(0), &SecretState::Foreign, Published::Differs, &Policy::default()), Action::Refuse);
}

#[test]
fn fresh_trusted_pair_needs_no_action() {
    assert_eq!(next(day(1), fresh()), Action::Wait);
    let no_caller = plan(day(1), &SecretState::Ours(fresh()), Published::NoConfiguration, &Policy::default());
    assert_eq!(no_caller, Action::Wait);
}

#[test]
fn differing_published_bundle_is_republished() {
    let told = plan(day(1), &SecretState::Ours(fresh()), Published::Differs, &Policy::default());
    assert_eq!(told, Action::Publish);
}

#[test]
fn certificate_is_renewed_after_two_thirds_of_lifetime() {
    assert_eq!(next(day(60) - HOUR, fresh()), Action::Wait);
    assert_eq!(next(day(60), fresh()), Action::NewLeaf(IssueReason::Due));
}

#[test]
fn expired_certificate_is_renewed_before_publishing() {
    let action = plan(day(91), &SecretState::Ours(fresh()), Published::Differs, &Policy::default());
    assert_eq!(action, Action::NewLeaf(IssueReason::LeafNotValid));
}

#[test]
fn not_yet_valid_certificate_is_replaced() {
    let ahead = Contents { leaf: leaf(life(10, 100), Some(Signer::Current)), ..fresh() };
    assert_eq!(next(day(5), ahead), Action::NewLeaf(IssueReason::LeafNotValid));
    let authority_too = Contents { authority: Some(life(10, 3660)), ..ahead };
    assert_eq!(next(day(5), authority_too), Action::Replace(IssueReason::AuthorityNotValid));
}

#[test]
fn other_service_name_requires_new_certificate() {
    let renamed = Leaf { validity: life(0, 90), signer: Some(Signer::Current), names: false };
    assert_eq!(next(day(1), Contents { leaf: Some(renamed), ..fresh() }), Action::NewLeaf(IssueReason::Names));
}

#[test]
fn garbage_is_replaced() {
    assert_eq!(next(day(1), Contents { authority: None, ..fresh() }), Action::Replace(IssueReason::Unusable));
    assert_eq!(next(day(1), Contents { leaf: None, ..fresh() }), Action::NewLeaf(IssueReason::Unusable));
    let unsigned = Contents { leaf: leaf(life(0, 90), None), ..fresh() };
    assert_eq!(next(day(1), unsigned), Action::NewLeaf(IssueReason::Unusable));
    let powerless = Contents { leaf: None, can_sign: false, ..fresh() };
    assert_eq!(next(day(1), powerless), Action::Replace(IssueReason::Unusable));
}

#[test]
fn expired_authority_is_replaced() {
    let ended = Contents { authority: Some(life(0, 50)), ..fresh() };
    assert_eq!(next(day(50), ended), Action::Replace(IssueReason::AuthorityNotValid));
}

#[test]
fn authority_without_key_gets_successor() {
    assert_eq!(next(day(1), Contents { can_sign: false, ..fresh() }), Action::NewAuthority(IssueReason::KeyLost));
}

/// The complete renewal of an authority, each step on the state that the previous one left.
#[test]
fn new_authority_is_trusted_before_use() {
    let policy = Policy::default();
    let now = day(2434);
    let at_two_thirds = Contents { leaf: leaf(life(2400, 2490), Some(Signer::Current)), ..fresh() };
    assert_eq!(next(day(2433), at_two_thirds), Action::Wait);
    assert_eq!(next(now, at_two_thirds), Action::NewAuthority(IssueReason::Due));

    let beside = Contents {
        authority: Some(Validity { not_before: now, not_after: now + policy.ca_lifetime }),
        previous: fresh().authority,
        leaf: leaf(life(2400, 2490), Some(Signer::Previous)),
        ..fresh()
    };
    let held = SecretState::Ours(beside);
    assert_eq!(plan(now, &held, Published::Differs, &policy), Action::Publish);
    let just_told = Published::For(policy.settle - Duration::from_millis(1));
    assert_eq!(plan(now, &held, just_told, &policy), Action::Wait);
    let settled = Published::For(policy.settle);
    assert_eq!(plan(now, &held, settled, &policy), Action::NewLeaf(IssueReason::AuthorityTrusted));

    let used = Contents { leaf: leaf(life(2434, 2524), Some(Signer::Current)), ..beside };
    assert_eq!(next(now + HOUR, used), Action::Wait);
    assert_eq!(next(now + policy.overlap, used), Action::ForgetPrevious);
    assert_eq!(next(now + policy.overlap, Contents { previous: None, ..used }), Action::Wait);
}

#[test]
fn certificate_is_renewed_before_due_authority() {
    let both_due = Contents { leaf: leaf(life(2400, 2490), Some(Signer::Current)), ..fresh() };
    assert_eq!(next(day(2470), both_due), Action::NewLeaf(IssueReason::Due));
}

/// A certificate that was shortened to its authority's end would be followed by one with the same end: renewing it
/// would never finish.
#[test]
fn certificate_limited_by_authority_waits_for_next_authority() {
    let last = Contents { leaf: leaf(life(3560, 3650), Some(Signer::Current)), ..fresh() };
    assert_eq!(next(day(3640), last), Action::NewAuthority(IssueReason::Due));
    // The configured lifetime has grown since: the authority has time left, but not beyond the end of the certificate.
    let outgrown = Contents { authority: Some(life(0, 90)), ..fresh() };
    assert_eq!(next(day(60), outgrown), Action::NewAuthority(IssueReason::Due));
    let older = Contents { authority: Some(life(30, 90)), ..fresh() };
    assert_eq!(next(day(65), older), Action::Wait);
    let old_beside = Contents { previous: Some(life(0, 100)), ..outgrown };
    assert_eq!(next(day(60), old_beside), Action::ForgetPrevious);
}

#[test]
fn new_authority_without_webhook_configuration_is_used_immediately() {
    let beside = Contents { previous: fresh().authority, leaf: leaf(life(0, 90), Some(Signer::Previous)), ..fresh() };
    let action = plan(day(1), &SecretState::Ours(beside), Published::NoConfiguration, &Policy::default());
    assert_eq!(action, Action::NewLeaf(IssueReason::AuthorityTrusted));
}

#[test]
fn expired_previous_authority_is_forgotten_immediately() {
    let ended = Contents { previous: Some(life(0, 1)), ..fresh() };
    assert_eq!(next(day(1), ended), Action::ForgetPrevious);
}
