//! The relay as probes and Prometheus see it.

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, chat_stream, one_provider};

#[tokio::test]
async fn health_reveals_no_topology() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["private-model"], 1).await;
    let reply = relay.get("/health").await.with_status(200);
    let health = reply.json();
    assert_eq!(health["status"], "ok");
    assert!(health["version"].is_string());
    assert_eq!((&health["workers_connected"], &health["workers"]), (&json!(1), &json!(1)));
    assert_eq!(health["queue_depth"], 0);
    assert!(health["uptime_secs"].is_number());
    for private in ["private-model", "hand-played", "127.0.0.1"] {
        assert!(!reply.text().contains(private), "{}", reply.text());
    }
}

#[tokio::test]
async fn health_shows_queue_depth() {
    let relay = Relay::start().await;
    let _waiting = relay.begin(chat("m"));
    relay.eventually("it is counted", || async { relay.get("/health").await.json()["queue_depth"] == 1 }).await;
}

#[tokio::test]
async fn livez_is_200_without_workers() {
    let relay = Relay::start().await;
    assert_eq!(relay.get("/livez").await.status, 200);
}

#[tokio::test]
async fn relay_is_unready_until_first_worker_connects() {
    let relay = Relay::start().await;
    assert_eq!(relay.get("/readyz").await.status, 503);
    let worker = relay.worker(&["m"], 1).await;
    relay.eventually("it is ready", || async { relay.get("/readyz").await.status == 200 }).await;
    let state = relay.get("/readyz").await.json();
    assert!(state.is_object(), "{state}");
    worker.vanish();
    relay.wait_for_workers(0).await;
    assert_eq!(relay.get("/readyz").await.status, 200, "a relay without workers can still queue");
}

#[tokio::test]
async fn relay_expecting_workers_is_unready_without_them() {
    let relay = Relay::builder().env("EXPECT_WORKERS", "true").start().await;
    let worker = relay.worker(&["m"], 1).await;
    relay.eventually("it is ready", || async { relay.get("/readyz").await.status == 200 }).await;
    drop(worker);
    relay.eventually("it is unready", || async { relay.get("/readyz").await.status == 503 }).await;
}

#[tokio::test]
async fn full_queue_makes_relay_unready_if_configured() {
    for (wanted, status) in [("true", 503), ("false", 200)] {
        let relay = Relay::builder().env("UNREADY_WHEN_SATURATED", wanted).env("MAX_QUEUE_LEN", "1").start().await;
        let _worker = relay.worker(&["m"], 1).await;
        let _running = relay.begin(chat("m"));
        let _waiting = relay.begin(chat("m"));
        relay.wait_for_queue_depth("local", 1).await;
        assert_eq!(relay.get("/readyz").await.status, status);
    }
}

#[tokio::test]
async fn delivered_response_is_logged_as_ok() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"answer": 42})).await;
    let _ = pending.reply().await.with_status(200);
    relay.log().wait_for_line("outcome=\"ok\" code=200").await;
}

#[tokio::test]
async fn requests_are_served_while_unready() {
    let relay = Relay::start().await;
    assert_eq!(relay.get("/v1/models").await.status, 200);
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
}

#[tokio::test]
async fn broken_configuration_changes_only_readyz_detail() {
    let relay = Relay::builder().config(one_provider("")).start().await;
    let _worker = relay.worker(&["m"], 1).await;
    relay.eventually("it is ready", || async { relay.get("/readyz").await.status == 200 }).await;
    let good = relay.get("/readyz").await.text();
    relay.replace_file("relay.yaml", "providers: [");
    relay.eventually("the detail changes", || async { relay.get("/readyz").await.text() != good }).await;
    assert_eq!(relay.get("/readyz").await.status, 200, "the last good configuration is in force");
}

#[tokio::test]
async fn metrics_count_completed_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    worker.end_stream(&job).await;
    let _ = pending.reply().await.with_status(200);
    let sample = "modelrelay_requests_total{";
    relay
        .eventually("the request is counted", || async {
            let text = relay.admin("GET", "/metrics").await.text();
            text.lines().any(|line| {
                line.starts_with(sample)
                    && line.contains("outcome=\"ok\"")
                    && line.contains("model=\"m\"")
                    && line.contains("provider=\"local\"")
                    && line.ends_with(" 1")
            })
        })
        .await;
    let reply = relay.admin("GET", "/metrics").await.with_status(200);
    assert!(reply.header("content-type").is_some_and(|value| value.starts_with("text/plain")));
    for name in [
        "modelrelay_request_duration_seconds_bucket",
        "modelrelay_time_to_first_token_seconds_bucket",
        "modelrelay_queue_wait_seconds_bucket",
        "modelrelay_queue_depth",
        "modelrelay_queue_capacity",
        "modelrelay_requests_in_flight",
        "modelrelay_workers",
        "modelrelay_worker_slots",
        "modelrelay_model_workers",
        "modelrelay_worker_connections_total",
        "modelrelay_buffered_bytes",
        "modelrelay_build_info",
    ] {
        assert!(reply.text().lines().any(|line| line.starts_with(name)), "no {name}");
    }
}

#[tokio::test]
async fn scaler_metrics_exist_at_zero() {
    let more = "  coldModels: [cold]\n  models: [{id: m}, {id: cold}]";
    let relay = Relay::builder().config(one_provider(more)).start().await;
    let text = relay.admin("GET", "/metrics").await.with_status(200).text();
    for gauge in ["modelrelay_queue_depth", "modelrelay_requests_in_flight"] {
        for model in ["m", "cold", "unknown"] {
            let series = format!("{gauge}{{model=\"{model}\",provider=\"local\"}} 0");
            assert!(text.lines().any(|line| line == series), "no {series} in\n{text}");
        }
    }
    // No model of this provider has been named.
    let relay = Relay::builder().config(one_provider("")).start().await;
    let text = relay.admin("GET", "/metrics").await.with_status(200).text();
    for gauge in ["modelrelay_queue_depth", "modelrelay_requests_in_flight"] {
        let start = format!("{gauge}{{");
        let series: Vec<&str> = text.lines().filter(|line| line.starts_with(&start)).collect();
        assert_eq!(series, [format!("{gauge}{{model=\"unknown\",provider=\"local\"}} 0")]);
    }
}

#[tokio::test]
async fn unknown_model_is_not_used_as_label() {
    let relay = Relay::builder().config(one_provider("  models: [{id: m}]")).start().await;
    assert_eq!(relay.fetch(chat("invented-by-a-client")).await.status, 404);
    let text = relay.admin("GET", "/metrics").await.with_status(200).text();
    assert!(!text.contains("invented-by-a-client"), "a client can make labels");
    assert!(text.contains("model=\"unknown\""));
}

#[tokio::test]
async fn requests_are_logged_without_private_content() {
    let relay = Relay::builder().env("LOG_LEVEL", "trace").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "planted-prompt"}]});
    let request = modelrelay_harness::client::Request::post("/v1/chat/completions?planted=query", &body)
        .bearer("planted-bearer")
        .header("x-api-key", "planted-key")
        .header("cookie", "planted-cookie");
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"choices": "planted-answer"})).await;
    let _ = pending.reply().await.with_status(200);
    relay.log().wait_for_line("request dispatched").await;
    relay.log().wait_for_line("response complete").await;
    assert!(!relay.log().contains("planted"), "{}", relay.log().dump());
}

#[tokio::test]
async fn logs_may_be_json() {
    let relay = Relay::builder().env("LOG_FORMAT", "json").start().await;
    let _worker = relay.worker(&["m"], 1).await;
    let line = relay.log().wait_for_line("worker registered").await;
    let value: serde_json::Value = serde_json::from_str(&line).expect("a line of JSON");
    assert!(value.to_string().contains("worker registered"));
    for line in relay.log().lines() {
        assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok(), "no JSON: {line}");
    }
}
