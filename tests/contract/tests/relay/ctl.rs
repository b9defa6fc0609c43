//! The program's commands for a running relay.

use std::process::Output;

use modelrelay_harness::connect_proxy::ConnectProxy;
use modelrelay_harness::process::path_of;
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay, WORKER_SECRET};
use modelrelay_harness::tls::Certificates;
use modelrelay_harness::within;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::support::{chat, wait_for_model};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(path_of("modelrelay-relay"));
    command.args(args).env_clear();
    command
}

/// Returns the single line of a command that fails.
fn failure(output: &Output) -> String {
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.lines().count() == 1, "{message:?}");
    message
}

/// Returns the cells of the line that begins with this word.
fn line<'a>(table: &'a str, begin: &str) -> Vec<&'a str> {
    let line = table.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("no {begin} in\n{table}"));
    line.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[tokio::test]
async fn status_shows_load_and_problems() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    // Its worker is disconnected.
    drop(relay.core1_worker(&["unserved"], 4).await);
    wait_for_model(&relay, "unserved", false).await;
    let _waiting = relay.begin(chat("unserved").header("x-request-id", "waits"));
    relay.wait_for_queue_depth("local", 1).await;
    let status = relay.output_of(&["status"]).await;
    assert!(status.starts_with(&format!("relay {} is running, up for ", env!("CARGO_PKG_VERSION"))), "{status}");
    let provider = line(&status, "local");
    assert_eq!((provider[1], provider[2], provider[3], provider[5]), ("1", "1/4", "1", "1"), "{status}");
    assert!(status.contains("- 1 waiting for unserved: no worker serves it"), "{status}");
    let requests = relay.output_of(&["requests"]).await;
    assert_eq!(line(&requests, "waits")[1..5], ["local", "unserved", "queued", "1"], "{requests}");
    let both: Value = serde_json::from_str(&relay.output_of(&["status", "--output", "json"]).await).expect("JSON");
    assert_eq!(both["state"]["providers"][0]["name"], "local");
}

#[tokio::test]
async fn commands_list_workers_and_cancel_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m", "n"], 4).await;
    let running = relay.begin(chat("m").header("x-request-id", "one"));
    worker.expect_request().await;
    let workers = relay.output_of(&["workers"]).await;
    assert_eq!(line(&workers, "hand-played")[1..5], ["local", "busy", "1/4", "m, n"], "{workers}");
    let requests = relay.output_of(&["requests"]).await;
    assert_eq!(line(&requests, "one")[1..5], ["local", "m", "dispatched", "-"], "{requests}");
    assert_eq!(line(&requests, "one")[6..], ["hand-played", "least_load", "1"], "{requests}");
    assert_eq!(relay.output_of(&["requests", "cancel", "one"]).await, "request one cancelled\n");
    assert_eq!(running.reply().await.with_status(503).json()["error"]["code"], "cancelled_by_admin");
    let missing = failure(&relay.run_command(&["requests", "cancel", "../keys"]).await);
    assert_eq!(missing, "modelrelay-relay: the relay returned 404: no live request has this id\n");
}

#[tokio::test]
async fn commands_create_list_and_revoke_keys() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let made =
        relay.output_of(&["keys", "create", "laptop", "--models", "m,n", "--max-in-flight", "2", "-o", "json"]).await;
    let made: Value = serde_json::from_str(&made).expect("JSON");
    assert_eq!((&made["models"][1], &made["max_in_flight"]), (&"n".into(), &2.into()));
    let (id, secret) = (made["id"].as_str().unwrap(), made["secret"].as_str().unwrap());
    relay.log().secrets().plant(secret);
    let shown = relay.output_of(&["keys", "create", "phone"]).await;
    assert!(shown.starts_with("mr-") && shown.contains("created for phone; the secret is shown only once"), "{shown}");
    let keys = relay.output_of(&["keys"]).await;
    assert_eq!(line(&keys, id)[1..4], ["laptop", "good", "-"], "{keys}");
    assert_eq!(relay.output_of(&["keys", "revoke", id]).await, format!("key {id} revoked\n"));
    assert_eq!(line(&relay.output_of(&["keys"]).await, id)[2], "revoked");
}

#[tokio::test]
async fn command_changes_and_removes_limits_of_key() {
    let relay = Relay::start().await;
    let made = relay.output_of(&["keys", "create", "laptop", "--models", "m,n", "--max-in-flight", "2", "-o", "json"]);
    let made: Value = serde_json::from_str(&made.await).expect("JSON");
    relay.log().secrets().plant(made["secret"].as_str().unwrap());
    let id = made["id"].as_str().unwrap();
    let change = ["keys", "update", id, "--name", "team-a", "--max-in-flight", "none", "--max-queue-percent", "25"];
    let shown = relay.output_of(&change).await;
    assert_eq!(line(&shown, id)[1..], ["team-a", "good", "-", "0", "25 %", "-", "normal", "1", "-"], "{shown}");
    let change = ["keys", "update", id, "--models", "all", "--expires-at", "2099-01-01T00:00:00Z", "-o", "json"];
    let key: Value = serde_json::from_str(&relay.output_of(&change).await).expect("JSON");
    assert_eq!((&key["name"], &key["models"], &key["max_queue_percent"]), (&"team-a".into(), &Value::Null, &25.into()));
    assert_eq!(key, relay.admin_json("/admin/keys").await["keys"][0]);
    let change = ["keys", "update", id, "--expires-at", "never", "--providers", "local,other", "-o", "json"];
    let key: Value = serde_json::from_str(&relay.output_of(&change).await).expect("JSON");
    assert_eq!((&key["expires_at"], &key["providers"][1]), (&Value::Null, &"other".into()));
    let change = ["keys", "update", id, "--weight", "2.5", "--class", "batch", "--tokens-per-day", "9000"];
    let shown = relay.output_of(&change).await;
    assert_eq!(line(&shown, id)[6..9], ["9000/day", "batch", "2.5"], "{shown}");
    for (arguments, expected) in [
        (
            &["--max-in-flight", "many"][..],
            "--max-in-flight: \"many\" is not allowed: a whole number, or none for no limit",
        ),
        (&["--class", "fast"], "--class: \"fast\" is not allowed: interactive, normal or batch"),
        (&["--weight", "0"], "--weight: \"0\" is not allowed: a number from 0.01 to 100"),
        (&["--max-in-flight", "0"], "returned 400: max_in_flight: must be a whole number from 1"),
        (&["--expires-at", "soon"], "returned 400: expires_at: must be a UTC time"),
        (&[], "required"),
    ] {
        let message = failure(&relay.run_command(&[&["keys", "update", id], arguments].concat()).await);
        assert!(message.contains(expected), "{message}");
    }
    let message = failure(&relay.run_command(&["keys", "update", "none", "--name", "x"]).await);
    assert_eq!(message, "modelrelay-relay: the relay returned 404: no key with this id can be changed\n");
}

#[tokio::test]
async fn usage_is_printed_as_table_json_and_csv() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let key: Value = serde_json::from_str(&relay.output_of(&["keys", "create", "laptop", "-o", "json"]).await).unwrap();
    let (id, secret) = (key["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
    relay.log().secrets().plant(secret);
    let running = relay.begin(chat("m").bearer(secret));
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{}").await;
    worker.finish(&job).await;
    let _ = running.reply().await.with_status(200);
    let counted = async || relay.admin_json("/admin/usage").await["usage"] != serde_json::json!([]);
    relay.eventually("the request is counted", counted).await;

    let table = relay.output_of(&["usage"]).await;
    assert_eq!(line(&table, "laptop")[..9], ["laptop", id, "1", "0", "0", "0", "1", "0", "2"], "{table}");
    assert!(table.contains("in memory only, since "), "{table}");
    let table = relay.output_of(&["usage", "--daily", "--models", "--key", "laptop", "--since", "2020-01-01"]).await;
    assert_eq!(line(&table, "20")[1..5], ["laptop", id, "m", "1"], "{table}");
    let none = relay.output_of(&["usage", "--key", "a&b=c d"]).await;
    assert!(none.starts_with("KEY") && !none.contains("laptop"), "{none}");
    let json: Value = serde_json::from_str(&relay.output_of(&["usage", "-o", "json"]).await).expect("JSON");
    assert_eq!(json["usage"][0]["output_tokens"], 2);
    let csv = relay.output_of(&["usage", "-o", "csv"]).await;
    let row = csv.lines().nth(1).expect("a row");
    assert!(
        csv.starts_with("day,key_id,key,model,answered,")
            && row.contains(&format!(",{id},laptop,m,1,0,0,0,1,0,2,0,0,")),
        "{csv}"
    );
    let message = failure(&relay.run_command(&["usage", "--since", "yesterday"]).await);
    assert!(message.contains("since must be a day in UTC, such as 2026-11-01"), "{message}");
}

#[tokio::test]
async fn drain_waits_until_worker_is_gone() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let running = relay.begin(chat("m"));
    let request = worker.expect_request().await;
    let mut drain = command(&["drain", "hand-played"]);
    drain.env("MODELRELAY_URL", relay.url()).env("MODELRELAY_ADMIN_TOKEN", ADMIN_TOKEN);
    drain.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut drain = drain.spawn().expect("it starts");
    worker.expect("graceful_shutdown").await;
    let mut progress = BufReader::new(drain.stderr.take().expect("a pipe"));
    let mut line = String::new();
    within("its progress", relay.log(), progress.read_line(&mut line)).await.unwrap();
    assert_eq!(line, "worker hand-played is draining: 1 request left\n");
    worker.answer(&request, &serde_json::json!({})).await;
    assert_eq!(running.reply().await.status, 200);
    drop(worker);
    let ended = within("the drain's end", relay.log(), drain.wait_with_output()).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "worker hand-played disconnected\n");
    let missing = failure(&relay.run_command(&["drain", "hand-played"]).await);
    assert_eq!(missing, "modelrelay-relay: no connected worker has the name or id hand-played\n");
}

#[tokio::test]
async fn drain_warns_that_older_worker_returns() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["m"], 1).await;
    let message = relay.output_of(&["drain", "hand-played"]).await;
    assert!(message.starts_with("worker hand-played disconnected; its older version"), "{message}");
    assert!(message.contains("stop its process"), "{message}");
}

#[tokio::test]
async fn failure_is_one_line_with_its_remedy() {
    let relay = Relay::start().await;
    let status = |args: &[&str]| {
        let mut command = command(args);
        async move { command.output().await.expect("it starts") }
    };
    let url = relay.url();
    let message = failure(&status(&["status", "--url", &url]).await);
    assert!(message.contains("MODELRELAY_ADMIN_TOKEN (--token) is missing"), "{message}");
    let message = failure(&status(&["status", "--url", &url, "--token", "not-the-token"]).await);
    assert!(
        message.contains("403") && message.contains("to its admin token") && !message.contains("not-the-token"),
        "{message}"
    );
    let message = failure(&status(&["status", "--url", "http://127.0.0.1:1", "--token", "x"]).await);
    assert!(message.contains("cannot reach the relay") && message.contains("(--url)"), "{message}");
    let message = failure(&status(&["status", "--url", "relay", "--token", "x"]).await);
    assert!(message.contains("MODELRELAY_URL (--url)"), "{message}");
}

#[tokio::test]
async fn ca_file_is_trusted_over_tls() {
    let certificates = Certificates::make();
    let relay = Relay::builder().tls(&certificates).start().await;
    let file = certificates.ca_file();
    let status = relay.output_of(&["status", "--ca-file", file.to_str().unwrap()]).await;
    assert!(status.contains("is running"), "{status}");
    let message = failure(&relay.run_command(&["status"]).await);
    assert!(message.contains("cannot reach the relay"), "{message}");
}

#[tokio::test]
async fn check_accepts_valid_and_refuses_invalid_settings() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("relay.yaml");
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let mut command = command(&["--config", file.to_str().unwrap(), "check"]);
        async move { command.output().await.expect("it starts") }
    };
    let good = check("providers:\n- name: home\n  workerSecrets: [{value: a-secret-of-some-length}]\n").await;
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    assert_eq!(String::from_utf8_lossy(&good.stdout), "configuration OK; providers: home\n");
    let message = failure(&check("providers:\n- nam: home\n").await);
    assert!(message.contains("relay.yaml") && message.contains("nam"), "{message}");
    let set = command(&["check"]).env("WORKER_SECRET", WORKER_SECRET).output().await.unwrap();
    assert!(set.status.success());
    let mut traced = command(&["check"]);
    traced.env("WORKER_SECRET", WORKER_SECRET).env("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318");
    let message = failure(&traced.env("OTEL_EXPORTER_OTLP_CERTIFICATE", &file).output().await.unwrap());
    assert!(message.contains("OTEL_EXPORTER_OTLP_CERTIFICATE: "), "{message}");
}

#[tokio::test]
async fn check_refuses_unusable_key_storage() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &'static str, value: String| {
        let mut command = command(&["check"]);
        command.env("WORKER_SECRET", WORKER_SECRET).env("MODELRELAY_REQUIRE_API_KEYS", "true").env(name, value);
        command.current_dir(folder.path());
        async move { command.output().await.expect("it starts") }
    };
    let message = failure(&check("DATABASE_URL", "postgres://user:pass@db/keys".to_owned()).await);
    assert!(
        message.contains("DATABASE_URL") && message.contains("API_KEYS_FILE") && !message.contains("pass@"),
        "{message}"
    );
    let absent = folder.path().join("no-such-folder").join("keys.json");
    let message = failure(&check("API_KEYS_FILE", absent.display().to_string()).await);
    assert!(message.contains("API_KEYS_FILE") && message.contains("no-such-folder"), "{message}");
    let good = check("API_KEYS_FILE", folder.path().join("keys.json").display().to_string()).await;
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a check leaves no file");
}

#[tokio::test]
async fn check_refuses_toml_file() {
    let message = failure(&command(&["--config", "server.toml", "check"]).output().await.expect("it starts"));
    assert!(message.contains("server.toml") && message.contains("YAML, not TOML"), "{message}");
}

#[tokio::test]
async fn token_file_of_windows_editor_is_read() {
    let relay = Relay::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, format!("\u{feff}{ADMIN_TOKEN}\r\n")).unwrap();
    let file = file.to_str().unwrap();
    let status = relay.output_of(&["status", "--token-file", file]).await;
    assert!(status.contains("is running"), "{status}");
    let message = failure(&relay.run_command(&["status", "--token-file", &format!("{file}s")]).await);
    assert!(message.contains("(--token-file)") && message.contains("cannot read the file"), "{message}");
}

#[tokio::test]
async fn relay_url_may_have_path() {
    let relay = Relay::builder().env("PUBLIC_URL", "https://host.example/llm").start().await;
    for path in ["/llm", "/llm/", "/"] {
        let status = relay.output_of(&["status", "--url", &format!("{}{path}", relay.url())]).await;
        assert!(status.contains("is running"), "{status}");
    }
    let elsewhere = failure(&relay.run_command(&["status", "--url", &format!("{}/other", relay.url())]).await);
    assert!(elsewhere.contains("returned 404"), "{elsewhere}");
}

/// The result of `status` with a variable that names a proxy.
async fn through(variable: &str, proxy: &str, args: &[&str]) -> Output {
    let mut command = command(&[&["status", "--token", ADMIN_TOKEN][..], args].concat());
    command.env(variable, proxy).output().await.expect("it starts")
}

#[tokio::test]
async fn command_connects_through_environment_proxy() {
    let certificates = Certificates::make();
    let relay = Relay::builder().tls(&certificates).start().await;
    let mut proxy = ConnectProxy::start(relay.addr()).await;
    let url = format!("me:planted-4711@{}", proxy.addr());
    let ca_file = certificates.ca_file();
    let args = ["--url", "https://relay.example", "--ca-file", ca_file.to_str().unwrap()];
    let output = through("https_proxy", &url, &args).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let request = proxy.next_request().await;
    assert!(request.starts_with("CONNECT relay.example:443 HTTP/1.1\r\n"), "{request}");
    assert!(request.to_lowercase().contains("proxy-authorization: basic "), "{request}");

    let refusing = ConnectProxy::refusing("407 Proxy Authentication Required").await;
    let message = failure(&through("HTTPS_PROXY", &format!("http://me:planted-4711@{}", refusing.addr()), &args).await);
    assert!(message.contains(" through the proxy in HTTPS_PROXY: "), "{message}");
    assert!(!message.contains("planted"), "{message}");
    let message = failure(&through("ALL_PROXY", "socks5://me:planted-4711@proxy.example", &args).await);
    assert!(message.contains("ALL_PROXY: its value (not shown) must be http://HOST:PORT"), "{message}");
}

#[tokio::test]
async fn loopback_and_no_proxy_addresses_bypass_proxy() {
    let relay = Relay::start().await;
    let mut proxy = ConnectProxy::refusing("403 Forbidden").await;
    let proxy_url = format!("http://{}", proxy.addr());
    let output = through("ALL_PROXY", &proxy_url, &["--url", &relay.url()]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let excepted = ["--url", "http://relay.invalid"];
    let mut direct = command(&[&["status", "--token", ADMIN_TOKEN][..], &excepted].concat());
    let direct = direct.env("ALL_PROXY", &proxy_url).env("NO_PROXY", "10.0.0.0/8, .invalid").output().await.unwrap();
    assert!(failure(&direct).contains("cannot reach the relay at http://relay.invalid/: "), "{}", failure(&direct));
    assert!(proxy.is_unused());
    failure(&through("ALL_PROXY", &proxy_url, &excepted).await);
    assert!(proxy.next_request().await.starts_with("GET http://relay.invalid/admin/state HTTP/1.1\r\n"));
}
