//! vLLM's sleep mode and its pitfalls.

use std::time::Duration;

use axum::extract::RawQuery;
use axum::routing::get;
use axum::{Json, Router};
use modelrelay_backends::fake::{Fake, Kind};
use modelrelay_backends::server::{Server, free_port, get as fetch, is_listening, post, until};
use modelrelay_backends::worker_program;
use modelrelay_multiplexer::driver::http::Client;
use modelrelay_multiplexer::driver::launch::{Launch, PORT};
use modelrelay_multiplexer::driver::llama_router::LlamaRouter;
use modelrelay_multiplexer::driver::served::{Served, gauges};
use modelrelay_multiplexer::driver::vllm_sleep::{Level, SleeperModel, VllmSleep};
use modelrelay_multiplexer::driver::{Driver, DriverError, Probed};
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::Left;
use serde_json::{Value, json};

use crate::rig::{FAKE, on_port};

/// The limit for operations that wait for no running request. Such a request takes longer.
const SOON: Duration = Duration::from_secs(5);

async fn foreign(defects: &[&str]) -> (Server, VllmSleep) {
    foreign_at(Level::One, defects).await
}

async fn foreign_at(level: Level, defects: &[&str]) -> (Server, VllmSleep) {
    let port = free_port();
    let fake = Fake::new(FAKE, Kind::Vllm, "m", &port.to_string());
    let fake = defects.iter().fold(fake, |fake, defect| fake.with(defect));
    let server = Server::start(&fake.command(), &[], port).await;
    let driver = driver_of(&server, level);
    (server, driver)
}

/// A driver without knowledge of the server.
fn driver_of(server: &Server, level: Level) -> VllmSleep {
    let model = SleeperModel { served: Served::new("m"), url: server.url.clone(), launch: None };
    VllmSleep::new([model], level, worker_program())
}

async fn is_busy(server: &Server) -> bool {
    let page = Client::new(server.url.clone()).get("/metrics").await;
    page.is_ok_and(|page| gauges(&page.text(), &["vllm:num_requests_running"]) == Some(1.0))
}

fn port(server: &Server) -> u16 {
    server.url.port().expect("the URL has a port")
}

/// Runs a fake backend until the test ends; returns its address.
async fn serve(router: Router) -> url::Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("the listener has an address"));
    drop(tokio::spawn(async move { axum::serve(listener, router).await }));
    url.parse().expect("this is a URL")
}

/// A request that runs for the whole test.
fn endless() -> Value {
    json!({"model": "m", "prompt": "Hi", "max_tokens": 1000, "stream": true})
}

async fn is_paused(server: &Server) -> bool {
    fetch(&server.url, "/is_sleeping").await.is_some_and(|(_, answer)| answer.contains("true"))
}

async fn holds_memory(server: &Server) -> bool {
    let page = fetch(&server.url, "/metrics").await.map(|(_, page)| page).unwrap_or_default();
    page.lines().any(|line| line.contains("sleep_state=\"awake\"") && line.ends_with(" 1.0"))
}

#[tokio::test]
async fn sleeping_fake_queues_requests_until_it_wakes() {
    let (server, driver) = foreign(&[]).await;
    let model = "m".into();
    driver.evict(&model).await.unwrap();
    let body = json!({"model": "m", "prompt": "Hi"});
    let queued = post(&server.url, "/v1/completions", &body);
    let (answer, _) = tokio::join!(queued, async {
        until("a probe finds it asleep", async || driver.probe(&model).await.unwrap().gone).await;
        driver.load(&model, LoadKind::Wake).await.unwrap();
    });
    assert_eq!(answer.map(|(status, _)| status), Some(200));
}

#[tokio::test]
async fn aborted_request_looks_complete_to_its_client() {
    let (server, driver) = foreign(&[]).await;
    let body = endless();
    let (answer, ended) = tokio::join!(post(&server.url, "/v1/completions", &body), async {
        until("it is busy", async || is_busy(&server).await).await;
        driver.force_evict(&"m".into()).await
    });
    let (status, answer) = answer.expect("a response");
    assert!(status == 200 && answer.contains("\"finish_reason\":\"abort\"") && answer.contains("[DONE]"), "{answer}");
    assert_eq!(ended, Ok(()));
    assert!(!holds_memory(&server).await);
}

/// A server that a previous worker put to sleep, and that still waits for a request. `while_it_waits` runs in parallel
/// with both.
async fn while_sleep_waits<T>(server: &Server, while_it_waits: impl Future<Output = T>) -> T {
    let body = endless();
    let request = post(&server.url, "/v1/completions", &body);
    let sleep = async {
        until("it is busy", async || is_busy(server).await).await;
        post(&server.url, "/sleep?level=1&mode=wait", &Value::Null).await
    };
    let then = async {
        until("the server reports that it sleeps", async || is_paused(server).await).await;
        while_it_waits.await
    };
    let ((_, _), outcome) = tokio::join!(async { tokio::join!(request, sleep) }, then);
    outcome
}

#[tokio::test]
async fn waiting_sleep_proves_nothing_until_it_ends() {
    for defects in [&[][..], &["no-sleep-state"]] {
        let (server, driver) = foreign(defects).await;
        let model = "m".into();
        let (probed, evicted, forced) = while_sleep_waits(&server, async {
            let (probed, evicted) = (driver.probe(&model).await, driver.evict(&model).await);
            (probed, evicted, driver.force_evict(&model).await)
        })
        .await;
        assert_eq!(probed, Ok(Probed::default()), "{defects:?}");
        assert_eq!((evicted, forced), (Err(DriverError::Busy { requests: 1 }), Ok(())), "{defects:?}");
        assert_eq!(driver.probe(&model).await, Ok(Probed::gone()), "{defects:?}");
    }
}

#[tokio::test]
async fn load_abandoned_during_sleep_does_not_delay_abort() {
    let (server, driver) = foreign(&[]).await;
    let model = "m".into();
    let (given_up, forced) = while_sleep_waits(&server, async {
        let load = tokio::time::timeout(Duration::from_millis(300), driver.load(&model, LoadKind::Wake)).await;
        (load.is_err(), tokio::time::timeout(SOON, driver.force_evict(&model)).await)
    })
    .await;
    assert_eq!((given_up, forced), (true, Ok(Ok(()))));
    assert_eq!(driver.probe(&model).await, Ok(Probed::gone()));
}

/// Sleeps at once, but only in mode abort: a request has started between the last check and the command.
async fn sleeper_with_hidden_request() -> url::Url {
    let (sleep, slept) = tokio::sync::watch::channel(false);
    let is_sleeping = move || std::future::ready(Json(json!({"is_sleeping": *slept.borrow()})));
    let order = async move |RawQuery(query): RawQuery| {
        if query.is_some_and(|query| query.contains("mode=wait")) {
            std::future::pending::<()>().await;
        }
        sleep.send_replace(true);
        Json(json!({"status": "sleeping", "level": 1}))
    };
    let idle = async || "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n";
    serve(
        Router::new()
            .route("/metrics", get(idle))
            .route("/is_sleeping", get(is_sleeping))
            .route("/sleep", axum::routing::post(order)),
    )
    .await
}

#[tokio::test]
async fn abandoned_eviction_does_not_delay_abort() {
    let url = sleeper_with_hidden_request().await;
    let model = SleeperModel { served: Served::new("m"), url, launch: None };
    let (driver, model) = (VllmSleep::new([model], Level::One, worker_program()), "m".into());
    let evicted = tokio::time::timeout(Duration::from_millis(300), driver.evict(&model)).await;
    assert!(evicted.is_err(), "{evicted:?}");
    assert_eq!(tokio::time::timeout(SOON, driver.force_evict(&model)).await, Ok(Ok(())));
}

#[tokio::test]
async fn sleep_response_outweighs_stale_count() {
    let (server, driver) = foreign(&["no-sleep-state", "stale-count"]).await;
    let (model, body) = ("m".into(), endless());
    let (_, forced) = tokio::join!(post(&server.url, "/v1/completions", &body), async {
        until("it is busy", async || is_busy(&server).await).await;
        driver.force_evict(&model).await
    });
    assert_eq!(forced, Ok(()));
}

#[tokio::test]
async fn interrupted_wake_at_level_two_is_not_gone() {
    let (server, before) = foreign_at(Level::Two, &[]).await;
    let model = "m".into();
    before.evict(&model).await.unwrap();
    assert_eq!(before.probe(&model).await, Ok(Probed::gone()));
    post(&server.url, "/wake_up?tags=weights", &Value::Null).await.expect("a response");
    let after = driver_of(&server, Level::Two);
    assert_eq!(after.probe(&model).await, Ok(Probed::default()));
    after.evict(&model).await.unwrap();
    assert_eq!(after.probe(&model).await, Ok(Probed::gone()));
}

#[tokio::test]
async fn failed_wake_at_level_two_is_not_gone() {
    let (_server, driver) = foreign_at(Level::Two, &["no-reload"]).await;
    let model = "m".into();
    driver.evict(&model).await.unwrap();
    driver.load(&model, LoadKind::Wake).await.unwrap_err();
    assert_eq!(driver.probe(&model).await, Ok(Probed::default()));
    driver.force_evict(&model).await.unwrap();
    assert_eq!(driver.probe(&model).await, Ok(Probed::gone()));
}

#[tokio::test]
async fn load_during_waiting_sleep_ends_awake() {
    let (server, driver) = foreign(&[]).await;
    let model = "m".into();
    let body = json!({"model": "m", "prompt": "Hi", "max_tokens": 10});
    let (_, _, loaded) = tokio::join!(
        post(&server.url, "/v1/completions", &body),
        async {
            until("it is busy", async || is_busy(&server).await).await;
            post(&server.url, "/sleep?level=1&mode=wait", &Value::Null).await
        },
        async {
            until("the server reports that it sleeps", async || is_paused(&server).await).await;
            driver.load(&model, LoadKind::Wake).await
        }
    );
    assert_eq!(loaded, Ok(()));
    assert!(driver.probe(&model).await.unwrap().ready);
}

#[tokio::test]
async fn interrupted_wake_releases_all_memory_on_eviction() {
    for is_forced in [false, true] {
        let (server, driver) = foreign(&[]).await;
        let model = "m".into();
        driver.evict(&model).await.unwrap();
        let woken = post(&server.url, "/wake_up?tags=weights", &Value::Null).await.expect("a response").1;
        assert!(woken.contains("\"sleeping\""), "{woken}");
        if is_forced {
            driver.force_evict(&model).await.unwrap();
        } else {
            driver.evict(&model).await.unwrap();
        }
        // If its weights were still loaded, this would wake the whole server.
        let woken = post(&server.url, "/wake_up?tags=kv_cache", &Value::Null).await.expect("a response").1;
        assert!(woken.contains("\"sleeping\""), "{woken}");
    }
}

#[tokio::test]
async fn running_requests_finish_before_sleep() {
    let (server, driver) = foreign(&[]).await;
    let model = "m".into();
    let body = json!({"model": "m", "prompt": "Hi", "max_tokens": 10});
    let request = post(&server.url, "/v1/completions", &body);
    let eviction = async {
        until("it is busy", async || is_busy(&server).await).await;
        driver.evict(&model).await
    };
    let (answer, left) = tokio::join!(request, eviction);
    assert_eq!((answer.map(|(status, _)| status), left), (Some(200), Ok(Left::Asleep)));
}

#[tokio::test]
async fn unending_request_prevents_sleep() {
    let (server, driver) = foreign(&[]).await;
    let model = "m".into();
    let body = json!({"model": "m", "prompt": "Hi", "max_tokens": 1000});
    let refusal = tokio::select! {
        _ = post(&server.url, "/v1/completions", &body) => panic!("the request is not over"),
        refusal = async {
            until("it is busy", async || is_busy(&server).await).await;
            driver.evict(&model).await
        } => refusal,
    };
    assert_eq!(refusal, Err(DriverError::Busy { requests: 1 }));
    assert!(is_listening(port(&server)).await);
}

#[tokio::test]
async fn server_falsely_reporting_sleep_fails_eviction() {
    let (_server, driver) = foreign(&["deaf"]).await;
    let error = driver.evict(&"m".into()).await.unwrap_err();
    assert!(matches!(error, DriverError::Unexpected { .. }), "{error}");
    // A server that was started externally cannot be killed either.
    let error = driver.force_evict(&"m".into()).await.unwrap_err();
    assert!(matches!(error, DriverError::NotOurs(_)), "{error}");
}

#[tokio::test]
async fn abandoned_wake_does_not_overtake_its_eviction() {
    let (server, driver) = foreign(&["slow-wake"]).await;
    let model = "m".into();
    driver.evict(&model).await.unwrap();
    let wake = tokio::time::timeout(Duration::from_millis(100), driver.load(&model, LoadKind::Wake)).await;
    assert!(wake.is_err());
    driver.force_evict(&model).await.unwrap();
    until("the wake has ended", async || server.log().contains("woken")).await;
    assert!(!driver.probe(&model).await.unwrap().ready, "and was taken back");
}

#[tokio::test]
async fn missing_developer_mode_fails_load_naming_settings() {
    let (_server, driver) = foreign(&["no-dev-mode"]).await;
    let checked = driver.check(&"m".into()).await.unwrap_err().to_string();
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err().to_string();
    let error = driver.evict(&"m".into()).await.unwrap_err().to_string();
    for message in [checked, failure, error] {
        assert!(message.contains("VLLM_SERVER_DEV_MODE=1") && message.contains("--enable-sleep-mode"), "{message}");
    }
}

#[tokio::test]
async fn forbidden_address_is_rejected_by_check() {
    let list = json!({"data": [{"id": "m", "status": {"value": "unloaded"}}]});
    let models = get(move || std::future::ready(Json(list.clone())));
    let mut url = serve(Router::new().route("/health", get(async || "ok")).route("/models", models)).await;
    // It resolves to this machine, and is neither a loopback nor a private address.
    url.set_host(Some("0.0.0.0")).expect("this is a host");
    let sleeper = SleeperModel { served: Served::new("m"), url: url.clone(), launch: None };
    let drivers: [Box<dyn Driver>; 2] = [
        Box::new(VllmSleep::new([sleeper], Level::One, worker_program())),
        Box::new(LlamaRouter::new(url, vec!["m".into()])),
    ];
    for driver in drivers {
        let checked = driver.check(&"m".into()).await;
        assert!(matches!(checked, Err(DriverError::Forbidden { .. })), "{driver:?}: {checked:?}");
    }
}

#[tokio::test]
async fn ended_sleeper_process_is_not_woken() {
    let command = Fake::new(FAKE, Kind::Vllm, "m", PORT).command();
    let launch = Some(Launch { command, ..Launch::default() });
    let model = SleeperModel { served: Served::new("m"), url: on_port(free_port()), launch };
    let driver = VllmSleep::new([model], Level::One, worker_program());
    let failure = driver.load(&"m".into(), LoadKind::Wake).await.unwrap_err();
    assert!(matches!(&failure, LoadFailure::Exited(words) if words.contains("while asleep")), "{failure:?}");
    driver.load(&"m".into(), LoadKind::Cold).await.unwrap();
}

#[tokio::test]
async fn failed_server_start_reports_reason_early() {
    let command = Fake::new(FAKE, Kind::Vllm, "m", PORT).with("fails-to-start").command();
    let launch = Some(Launch { command, ..Launch::default() });
    let model = SleeperModel { served: Served::new("m"), url: on_port(free_port()), launch };
    let driver = VllmSleep::new([model], Level::One, worker_program());
    let failure = driver.load(&"m".into(), LoadKind::Cold).await.unwrap_err();
    assert!(
        matches!(&failure, LoadFailure::Exited(words) if words.contains("exit code 3") && words.contains("out of memory")),
        "{failure:?}"
    );
}
