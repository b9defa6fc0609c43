//! A wrong setting ends the program with one line that names the setting, the value and what is allowed.

use modelrelay_harness::relay::{Relay, RelayBuilder};

use crate::support::one_provider;

/// Checks that the relay does not start, and reports all these parts in one line.
async fn is_refused(relay: RelayBuilder, parts: &[&str]) {
    let (status, log) = relay.start_and_exit().await;
    assert_eq!(status.code(), Some(1), "{}", log.dump());
    let lines = log.lines();
    let found = lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(found, "no line with all of {parts:?}\n{}", log.dump());
    assert!(lines.iter().filter(|line| !line.trim().is_empty()).count() <= 2, "more than a line\n{}", log.dump());
}

#[tokio::test]
async fn missing_worker_secret_is_refused() {
    is_refused(Relay::builder().without_env("WORKER_SECRET"), &["WORKER_SECRET"]).await;
}

#[tokio::test]
async fn empty_worker_secret_is_refused() {
    is_refused(Relay::builder().env("WORKER_SECRET", ""), &["WORKER_SECRET"]).await;
}

#[tokio::test]
async fn secrets_with_control_characters_are_refused() {
    for name in ["WORKER_SECRET", "MODELRELAY_ADMIN_TOKEN"] {
        is_refused(Relay::builder().env(name, "a-secret-of-windows\r"), &[name, "control character"]).await;
    }
}

#[tokio::test]
async fn invalid_numbers_are_refused() {
    for name in [
        "MAX_QUEUE_LEN",
        "QUEUE_TIMEOUT_SECS",
        "REQUEST_TIMEOUT_SECS",
        "HEARTBEAT_INTERVAL",
        "DRAIN_TIMEOUT_SECS",
        "MAX_MODELS_PER_WORKER",
        "MAX_HOMES",
        "RELAY_COUNT",
    ] {
        is_refused(Relay::builder().env(name, "many-17"), &[name, "many-17"]).await;
    }
}

#[tokio::test]
async fn invalid_sizes_are_refused() {
    for name in ["MAX_REQUEST_BYTES", "MAX_BUFFERED_BYTES", "MAX_QUEUE_BYTES", "MAX_STREAM_BYTES", "MAX_UNREAD_BYTES"] {
        is_refused(Relay::builder().env(name, "32MegaB"), &[name, "32MegaB"]).await;
    }
}

#[tokio::test]
async fn invalid_choice_lists_allowed_values() {
    is_refused(Relay::builder().env("LOG_FORMAT", "xml"), &["LOG_FORMAT", "xml", "text", "json"]).await;
    is_refused(Relay::builder().env("LOG_LEVEL", "loud"), &["LOG_LEVEL", "loud", "info"]).await;
    is_refused(Relay::builder().env("PLACEMENT", "least"), &["PLACEMENT", "least", "least-load or cache"]).await;
    is_refused(Relay::builder().env("FAIRNESS_MODE", "lifo"), &["FAIRNESS_MODE", "lifo", "shared or fifo"]).await;
    is_refused(Relay::builder().env("PROMOTE_AFTER_SECS", "0"), &["PROMOTE_AFTER_SECS", "seconds from 0.001"]).await;
    is_refused(Relay::builder().env("CACHE_ISOLATION", "user"), &["CACHE_ISOLATION", "user", "none or key"]).await;
    let maybe = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "maybe");
    is_refused(maybe, &["MODELRELAY_REQUIRE_API_KEYS", "maybe", "true", "false"]).await;
}

#[tokio::test]
async fn connection_headers_in_request_headers_are_refused() {
    for name in ["cookie", "host", "connection", "x-worker-secret"] {
        is_refused(Relay::builder().env("REQUEST_HEADERS", name), &["REQUEST_HEADERS", name]).await;
    }
}

#[tokio::test]
async fn invalid_address_is_refused() {
    is_refused(Relay::builder().env("LISTEN_ADDR", "not-an-address"), &["LISTEN_ADDR", "not-an-address"]).await;
    is_refused(Relay::builder().env("TRUSTED_PROXIES", "nonsense/99"), &["TRUSTED_PROXIES", "nonsense/99"]).await;
}

#[tokio::test]
async fn address_in_use_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    is_refused(Relay::builder().env("LISTEN_ADDR", &address), &[&address]).await;
}

#[tokio::test]
async fn missing_configuration_file_is_refused() {
    let relay = Relay::builder().arg("--config").arg("absent.yaml").without_env("WORKER_SECRET");
    is_refused(relay, &["absent.yaml"]).await;
}

#[tokio::test]
async fn unknown_keys_and_wrong_values_are_refused() {
    for (more, part) in [
        ("  queu: {}", "queu"),
        ("  queue: {maxLenght: 1}", "maxLenght"),
        ("  queue: {timeout: 30}", "timeout"),
        ("  queue: {timeout: 0s}", "0s"),
        ("  requestTimeout: soon", "soon"),
        ("  queue: {maxBytes: 5KB}", "5KB"),
        ("  models: [{name: m}]", "name"),
    ] {
        is_refused(Relay::builder().config(one_provider(more)), &["relay.yaml", part]).await;
    }
}

#[tokio::test]
async fn bad_placement_in_file_is_refused() {
    for (placement, parts) in [
        ("{mode: fastest}", ["placement.mode", "fastest", "least-load or cache"]),
        ("{cacheIsolation: user}", ["placement.cacheIsolation", "user", "none or key"]),
        ("{spillRequests: -1}", ["relay.yaml", "providers[0].placement.spillRequests", "-1"]),
        ("{spillRequests: 1000001}", ["placement.spillRequests", "1000001", "an integer from 0 to 1000000"]),
        ("{spillBytes: 64KB}", ["placement.spillBytes", "64KB", "Ki"]),
        ("{maxHomes: 0}", ["placement.maxHomes", "0", "an integer from 1 to"]),
    ] {
        is_refused(Relay::builder().config(one_provider(&format!("  placement: {placement}"))), &parts).await;
    }
}

#[tokio::test]
async fn placement_in_file_is_accepted() {
    let yaml = one_provider(
        "  placement: {mode: cache, cacheIsolation: key, maxHomes: 10, spillRequests: 0, spillBytes: 1Mi}",
    );
    let relay = Relay::builder().config(yaml).start().await;
    let mut worker = relay.dial().open().await;
    assert_eq!(worker.register(&["a"], 1).await["models"], serde_json::json!(["a"]));
}

#[tokio::test]
async fn two_providers_of_one_name_are_refused() {
    let twice = format!("{}- name: local\n  workerSecrets: [{{value: x}}]\n", one_provider(""));
    is_refused(Relay::builder().config(twice), &["local"]).await;
}

#[tokio::test]
async fn missing_secret_file_is_refused() {
    let yaml = "providers:\n- name: local\n  workerSecrets: [{file: secrets/absent}]\n";
    is_refused(Relay::builder().config(yaml), &["secrets/absent"]).await;
}

#[tokio::test]
async fn flag_overrides_its_variable() {
    let relay =
        Relay::builder().env("MAX_MODELS_PER_WORKER", "5").arg("--max-models-per-worker").arg("1").start().await;
    let mut worker = relay.dial().open().await;
    assert_eq!(worker.register(&["a", "b"], 1).await["models"], serde_json::json!(["a"]));
}

#[tokio::test]
async fn unknown_flag_is_refused_and_named() {
    let (status, log) = Relay::builder().arg("--no-such-flag").start_and_exit().await;
    assert!(!status.success());
    assert!(log.contains("--no-such-flag"), "{}", log.dump());
}

#[tokio::test]
async fn refused_secret_is_not_printed() {
    let (_, log) = Relay::builder().env("WORKER_SECRET", "planted").env("MAX_QUEUE_LEN", "x").start_and_exit().await;
    assert!(!log.contains("planted"), "{}", log.dump());
}

#[tokio::test]
async fn bad_zone_is_refused_and_empty_one_ignored() {
    for (name, value) in [("ZONE", "west 1"), ("CLUSTER", "-home"), ("ZONE", &"z".repeat(64))] {
        is_refused(Relay::builder().env(name, value), &[name, value, "1 to 63 letters"]).await;
    }
    let relay = Relay::builder().env("ZONE", "").env("CLUSTER", "").start().await;
    assert!(relay.admin_json("/admin/state").await["zone"].is_null());
}

#[tokio::test]
async fn bad_spill_is_refused() {
    is_refused(Relay::builder().env("SPILL_REQUESTS", "-1"), &["SPILL_REQUESTS", "-1", "an integer from 0"]).await;
    is_refused(Relay::builder().env("SPILL_BYTES", "64KB"), &["SPILL_BYTES", "64KB"]).await;
}
