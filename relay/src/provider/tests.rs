//! Interleavings with other threads.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use modelrelay_protocol::location::Location;
use modelrelay_protocol::names::Naming;

use super::*;
use crate::dispatch::CancelReason;
use crate::provider::routing::Providers;
use crate::provider::worker::link::WorkerInfo;
use crate::provider::worker::register::Accepted;
use crate::settings::cli::Args;
use crate::settings::config::Config;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::request_journal::RequestJournal;
use crate::telemetry::usage::UsageLedger;

fn provider() -> Arc<Provider> {
    let args = <Args as clap::Parser>::parse_from(["modelrelay-relay", "--worker-secret", "0123456789abcdef"]);
    let config = Config::from_args(&args).expect("valid");
    let provider = config.providers[0].clone();
    let records = (RequestJournal::default(), UsageLedger::in_memory(1));
    Provider::start(provider, Shared::new(config, Arc::new(Metrics::new()), None, records, "relay".to_owned()))
}

/// Adds a link of the single process, which serves `m`.
fn join(provider: &Provider, succeeds: bool) -> Arc<WorkerLink> {
    let info = WorkerInfo {
        key: provider.shared.next_worker_key(),
        id: "w".into(),
        provider: Arc::clone(&provider.name),
        name: "box".into(),
        version: None,
        instance: Some("process".into()),
        pool: None,
        location: Location::default(),
        address: IpAddr::from([127, 0, 0, 1]),
        core1: true,
        slots1: false,
        homes1: true,
        credential: Credential::Secret(*provider.config().worker_secrets[0].secret.digest()),
        request_window: 1 << 20,
        round_trip: Duration::from_millis(1),
        max_unread_bytes: 1 << 20,
        connected_at: SystemTime::now(),
    };
    let models = vec![Arc::from("m")];
    let accepted = Accepted {
        location: Location::default(),
        name: "box".into(),
        models,
        max_concurrent: 1,
        slots: vec![],
        meaningless: BTreeSet::new(),
        naming: Naming::Exact,
        warnings: vec![],
    };
    let link = WorkerLink::new(info, vec!["m".into()], None);
    provider.join(&link, &accepted, &provider.config(), 0, RegisterAck::default(), succeeds);
    link
}

fn request(provider: &Provider) -> Arc<RequestRecord> {
    RequestRecord::sample(provider.shared.next_request_key(), b"{}", Arc::clone(&provider.shared.budget))
}

#[tokio::test]
async fn request_pinned_before_move_follows_worker() {
    let provider = provider();
    let older = join(&provider, false);
    let pin = provider.worker_of_instance("process");
    assert_eq!(pin, Some(older.info.key));
    let newer = join(&provider, true);
    provider.submit(&request(&provider), pin, None, None, None);
    assert_eq!(provider.queue_depth(), 1, "it waits for the newer link");
    provider.granted(&newer, Grant { slots: 1, others: 0, capacity: 1, links: 1 });
    assert_eq!(provider.queue_depth(), 0);
    assert_eq!(newer.release_all().len(), 1, "the newer link has it");
}

/// An admin who cancels a request at the moment at which its provider is removed must find it.
#[tokio::test]
async fn removed_provider_is_found_until_finished() {
    let (providers, provider) = (Providers::default(), provider());
    let is_found = || providers.all_with_leaving().iter().any(|found| Arc::ptr_eq(found, &provider));
    providers.replace(&[Arc::clone(&provider)]);
    let running = request(&provider);
    provider.submit(&running, None, None, None, None);
    assert_eq!(providers.replace(&[]).len(), 1);
    assert_eq!((providers.all().len(), is_found()), (0, true));
    providers.forget_finished();
    assert!(is_found(), "it has a request still");
    assert!(providers.replace(&[]).is_empty(), "it is removed once");
    provider.cancel(running.key, CancelReason::Admin);
    providers.forget_finished();
    assert!(!is_found());
}

#[tokio::test]
async fn response_begins_once_per_attempt() {
    let provider = provider();
    let link = join(&provider, false);
    provider.submit(&request(&provider), None, None, None, None);
    provider.granted(&link, Grant { slots: 1, others: 0, capacity: 1, links: 1 });
    let held = link.held_stream(1).expect("it is sent");
    assert!(!held.begun && link.mark_begun(held.stream));
    assert!(link.held_stream(held.stream).is_some_and(|held| held.begun));
    assert!(!link.mark_begun(held.stream), "it is recorded already");
    link.release(held.stream);
    assert!(!link.mark_begun(held.stream), "it has ended");
}
