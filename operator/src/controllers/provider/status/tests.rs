#![allow(clippy::needless_pass_by_value, reason = "values are written where they are used")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controllers::provider::outcome::{FailureKind, WorkerSecret};
use crate::relays::state::{ModelReport, RelayReport, WorkerReport};
use crate::spec::provider::InvalidSpec;

fn provider(spec: Value) -> Provider {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": "local", "namespace": "llm", "generation": 3}, "spec": spec,
    });
    serde_json::from_value(value).unwrap()
}

fn pod(name: &str, ready: bool) -> Arc<Pod> {
    let ready = if ready { "True" } else { "False" };
    let value = json!({
        "metadata": {"name": name, "namespace": "llm"}, "spec": {"nodeName": "n", "containers": []},
        "status": {"conditions": [{"type": "Ready", "status": ready, "message": "containers with unready status: [relay]"}]},
    });
    Arc::new(serde_json::from_value(value).unwrap())
}

fn deployment(replicas: i32, available: i32) -> Arc<Deployment> {
    let value = json!({
        "metadata": {"name": "local-relay", "generation": 1},
        "spec": {"replicas": replicas, "selector": {}, "template": {}},
        "status": {
            "observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas, "availableReplicas": available,
        },
    });
    Arc::new(serde_json::from_value(value).unwrap())
}

fn reported(relays: &[(&str, &str)]) -> Arc<RelaySnapshot> {
    let report = |hash: &str| RelayReport { config_hash: Some(hash.to_owned()), ..RelayReport::default() };
    let relays = relays.iter().map(|(pod, hash)| ((*pod).to_owned(), Ok(report(hash)))).collect();
    Arc::new(RelaySnapshot { relays, ..RelaySnapshot::default() })
}

fn serving() -> ClusterView {
    ClusterView {
        own: None,
        unreadable: Vec::new(),
        reviewers: Default::default(),
        relay: Ok(None),
        sharers: Vec::new(),
        relay_pods: vec![pod("a", true)],
        deployment: Some(deployment(1, 1)),
        pools: Vec::new(),
        reported: Some(reported(&[("a", "new")])),
    }
}

fn applied() -> ProviderOutcome {
    ProviderOutcome {
        generation: Some(3),
        config_hash: Some("new".into()),
        config_generation: Some(3),
        may_serve: true,
        ..ProviderOutcome::default()
    }
}

fn now() -> Time {
    Time(Timestamp::from_second(1).unwrap())
}

/// Returns type, status and reason of each condition.
fn conditions(spec: Value, view: &ClusterView, outcome: &ProviderOutcome) -> Vec<(String, String, String)> {
    let provider = provider(spec);
    let status = status(&ProviderFacts { provider: &provider, view, outcome }, &ProviderStatus::default(), &now());
    status.conditions.into_iter().map(|one| (one.type_, one.status, one.reason)).collect()
}

fn expect(
    ready: (&str, &str),
    programmed: (&str, &str),
    reconciling: (&str, &str),
    stalled: (&str, &str),
) -> Vec<(String, String, String)> {
    [("Ready", ready), ("Programmed", programmed), ("Reconciling", reconciling), ("Stalled", stalled)]
        .map(|(type_, (status, reason))| (type_.to_owned(), status.to_owned(), reason.to_owned()))
        .to_vec()
}

const FINE: (&str, &str) = ("False", "AsExpected");
const APPLIED: (&str, &str) = ("True", "ConfigurationApplied");

#[test]
fn relay_with_applied_configuration_serves() {
    let found = conditions(json!({}), &serving(), &applied());
    assert_eq!(found, expect(("True", "Serving"), APPLIED, FINE, FINE));
}

#[test]
fn first_pass_sets_every_condition() {
    let view = ClusterView {
        relay: Ok(None),
        own: None,
        unreadable: Vec::new(),
        sharers: Vec::new(),
        relay_pods: Vec::new(),
        deployment: None,
        pools: Vec::new(),
        reported: None,
        reviewers: Default::default(),
    };
    let found = conditions(json!({}), &view, &applied());
    assert_eq!(found, expect(("False", "NoRelayReady"), ("False", "WaitingForRelays"), ("True", "RollingOut"), FINE));
}

#[test]
fn outdated_relay_is_named() {
    let view = ClusterView {
        relay_pods: vec![pod("a", true), pod("b", true)],
        deployment: Some(deployment(2, 2)),
        reported: Some(reported(&[("a", "new"), ("b", "old")])),
        ..serving()
    };
    let provider = provider(json!({"relay": {"replicas": 2}}));
    let (outcome, before) = (applied(), ProviderStatus::default());
    let status = status(&ProviderFacts { provider: &provider, view: &view, outcome: &outcome }, &before, &now());
    let programmed = &status.conditions[1];
    assert_eq!(
        (programmed.status.as_str(), programmed.message.as_str()),
        ("False", "Pod b runs an older configuration")
    );
    assert_eq!(status.conditions[2].reason, "WaitingForRelays");
    assert_eq!(status.conditions[0].status, "True");
}

#[test]
fn relay_refusing_configuration_reports_reason() {
    let refused = RelayReport {
        config_hash: Some("old".into()),
        config_error: Some("providers[0].queue: no".into()),
        ..RelayReport::default()
    };
    let relays = [("a".to_owned(), Ok(refused))].into();
    let view =
        ClusterView { reported: Some(Arc::new(RelaySnapshot { relays, ..RelaySnapshot::default() })), ..serving() };
    let found = conditions(json!({}), &view, &applied());
    let refused = "ConfigurationRefused";
    assert_eq!(found, expect(("True", "Serving"), ("False", refused), ("True", refused), FINE));
}

#[test]
fn invalid_spec_stalls() {
    let failure = ProviderFailure::from(&InvalidSpec(vec!["spec.models[1].id: twice".into()]));
    let found = conditions(json!({}), &serving(), &ProviderOutcome { failure: Some(failure), ..applied() });
    let invalid = "InvalidSpec";
    assert_eq!(found, expect(("False", invalid), ("False", invalid), ("False", invalid), ("True", invalid)));
}

#[test]
fn transient_error_leaves_serving_provider_ready() {
    let failure = ProviderFailure {
        reason: reasons::API_ERROR,
        message: "later".into(),
        kind: FailureKind::Transient,
        word: "api",
    };
    let outcome = ProviderOutcome { failure: Some(failure.clone()), ..applied() };
    let found = conditions(json!({}), &serving(), &outcome);
    assert_eq!(found, expect(("True", "Serving"), APPLIED, ("True", "ApiError"), FINE));
    let never_ran = ProviderOutcome { config_hash: None, may_serve: false, ..outcome };
    assert_eq!(conditions(json!({}), &serving(), &never_ran)[0].2, "ApiError");
}

#[test]
fn intentional_shutdown_is_no_failure() {
    let disabled = conditions(json!({"enabled": false}), &serving(), &applied());
    assert_eq!(disabled, expect(("False", "Disabled"), APPLIED, FINE, FINE));
    let none = ClusterView { relay_pods: Vec::new(), deployment: Some(deployment(0, 0)), ..serving() };
    let zero = conditions(json!({"relay": {"replicas": 0}}), &none, &applied());
    assert_eq!(zero, expect(("False", "ScaledToZero"), ("True", "ScaledToZero"), FINE, FINE));
}

#[test]
fn pool_at_zero_explains_ignored_expect_workers() {
    let outcome = ProviderOutcome { ignores_expect_workers: true, ..applied() };
    assert_eq!(conditions(json!({}), &serving(), &outcome)[0].2, "ScalesFromZero");
}

#[test]
fn stuck_rollout_stalls_while_relays_serve() {
    let mut deployment = deployment(1, 1);
    let changed = Arc::make_mut(&mut deployment);
    let condition = json!([{"type": "Progressing", "status": "False", "message": "timed out progressing"}]);
    changed.status.as_mut().unwrap().conditions = serde_json::from_value(condition).unwrap();
    changed.status.as_mut().unwrap().updated_replicas = Some(0);
    let view = ClusterView { deployment: Some(deployment), ..serving() };
    let found = conditions(json!({}), &view, &applied());
    assert_eq!(found, expect(("True", "Serving"), APPLIED, FINE, ("True", "RolloutStuck")));
}

#[test]
fn single_relay_uses_singular() {
    let messages = |wanted: i32, relays: &[&str], available: i32| {
        let hashes: Vec<(&str, &str)> = relays.iter().map(|name| (*name, "new")).collect();
        let view = ClusterView {
            relay_pods: relays.iter().map(|name| pod(name, true)).collect(),
            deployment: Some(deployment(wanted, available)),
            reported: Some(reported(&hashes)),
            ..serving()
        };
        let (provider, outcome) = (provider(json!({"relay": {"replicas": wanted}})), applied());
        let facts = ProviderFacts { provider: &provider, view: &view, outcome: &outcome };
        let status = status(&facts, &ProviderStatus::default(), &now());
        status.conditions[..3].iter().map(|condition| condition.message.clone()).collect::<Vec<_>>()
    };
    let at = "at http://local.llm.svc/v1";
    let one = [format!("1 of 1 relay takes requests {at}"), "1 of 1 relay Pod runs the newest configuration".into()];
    assert_eq!(messages(1, &["a"], 1)[..2], one);
    let two = [format!("2 of 2 relays take requests {at}"), "2 of 2 relay Pods run the newest configuration".into()];
    assert_eq!(messages(2, &["a", "b"], 2)[..2], two);
    let half = messages(2, &["a"], 1);
    assert_eq!(half[0], format!("1 of 2 relays takes requests {at}"));
    assert_eq!(half[2], "2 of 2 relays are up to date, 1 is available");
}

/// An unready relay whose container started at this second; the status is built at second 1.
fn started(second: i64) -> Arc<Pod> {
    let mut pod = Pod::clone(&pod("a", false));
    let status = pod.status.as_mut().unwrap();
    let at = |second| Timestamp::from_second(second).unwrap().to_string();
    status.start_time = Some(Time(Timestamp::from_second(-1000).unwrap()));
    let relay = json!([{
        "name": "relay", "state": {"running": {"startedAt": at(second)}}, "ready": false, "restartCount": 0, "image": "",
        "imageID": "",
    }]);
    status.container_statuses = serde_json::from_value(relay).unwrap();
    Arc::new(pod)
}

const UNREADY: &str = "Pod a: containers with unready status: [relay]";

fn why_unready(spec: Value, view: &ClusterView, outcome: &ProviderOutcome) -> String {
    let provider = provider(spec);
    let status = status(&ProviderFacts { provider: &provider, view, outcome }, &ProviderStatus::default(), &now());
    status.conditions[0].message.strip_prefix(UNREADY).unwrap().to_owned()
}

#[test]
fn relay_awaiting_first_worker_is_reported() {
    let fresh = ClusterView { relay_pods: vec![started(-18)], ..serving() };
    let patience = "; no worker is connected, and after its start the relay waits 15 s for the first";
    assert_eq!(why_unready(json!({}), &fresh, &applied()), patience);
    let expects = json!({"relay": {"expectWorkers": true}});
    assert_eq!(why_unready(expects.clone(), &fresh, &applied()), "; no worker is connected, and expectWorkers is true");
    let ignored = ProviderOutcome { ignores_expect_workers: true, ..applied() };
    assert_eq!(why_unready(expects, &fresh, &ignored), patience);
    // It does not respond, so nothing is known.
    let silent = ClusterView { reported: None, ..fresh };
    assert_eq!(why_unready(json!({}), &silent, &applied()), "");
}

#[test]
fn later_unready_relay_does_not_await_first_worker() {
    let later = ClusterView { relay_pods: vec![started(-20)], ..serving() };
    assert_eq!(why_unready(json!({}), &later, &applied()), "; no worker is connected");
    let saturates = json!({"relay": {"unreadyWhenSaturated": true}});
    assert_eq!(why_unready(saturates.clone(), &later, &applied()), "; no worker is connected");
    let with = |workers: &[&str], queue_depth| {
        let workers = workers.iter().map(|name| ((*name).to_owned(), WorkerReport::default())).collect();
        let reported = RelaySnapshot { workers, queue_depth, ..RelaySnapshot::clone(&reported(&[("a", "new")])) };
        ClusterView { relay_pods: vec![started(-20)], reported: Some(Arc::new(reported)), ..serving() }
    };
    let full = "; requests are queued, and unreadyWhenSaturated is true";
    assert_eq!(why_unready(saturates.clone(), &with(&[], 9), &applied()), format!("; no worker is connected{full}"));
    assert_eq!(why_unready(saturates, &with(&["w"], 9), &applied()), full);
    assert_eq!(why_unready(json!({}), &with(&["w"], 9), &applied()), "");
}

#[test]
fn unknown_worker_secret_is_reported_as_rotating() {
    let secret = WorkerSecret {
        version: None,
        changed_at: Timestamp::from_second(1).unwrap(),
        awaits_relays: true,
        status: crate::crd::provider::WorkerSecretStatus { name: "s".into(), previous_until: None, rotation: None },
    };
    let outcome = ProviderOutcome { worker_secret: Some(secret), ..applied() };
    assert_eq!(conditions(json!({}), &serving(), &outcome)[2].2, "RotatingSecret");
}

#[test]
fn numbers_sum_relays_and_models_need_workers() {
    let served = ModelReport { workers: 1, ..ModelReport::default() };
    let snapshot = RelaySnapshot {
        workers: [("i1".to_owned(), WorkerReport::default()), ("i2".to_owned(), WorkerReport::default())].into(),
        models: [("m".to_owned(), served), ("cold".to_owned(), ModelReport::default())].into(),
        queue_depth: 4,
        in_flight: 5,
        ..RelaySnapshot::default()
    };
    let view = ClusterView { reported: Some(Arc::new(snapshot)), ..serving() };
    let (provider, outcome) = (provider(json!({"relay": {"service": {"port": 8000}}})), applied());
    let facts = ProviderFacts { provider: &provider, view: &view, outcome: &outcome };
    let status = status(&facts, &ProviderStatus::default(), &now());
    assert_eq!((status.workers, status.queue_depth, status.in_flight), (Some(2), Some(4), Some(5)));
    assert_eq!((status.models.as_slice(), status.model_count), (["m".to_owned()].as_slice(), Some(1)));
    assert_eq!(status.endpoint.as_deref(), Some("http://local.llm.svc:8000/v1"));
    assert_eq!(status.worker_endpoint.as_deref(), Some("http://local-workers.llm.svc:8081"));
}

#[test]
fn usage_is_kept_until_relays_report() {
    let (provider, outcome) = (provider(json!({})), applied());
    let usage_with = |view: &ClusterView, before: &ProviderStatus| {
        let facts = ProviderFacts { provider: &provider, view, outcome: &outcome };
        status(&facts, before, &now())
    };
    let since = Timestamp::from_second(60).unwrap();
    let report = UsageReport { since, requests: 7, input_tokens: 100, output_tokens: u64::MAX };
    let snapshot = RelaySnapshot { usage: Some(report), ..RelaySnapshot::default() };
    let view = ClusterView { reported: Some(Arc::new(snapshot)), ..serving() };
    let first = usage_with(&view, &ProviderStatus::default());
    let json = serde_json::to_value(&first.usage).unwrap();
    let expected =
        json!({"since": "1970-01-01T00:01:00Z", "requests": 7, "inputTokens": 100, "outputTokens": i64::MAX});
    assert_eq!(json, expected);
    assert_eq!(without_numbers(&first).usage, None, "it is written with the other numbers");
    let silent = ClusterView { reported: None, ..serving() };
    assert_eq!(usage_with(&silent, &first).usage, first.usage);
    assert_eq!(usage_with(&silent, &ProviderStatus::default()).usage, None);
}

#[test]
fn endpoints_show_scheme_and_omit_default_port() {
    for (relay, expected) in [
        (json!({}), "http://local.llm.svc/v1"),
        (json!({"service": {"port": 443}}), "http://local.llm.svc:443/v1"),
        (json!({"tls": {"secretName": "t"}}), "https://local.llm.svc/v1"),
        (json!({"tls": {"secretName": "t"}, "service": {"port": 80}}), "https://local.llm.svc:80/v1"),
    ] {
        let provider = provider(json!({"relay": relay}));
        assert_eq!(endpoint(&provider), expected);
        let scheme = provider.spec.relay.scheme();
        assert_eq!(worker_endpoint(&provider), format!("{scheme}://local-workers.llm.svc:8081"));
    }
}

#[test]
fn same_facts_give_same_status() {
    let (provider, view, outcome) = (provider(json!({})), serving(), applied());
    let facts = ProviderFacts { provider: &provider, view: &view, outcome: &outcome };
    let first = status(&facts, &ProviderStatus::default(), &now());
    let later = Time(Timestamp::from_second(99).unwrap());
    assert_eq!(status(&facts, &first, &later), first);
}
