//! The admin token in a file: `MODELRELAY_ADMIN_TOKEN_FILE`.

use modelrelay_harness::{
    client::Request,
    relay::{ADMIN_TOKEN, Relay, RelayBuilder},
};
use serde_json::json;

use crate::support::chat;

fn with_file(content: &str) -> RelayBuilder {
    Relay::builder()
        .without_env("MODELRELAY_ADMIN_TOKEN")
        .file("token", content)
        .env("MODELRELAY_ADMIN_TOKEN_FILE", "token")
}

async fn admits(relay: &Relay, token: &str) -> bool {
    relay.fetch(Request::get("/admin/state").bearer(token)).await.status == 200
}

#[tokio::test]
async fn token_outside_ascii_admits() {
    let token = "pässwört-des-admins";
    let relay = Relay::builder().env("MODELRELAY_ADMIN_TOKEN", token).start().await;
    assert_eq!(relay.fetch(Request::get("/admin/stats").bearer(token)).await.status, 200);
    assert_eq!(relay.fetch(Request::get("/admin/stats").bearer("passwort-des-admins")).await.status, 403);
}

#[tokio::test]
async fn token_file_is_read_without_trailing_newline() {
    let relay = with_file("token-in-a-file\n").start().await;
    assert!(admits(&relay, "token-in-a-file").await);
    assert!(!admits(&relay, ADMIN_TOKEN).await && !admits(&relay, "").await);
}

#[tokio::test]
async fn new_token_applies_without_restart() {
    let relay = with_file("first").start().await;
    assert!(admits(&relay, "first").await);
    relay.replace_file("token", "second");
    relay.eventually("the new token is accepted", || admits(&relay, "second")).await;
    assert!(!admits(&relay, "first").await);
    assert!(!relay.log().contains("second"), "a token was logged\n{}", relay.log().dump());
}

#[tokio::test]
async fn broken_file_keeps_previous_token_with_one_warning() {
    let relay = with_file("first").start().await;
    relay.replace_file("token", "\n");
    relay.log().wait_for_line("keeping previous token").await;
    assert!(admits(&relay, "first").await && !admits(&relay, "").await);
    #[expect(clippy::disallowed_methods, reason = "the file is read each second, without a visible effect")]
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    assert_eq!(relay.log().count_of("keeping previous token"), 1, "{}", relay.log().dump());
    relay.replace_file("token", "second");
    relay.eventually("the new token is accepted", || admits(&relay, "second")).await;
}

#[tokio::test]
async fn token_file_overrides_variable_with_warning() {
    let relay = with_file("from-the-file").env("MODELRELAY_ADMIN_TOKEN", ADMIN_TOKEN).start().await;
    assert!(admits(&relay, "from-the-file").await && !admits(&relay, ADMIN_TOKEN).await);
    relay.log().wait_for_line("MODELRELAY_ADMIN_TOKEN is ignored because MODELRELAY_ADMIN_TOKEN_FILE is set").await;
}

#[tokio::test]
async fn unusable_file_at_start_fails_with_one_line() {
    let missing = Relay::builder().env("MODELRELAY_ADMIN_TOKEN_FILE", "absent");
    let empty = with_file("");
    for (relay, parts) in [
        (missing, ["MODELRELAY_ADMIN_TOKEN_FILE (--admin-token-file)", "absent", "cannot read the file"]),
        (empty, ["MODELRELAY_ADMIN_TOKEN_FILE (--admin-token-file)", "token", "empty"]),
    ] {
        let (status, log) = relay.start_and_exit().await;
        assert_eq!(status.code(), Some(1), "{}", log.dump());
        assert!(log.lines().iter().any(|line| parts.iter().all(|part| line.contains(part))), "{}", log.dump());
    }
}

#[tokio::test]
async fn token_from_file_is_never_forwarded() {
    let relay = with_file("first").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    relay.replace_file("token", "second");
    relay.eventually("the new token is accepted", || admits(&relay, "second")).await;
    let pending = relay.begin(chat("m").bearer("second"));
    let job = worker.expect_request().await;
    assert_eq!(job.header("authorization"), None);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}
