use std::time::SystemTime;

use modelrelay_protocol::location::Location;
use modelrelay_protocol::message::{CancelReason, TokenCounts};

use super::*;
use crate::dispatch::{Decision, MoveReason};

fn end(outcome: Outcome, code: u16) -> RequestEnd {
    RequestEnd { outcome, code, stream: true, duration: Duration::from_millis(300) }
}

fn home() -> Location {
    Location { zone: Some("attic".to_owned()), cluster: Some("home".to_owned()) }
}

fn worker(id: &str, used: u64, is_draining: bool) -> WorkerGauges {
    WorkerGauges {
        id: id.to_owned(),
        location: home(),
        is_draining,
        used,
        slots: 4,
        granted: 4,
        backlog_bytes: 8,
        last_heartbeat: SystemTime::UNIX_EPOCH + Duration::from_secs(7),
    }
}

fn state(providers: Vec<ProviderGauges>) -> impl Fn() -> RelayGauges {
    move || RelayGauges {
        providers: providers.clone(),
        buffered_bytes: 5,
        buffered_bytes_limit: 10,
        are_keys_broken: false,
    }
}

fn line<'a>(text: &'a str, start: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(start)).map(str::trim)
}

/// One of every event.
fn busy() -> Metrics {
    let metrics = Metrics::new();
    let provider = metrics.provider("local");
    let request = provider.request(Some("m"), Endpoint::ChatCompletions);
    request.finished(end(Outcome::Ok, 200));
    request.first_byte_sent(Duration::from_millis(20));
    request.first_byte_received(Duration::from_millis(10));
    request.chunk_received(Duration::from_millis(30));
    let tokens = TokenCounts { prompt_tokens: 3, completion_tokens: 5, total_tokens: 8, cached_tokens: Some(2) };
    request.tokens_used(tokens, Some(Duration::from_secs(1)));
    provider.queue_wait_ended(QueueOutcome::Dispatched, Duration::from_millis(1));
    provider.placed(Decision::Home);
    provider.placed(Decision::Moved(MoveReason::Busy));
    provider.zone_requests(&home()).unwrap().inc();
    assert!(provider.zone_requests(&Location::default()).is_none());
    provider.requeued(RequeueReason::WorkerLost);
    provider.cancelled(CancelReason::Timeout, Stage::Queued);
    provider.worker_connected(ConnectionResult::Accepted);
    provider.worker_disconnected(DisconnectReason::HeartbeatTimeout);
    provider.heartbeat_answered(Duration::from_millis(2));
    metrics.unrouted_request_finished(Endpoint::Other, Outcome::Unauthorized, 401);
    metrics.request_body_received(Endpoint::ChatCompletions, 300);
    metrics.response_body_sent(Endpoint::ChatCompletions, 3000);
    metrics.overhead_observed(Endpoint::ChatCompletions, Duration::from_micros(200));
    metrics.client_retried(ClientKind::OpenAi);
    metrics.login_failed(Realm::Worker);
    metrics.key_used("laptop", Some(tokens), Duration::from_millis(1500));
    metrics.usage_write_failed();
    metrics.config_loaded("abc");
    metrics
}

fn busy_state() -> ProviderGauges {
    ProviderGauges {
        name: "local".to_owned(),
        queue_capacity: 100,
        queue_oldest_age: Some(Duration::from_secs(3)),
        queued_bytes: 9,
        homes: 4,
        models: vec![
            ModelGauges { name: "m".to_owned(), known: true, workers: 2, queued: 1, in_flight: 3 },
            ModelGauges { name: "typo".to_owned(), known: false, workers: 0, queued: 2, in_flight: 0 },
            ModelGauges { name: "typo2".to_owned(), known: false, workers: 0, queued: 3, in_flight: 0 },
        ],
        workers: vec![worker("w1", 0, false), worker("w2", 3, false), worker("w3", 1, true)],
    }
}

#[test]
fn scrape_has_every_metric_of_contract() {
    let text = busy().render(&state(vec![busy_state()]));
    let names = "requests_total request_duration_seconds time_to_first_token_seconds upstream_time_to_first_token_seconds \
        inter_chunk_latency_seconds time_per_output_token_seconds queue_wait_seconds queue_depth queue_capacity queue_oldest_age_seconds \
        queued_bytes requests_in_flight homes placement_total worker_backlog_bytes requeues_total cancellations_total client_retries_total tokens_total request_body_bytes \
        response_body_bytes workers worker_slots model_workers worker_connections_total worker_disconnects_total \
        worker_heartbeat_rtt_seconds worker_last_heartbeat_timestamp_seconds auth_failures_total relay_overhead_seconds config_info \
        config_last_reload_successful api_keys_last_reload_successful buffered_bytes buffered_bytes_limit worker_grants key_tokens_total key_slot_seconds_total usage_write_failures_total build_info";
    for name in names.split_whitespace() {
        assert!(line(&text, &format!("# TYPE modelrelay_{name} ")).is_some(), "{name} is missing");
    }
    for name in
        ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"]
    {
        assert!(line(&text, &format!("{name} ")).is_some_and(|value| value != "0" || name.contains("cpu")), "{name}");
    }
}

#[test]
fn events_are_counted_under_their_labels() {
    let text = busy().render(&state(vec![busy_state()]));
    let value = |series: &str| line(&text, &format!("modelrelay_{series} "));
    for series in [
        r#"requests_total{code="200",endpoint="chat_completions",model="m",outcome="ok",provider="local"}"#,
        r#"requests_total{code="401",endpoint="other",model="unknown",outcome="unauthorized",provider="unknown"}"#,
        r#"request_duration_seconds_count{endpoint="chat_completions",model="m",provider="local",stream="true"}"#,
        r#"request_duration_seconds_bucket{endpoint="chat_completions",model="m",provider="local",stream="true",le="0.5"}"#,
        r#"queue_wait_seconds_count{outcome="dispatched",provider="local"}"#,
        r#"placement_total{decision="home",provider="local",reason=""}"#,
        r#"placement_total{decision="moved",provider="local",reason="busy"}"#,
        r#"requeues_total{provider="local",reason="worker_lost"}"#,
        r#"cancellations_total{provider="local",reason="timeout",stage="queued"}"#,
        r#"worker_disconnects_total{provider="local",reason="heartbeat_timeout"}"#,
        r#"client_retries_total{client="openai"}"#,
        r#"auth_failures_total{realm="worker"}"#,
        r#"config_info{hash="abc"}"#,
        "config_last_reload_successful",
    ] {
        assert_eq!(value(series), Some("1"), "{series}");
    }
    assert_eq!(value(r#"key_tokens_total{key="laptop",type="cached_input"}"#), Some("2"));
    assert_eq!(value(r#"key_slot_seconds_total{key="laptop"}"#), Some("1.5"));
    assert_eq!(value(r#"tokens_total{model="m",provider="local",type="output"}"#), Some("5"));
    assert_eq!(value(r#"time_per_output_token_seconds_sum{model="m",provider="local"}"#), Some("0.25"));
}

#[test]
fn keys_beyond_two_hundred_names_are_other() {
    let metrics = Metrics::new();
    for number in (0..205).chain([0, 204]) {
        metrics.key_used(&format!("key {number}"), None, Duration::from_secs(1));
    }
    let text = metrics.render(&state(Vec::new()));
    let series = text.lines().filter(|line| line.starts_with("modelrelay_key_slot_seconds_total{"));
    assert_eq!(series.count(), 201);
    let value = |key: &str| line(&text, &format!("modelrelay_key_slot_seconds_total{{key=\"{key}\"}} "));
    assert_eq!(
        [value("key 0"), value("key 199"), value("other"), value("key 200")],
        [Some("2"), Some("1"), Some("6"), None]
    );
}

#[test]
fn gauges_show_current_state() {
    let text = busy().render(&state(vec![busy_state()]));
    for (series, expected) in [
        (r#"queue_depth{model="m",provider="local"}"#, "1"),
        (r#"queue_depth{model="unknown",provider="local"}"#, "5"),
        (r#"queue_capacity{provider="local"}"#, "100"),
        (r#"queue_oldest_age_seconds{provider="local"}"#, "3"),
        (r#"requests_in_flight{model="m",provider="local"}"#, "3"),
        (r#"model_workers{model="m",provider="local"}"#, "2"),
        (r#"workers{provider="local",state="idle"}"#, "1"),
        (r#"workers{provider="local",state="busy"}"#, "1"),
        (r#"workers{provider="local",state="draining"}"#, "1"),
        (r#"worker_slots{provider="local",state="used"}"#, "4"),
        (r#"worker_slots{provider="local",state="free"}"#, "5"),
        (r#"worker_grants{provider="local"}"#, "12"),
        (r#"homes{provider="local"}"#, "4"),
        (r#"worker_backlog_bytes{provider="local",worker="w1"}"#, "8"),
        (r#"worker_last_heartbeat_timestamp_seconds{provider="local",worker="w1"}"#, "7"),
        ("buffered_bytes", "5"),
        ("buffered_bytes_limit", "10"),
    ] {
        assert_eq!(line(&text, &format!("modelrelay_{series} ")), Some(expected), "{series}");
    }
    assert!(!text.contains("typo") && !text.contains(r#"model_workers{model="unknown""#));
}

#[test]
fn lost_worker_has_no_series() {
    let metrics = busy();
    metrics.render(&state(vec![busy_state()]));
    let left = ProviderGauges { workers: vec![worker("w2", 0, false)], ..busy_state() };
    let text = metrics.render(&state(vec![left]));
    assert!(text.contains(r#"worker="w2""#) && !text.contains(r#"worker="w1""#));
}

#[test]
fn removed_provider_has_no_series_despite_late_requests() {
    let metrics = busy();
    let (provider, other) = (metrics.provider("local"), metrics.provider("other"));
    let request = provider.request(Some("m"), Endpoint::ChatCompletions);
    other.requeued(RequeueReason::Draining);
    metrics.remove_provider("local");
    request.finished(end(Outcome::ProviderDeleted, 503));
    request.chunk_received(Duration::from_millis(1));
    provider.requeued(RequeueReason::WorkerLost);
    let text = metrics.render(&state(Vec::new()));
    assert!(!text.contains(r#"provider="local""#), "{text}");
    assert!(text.contains(r#"requeues_total{provider="other",reason="draining"} 1"#));
    // A provider with this name that is added later starts from zero.
    metrics.provider("local").requeued(RequeueReason::WorkerLost);
    assert!(metrics.render(&state(Vec::new())).contains(r#"requeues_total{provider="local",reason="worker_lost"} 1"#));
}

#[test]
fn models_beyond_limit_are_labelled_unknown() {
    let provider = Metrics::new().provider("local");
    for number in 0..8192 {
        assert_ne!(provider.request(Some(&format!("m{number}")), Endpoint::Messages).model(), UNKNOWN);
    }
    assert_eq!(provider.request(Some("one more"), Endpoint::Messages).model(), UNKNOWN);
    assert_eq!(provider.request(Some("m0"), Endpoint::Messages).model(), "m0");
}

#[test]
fn only_current_configuration_has_series() {
    let metrics = Metrics::new();
    metrics.config_loaded("one");
    metrics.config_loaded("two");
    metrics.config_refused();
    let text = metrics.render(&state(Vec::new()));
    assert!(!text.contains(r#"hash="one""#) && text.contains(r#"config_info{hash="two"} 1"#));
    assert_eq!(line(&text, "modelrelay_config_last_reload_successful "), Some("0"));
}

#[test]
fn admin_statistics_agree_with_metrics() {
    let report = busy().provider("local").stats();
    assert_eq!(
        (report.requests.get("ok"), report.tokens.get("cached_input"), report.requeues),
        (Some(&1), Some(&2), 1)
    );
    assert_eq!((report.queue_wait_ms.count, report.ttft_ms.count), (1, 1));
}

#[test]
fn zones_beyond_limit_share_one_series() {
    let metrics = Metrics::new();
    let provider = metrics.provider("local");
    for number in 0..40 {
        let zone = Location { zone: Some(format!("zone-{number}")), cluster: None };
        provider.zone_requests(&zone).unwrap().inc();
    }
    let text = metrics.render(&RelayGauges::default);
    let series: Vec<_> = text.lines().filter(|line| line.starts_with("modelrelay_zone_requests_total{")).collect();
    assert_eq!(series.len(), 33, "{series:?}");
    let other = r#"modelrelay_zone_requests_total{cluster="other",provider="local",zone="other"} 8"#;
    assert!(series.contains(&other), "{series:?}");
    metrics.remove_provider("local");
    assert!(!metrics.render(&RelayGauges::default).contains("zone-1"));
}
