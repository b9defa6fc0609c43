//! The backends that `up` finds on a machine, and the programs that it starts and its output.

use std::time::Duration;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::within_for;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::rig::{NO_BACKEND, START_TIMEOUT, Up, spawn};

#[tokio::test]
async fn printed_command_receives_streamed_demo_response() {
    let up = Up::start(&[NO_BACKEND]).await;
    assert!(up.printed("backend: none found on ports 1; using the demo backend at http://127.0.0.1:1"));
    let answer = up.paste_curl_line().await;
    for word in ["demo", "backend,", "not", "a", "model."] {
        assert!(answer.contains(&format!("\" {word}\"")), "{answer}");
    }
    assert!(answer.trim_end().ends_with("data: [DONE]"), "{answer}");
    for part in ["relay  | ", "worker | ", "demo   | "] {
        assert!(up.printed(part), "{part}: {}", up.process.log().dump());
    }
    up.stop().await;
}

#[tokio::test]
async fn search_skips_relay_and_backend_without_models() {
    let (relay, empty) = (Relay::start().await, FakeBackend::with_models(&[]).await);
    let (backend, other) = (FakeBackend::with_models(&["org/model:1b"]).await, FakeBackend::start().await);
    let ports =
        [relay.addr(), empty.addr(), backend.addr(), other.addr()].map(|addr| addr.port().to_string()).join(" ");
    let up = Up::start(&[("BACKEND_PORTS", &ports)]).await;
    assert!(up.printed(&format!("not used: port {}: a ModelRelay relay, not a backend", relay.addr().port())));
    assert!(up.printed(&format!("not used: {}  OpenAI-compatible: no model yet", empty.url())));
    assert!(up.printed(&format!("backend: found {}  OpenAI-compatible: org/model:1b", backend.url())));
    assert!(up.printed(&format!("not used: {}  OpenAI-compatible: m; set BACKEND_URL to use it", other.url())));
    assert!(up.curl_line().contains("\"model\":\"org/model:1b\"") && !up.printed("demo   | "));
    up.stop().await;
}

#[tokio::test]
async fn backend_requiring_key_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut peer, _)) = listener.accept().await {
            let _ = peer.read(&mut [0; 4096]).await;
            let _ =
                peer.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    let up = Up::start(&[("BACKEND_PORTS", &port.to_string())]).await;
    let reason = "/v1/models returned 401 Unauthorized: the backend requires an API key; set BACKEND_API_KEY_FILE";
    assert!(up.printed(&format!("not used: port {port}: {reason}")) && up.printed("none found"));
    up.stop().await;
}

#[tokio::test]
async fn given_backend_is_used_without_search() {
    let (backend, other) = (FakeBackend::with_models(&["given"]).await, FakeBackend::start().await);
    let ports = other.addr().port().to_string();
    let up = Up::start(&[("BACKEND_URL", &backend.url()), ("BACKEND_PORTS", &ports), ("WORKER_SECRET", "")]).await;
    assert!(up.curl_line().contains("\"model\":\"given\""));
    assert_eq!(other.request_count("/v1/models"), 0);
    up.stop().await;
}

#[tokio::test]
async fn odd_model_name_survives_shell() {
    let name = "it's \"new\" $HOME \\ é";
    let mut backend = FakeBackend::with_models(&[name]).await;
    let up = Up::start(&[("BACKEND_URL", &backend.url())]).await;
    let curl = up.spawn_curl();
    let mut call = backend.call().await;
    assert_eq!(call.read_json().await["model"], json!(name));
    call.answer_json(200, &json!({"id": "1"})).await;
    assert!(up.curl_output(curl).await.status.success());
    up.stop().await;
}

#[tokio::test]
async fn later_runs_use_next_ports() {
    let start = || Up::start_on_usual_port(&[NO_BACKEND]);
    let (first, second, third) = tokio::join!(start(), start(), start());
    let urls = [first.url(), second.url(), third.url()];
    assert!(urls[0] != urls[1] && urls[1] != urls[2] && urls[2] != urls[0], "{urls:?}");
    let moved = [&first, &second, &third].into_iter().filter(|up| up.printed("port 8080 is in use; listening on"));
    assert!(moved.count() >= 2);
    first.stop().await;
    assert!(second.paste_curl_line().await.contains("[DONE]"), "the second run must not depend on the first");
    second.stop().await;
    third.stop().await;
}

#[tokio::test]
async fn printed_token_logs_in_at_dashboard() {
    let up = Up::start(&[NO_BACKEND]).await;
    let line = up.process.log().lines().into_iter().find(|line| line.contains("/dashboard")).expect("a page");
    let (url, token) = line.split_once("   (log in with ").expect("a token");
    let url = url.rsplit(' ').next().expect("an address");
    let login = format!("{{\"token\":\"{}\"}}", token.trim_end_matches(')'));
    let status = |args: &[&str]| {
        let options = ["-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "x-modelrelay-dashboard: 1"];
        let output =
            std::process::Command::new("curl").args([&options, args].concat()).output().expect("curl is installed");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(status(&[url]), "200");
    assert_eq!(status(&["-d", &login, &url.replace("/dashboard", "/dashboard/login")]), "204");
    assert_eq!(status(&["-d", r#"{"token":"another"}"#, &url.replace("/dashboard", "/dashboard/login")]), "403");
    up.stop().await;
}

#[tokio::test]
async fn wait_for_backend_is_reported_and_ends() {
    let backend = FakeBackend::refusing().await;
    let process = spawn(&[("BACKEND_URL", &backend.url()), ("LISTEN_ADDR", "127.0.0.1:0")]).start();
    let reminder = format!("modelrelay: still waiting for a model of the backend at {}", backend.url());
    within_for(START_TIMEOUT, "a reminder", process.log(), process.wait_for_line(&reminder)).await;
    Up { process }.stop().await;
}

#[tokio::test]
async fn unsupported_settings_end_up_with_reason() {
    let cases = [
        ("TLS_CERT_FILE", "cert.pem", "TLS_CERT_FILE is set"),
        ("MODELRELAY_REQUIRE_API_KEYS", "1", "requires API keys"),
    ];
    for (variable, value, reason) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let spawn = spawn(&[NO_BACKEND, (variable, value), ("LISTEN_ADDR", "127.0.0.1:0")]).working_dir(folder.path());
        let mut process = spawn.start();
        assert_eq!(process.wait_exit_within(Duration::from_secs(30)).await.code(), Some(1), "{}", process.log().dump());
        assert!(process.log().contains(reason), "{}", process.log().dump());
    }
}
