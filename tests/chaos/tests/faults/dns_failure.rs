//! Names that cannot be resolved, and addresses that change, under load.

use modelrelay_chaos::{
    load::Plan,
    site::{RelayNode, Site},
};

use crate::{RELAYS, inside, two_relays};

#[tokio::test(flavor = "multi_thread")]
async fn failing_then_changed_name_loses_no_request() {
    inside("dns_failure::failing_then_changed_name_loses_no_request", |namespace| async move {
        let mut site = two_relays(&namespace, 2, |relay| relay).await;
        let load = site.load(Plan::mixed(16)).await;

        // No lookup succeeds; a relay that restarts at its old address is found all the same.
        load.ledger().fault();
        namespace.set_addresses(&[]);
        site.workers[0].process.process.wait_for_line("cannot resolve the relay's name").await;
        site.relays[0].kill().await;
        site.relays[0].restart().await;
        site.relays[0].has_workers(2).await;
        load.ledger().answers(50).await;

        // One relay moves to another address.
        load.ledger().fault();
        let moved = Site::relay().env("LISTEN_ADDR", "127.0.0.4:7001");
        let moved = RelayNode::start(moved).await;
        namespace.set_addresses(&[RELAYS[1], "127.0.0.4"]);
        moved.has_workers(2).await;
        let mut old = std::mem::replace(&mut site.relays[0], moved);
        old.target.moved(site.relays[0].relay.addr());
        old.target.is_killed();
        old.relay.process().kill().await;
        old.target.is_back();
        load.ledger().answers(100).await;
        site.check("DNS fails and changes", load).await;
    })
    .await;
}
