//! The listeners over TLS: `TLS_CERT_FILE` and `TLS_KEY_FILE`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use modelrelay_harness::client::{RawConnection, Request};
use modelrelay_harness::process::Log;
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::tls::{Certificates, TLS12, TLS13};
use serde_json::Value;

use crate::support::other_listener_answers;

const CERT: &str = "TLS_CERT_FILE (--tls-cert-file)";
const KEY: &str = "TLS_KEY_FILE (--tls-key-file)";

/// A relay that also logs failed handshakes.
async fn start(certificates: &Certificates) -> Relay {
    Relay::builder().env("LOG_LEVEL", "debug").tls(certificates).start().await
}

async fn is_trusted_by(relay: &Relay, certificates: &Certificates) -> bool {
    let request = Request::get("/livez").over_tls(Some(certificates.client()));
    request.is_answered_at(relay.addr(), relay.log()).await
}

async fn error_of(relay: &Relay) -> Value {
    relay.get("/readyz").await.json()["tls"]["error"].clone()
}

#[tokio::test]
async fn versions_1_2_and_1_3_are_supported() {
    let certificates = Certificates::make();
    let relay = start(&certificates).await;
    for version in [&TLS12, &TLS13] {
        let client = Some(certificates.client_of(&[version]));
        let reply = Request::get("/livez").over_tls(client).fetch(relay.addr(), relay.log()).await;
        assert_eq!(reply.with_status(200).text(), "ok\n", "{version:?}");
    }
}

#[tokio::test]
async fn alpn_negotiates_http_1_1_only() {
    let certificates = Certificates::make();
    let relay = start(&certificates).await;
    let offering = |protocols: &[&str]| {
        let mut client = (*certificates.client()).clone();
        client.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        Request::get("/livez").over_tls(Some(client.into())).is_answered_at(relay.addr(), relay.log())
    };
    assert!(offering(&["h2", "http/1.1"]).await);
    assert!(!offering(&["h2"]).await, "the relay must not offer HTTP/2");
}

#[tokio::test]
async fn every_listener_speaks_tls() {
    let certificates = Certificates::make();
    let own = Relay::builder().env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").env("WORKER_LISTEN_ADDR", "127.0.0.1:0");
    let relay = own.tls(&certificates).start().await;
    for to in [relay.addr(), relay.admin_addr().await, relay.worker_addr().await] {
        let reply = Request::get("/livez").over_tls(Some(certificates.client())).fetch(to, relay.log()).await;
        let _ = reply.with_status(200);
        let mut plain = RawConnection::open(to, relay.log()).await;
        plain.write("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(plain.read_to_end().await.starts_with("HTTP/1.1 400 "));
    }
}

#[tokio::test]
async fn plain_http_is_400_naming_https() {
    let relay = start(&Certificates::make()).await;
    let mut request = Request::post("/v1/chat/completions", &serde_json::json!({"model": "m"}));
    request = request.body(vec![b' '; 300_000]);
    let reply = request.fetch(relay.addr(), relay.log()).await.with_status(400);
    let error = &reply.json()["error"];
    assert_eq!((error["code"].as_str(), reply.aborted), (Some("https_required"), false));
    assert!(error["message"].as_str().is_some_and(|message| message.contains("https://")), "{error}");
}

#[tokio::test]
async fn failed_or_missing_handshake_affects_no_others() {
    let relay = start(&Certificates::make()).await;
    let begun = Instant::now();
    let mut silent = RawConnection::open(relay.addr(), relay.log()).await;
    let mut garbage = RawConnection::open(relay.addr(), relay.log()).await;
    garbage.write([0; 64]).await;
    garbage.read_to_end().await;
    relay.log().wait_for_line("TLS handshake failed").await;
    assert_eq!(relay.get("/livez").await.status, 200);
    assert_eq!(silent.read_to_end_within(Duration::from_secs(20)).await, "");
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(9), "closed after {took:?}");
    relay.log().wait_for_line("TLS handshake timed out").await;
}

#[tokio::test]
async fn connection_limit_applies_before_handshake() {
    let certificates = Certificates::make();
    let relay = Relay::builder().env("MAX_CONNECTIONS", "2").env("ADMIN_LISTEN_ADDR", "127.0.0.1:0");
    let relay = relay.tls(&certificates).start().await;
    let silent =
        [RawConnection::open(relay.addr(), relay.log()).await, RawConnection::open(relay.addr(), relay.log()).await];
    let third = relay.begin(Request::get("/livez"));
    other_listener_answers(&relay, Some(&certificates)).await;
    assert!(!third.is_answered());
    drop(silent);
    let _ = third.reply().await.with_status(200);
}

#[tokio::test]
async fn renewed_certificate_applies_to_new_connections() {
    let (old, new) = (Certificates::make(), Certificates::make());
    let mut relay = start(&old).await;
    assert!(is_trusted_by(&relay, &old).await && !is_trusted_by(&relay, &new).await);
    replace(&relay, &new.certificate(), &new.key());
    relay.log().wait_for_line("TLS certificate reloaded").await;
    assert!(is_trusted_by(&relay, &new).await && !is_trusted_by(&relay, &old).await);
    relay.trust(&new);
    assert_eq!(error_of(&relay).await, Value::Null);
    assert_eq!(relay.metric("modelrelay_tls_last_reload_successful").await, 1.0);
}

#[tokio::test]
async fn broken_renewal_keeps_old_certificate_and_is_reported() {
    let (old, new) = (Certificates::make(), Certificates::make());
    let relay = start(&old).await;
    for (certificate, key, parts) in [
        (new.certificate(), old.key(), [KEY, "does not match"]),
        ("".to_owned(), old.key(), [CERT, "no PEM certificate"]),
        (old.certificate(), "secret-nonsense".to_owned(), [KEY, "no PEM private key"]),
    ] {
        replace(&relay, &certificate, &key);
        let is_reported =
            || async { error_of(&relay).await.as_str().is_some_and(|why| parts.iter().all(|it| why.contains(it))) };
        relay.eventually(&format!("{parts:?} in /readyz"), is_reported).await;
        assert_eq!(relay.metric("modelrelay_tls_last_reload_successful").await, 0.0);
        // /readyz may be ahead of the log lines in the pipe.
        let logged =
            |line: &str| (line.contains("keeping previous certificate") && line.contains(parts[1])).then_some(());
        relay.log().wait_for("a line that reports it", logged).await;
        assert!(is_trusted_by(&relay, &old).await, "the relay must keep the previous certificate");
    }
    assert!(!relay.log().contains("secret-nonsense"), "{}", relay.log().dump());
    replace(&relay, &old.certificate(), &old.key());
    relay.eventually("no error", || async { error_of(&relay).await == Value::Null }).await;
    assert_eq!(relay.metric("modelrelay_tls_last_reload_successful").await, 1.0);
}

fn replace(relay: &Relay, certificate: &str, key: &str) {
    relay.replace_file("tls.crt", certificate);
    relay.replace_file("tls.key", key);
}

#[tokio::test]
async fn certificate_expiry_is_exported_as_metric() {
    let relay = start(&Certificates::make()).await;
    let ends = relay.metric("modelrelay_tls_certificate_expiry_timestamp_seconds").await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let days = (ends - now) / 86_400.0;
    assert!((1.9..=2.0).contains(&days), "the certificate is valid for two days, but {days} are reported");
    let plain = Relay::start().await;
    let metrics = plain.admin("GET", "/metrics").await.text();
    assert!(!metrics.contains("modelrelay_tls_"), "a certificate that is not there would raise an alarm");
    assert_eq!(plain.get("/readyz").await.json().get("tls"), None);
}

#[tokio::test]
async fn unusable_certificate_pair_is_refused_at_start() {
    let (one, other) = (Certificates::make(), Certificates::make());
    let with =
        |certificate: &str, key: &str| Relay::builder().tls(&one).file("tls.crt", certificate).file("tls.key", key);
    let (certificate, key) = (one.certificate(), one.key());
    let missing = Relay::builder().tls(&one).env("TLS_CERT_FILE", "absent.crt");
    for (relay, parts) in [
        (with(&certificate, &other.key()), [KEY, "tls.key", "does not match the certificate"]),
        (with("nonsense", &key), [CERT, "tls.crt", "the file contains no PEM certificate"]),
        (with(&certificate, "nonsense"), [KEY, "tls.key", "the file contains no PEM private key"]),
        (with(&key, &certificate), [CERT, "tls.crt", "the file contains no PEM certificate"]),
        (missing, [CERT, "absent.crt", "cannot read the file"]),
        (Relay::builder().env("TLS_CERT_FILE", "tls.crt"), [CERT, KEY, "requires"]),
        (Relay::builder().env("TLS_KEY_FILE", "tls.key"), [CERT, KEY, "requires"]),
    ] {
        let (code, log) = refusal(relay).await;
        assert_eq!(code, Some(1), "{}", log.dump());
        let lines: Vec<_> = log.lines().into_iter().filter(|line| !line.trim().is_empty()).collect();
        assert!(lines.len() == 1 && parts.iter().all(|part| lines[0].contains(part)), "{parts:?}\n{}", log.dump());
    }
}

async fn refusal(relay: RelayBuilder) -> (Option<i32>, Log) {
    let (status, log) = relay.start_and_exit().await;
    (status.code(), log)
}
