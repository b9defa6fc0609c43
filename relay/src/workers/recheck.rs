//! Reviews the tokens of connected workers periodically: one after the other, so that a large fleet is no flood.

use std::sync::Weak;

use tokio::time::MissedTickBehavior;

use crate::settings::worker_credential::Credential;
use crate::state::Relay;

/// The most reviews in a row without a result; the other workers then wait for the next interval, as each may take
/// seconds.
const UNKNOWN_AT_MOST: u32 = 3;

/// Runs until the relay is gone.
pub async fn run(relay: Weak<Relay>) {
    let Some(interval) = relay.upgrade().map(|relay| relay.identities.recheck) else { return };
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is immediate, and no worker is connected yet.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let Some(relay) = relay.upgrade() else { return };
        review_all(&relay).await;
    }
}

async fn review_all(relay: &Relay) {
    let mut unknown = 0;
    for provider in relay.providers.all() {
        for link in provider.links() {
            let Credential::Token(identity) = &link.info.credential else { continue };
            if link.draining_since().is_some() {
                continue;
            }
            let is_known = relay.identities.review_again(identity).await;
            unknown = if is_known { 0 } else { unknown + 1 };
            if unknown == UNKNOWN_AT_MOST {
                return;
            }
            provider.send_away_if_refused(&link);
        }
    }
}
