//! Credentials for backends, and backend output that must not leave the worker.

use std::io::Write;

use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_relay::Ack;
use serde_json::json;
use tempfile::NamedTempFile;

use crate::rig::{LONG, Rig, chat, demand, gate, slots1};

/// Printed by a backend before it crashes.
const SECRET: &str = "hf_dont_tell_anybody";

fn key_of(backend: &FakeBackend, path: &str) -> Option<String> {
    let heads = backend.received_heads();
    let last = heads.iter().rev().find(|head| head.path() == path)?;
    let key = last.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("authorization"))?;
    Some(String::from_utf8_lossy(&key.1).into_owned())
}

#[tokio::test]
async fn backend_key_is_sent_and_reloaded_without_restart() {
    let backend = FakeBackend::start().await;
    backend.answer_with(|_, _| Answer::json(200, &json!({"served": true})));
    let mut file = NamedTempFile::new().expect("a file");
    writeln!(file, "first").expect("a writable file");
    let models = json!([{"id": "m", "url": backend.url(), "maxConcurrency": 2}]);
    let key_file = file.path().to_string_lossy().into_owned();
    let slots = json!([{"id": "gpu0", "driver": "static", "apiKeyFile": key_file, "models": models}]);
    let mut rig = Rig::with(&slots1(), &json!({"multiplexer": {"slots": slots}}).to_string()).await;
    demand(&rig.link, "m", 1);
    gate(&mut rig.link, "m").await;
    for key in ["first", "second"] {
        if key == "second" {
            std::fs::write(file.path(), key).expect("a writable file");
            rig.worker.process.wait_for_line("worker.yaml applied").await;
        }
        let spec = chat("m").header("authorization", "Bearer of-the-client");
        let request = rig.link.send_request(&spec);
        assert_eq!(rig.link.reply(&request).await.status, 200);
        let shown = Some(format!("Bearer {key}"));
        assert_eq!(key_of(&backend, "/v1/chat/completions"), shown);
        if key == "first" {
            assert_eq!(key_of(&backend, "/v1/models"), shown);
        }
    }
    assert!(!rig.worker.log().contains("first") && !rig.worker.probe("/healthz").await.body.contains("second"));
}

fn dying() -> String {
    let command = json!(["sh", "-c", format!("echo listening on ${{PORT}}; echo token={SECRET}; exit 3")]);
    let models = json!([{"id": "m", "command": command}]);
    let slots = json!([{"id": "gpu0", "driver": "process", "models": models}]);
    json!({"multiplexer": {"slots": slots}}).to_string()
}

#[tokio::test]
async fn output_of_dying_backend_stays_on_worker() {
    for ack in [slots1(), Ack::core1(), Ack::old()] {
        let mut rig = Rig::with(&ack, &dying()).await;
        if ack.capabilities.iter().any(|known| known == "slots1") {
            let order = json!({"type": "command", "op_id": "1", "command": "load", "model": "m"});
            rig.link.send(&order);
            let result = rig.link.message_within(LONG, "command_result", |_| true).await.expect("a response").body;
            assert!(result["ok"] == false && !result.to_string().contains(SECRET), "{result}");
            let has_failed = |slots: &serde_json::Value| slots["slots"][0]["models"][0]["status"] == "failed";
            let slots = rig.link.message_within(LONG, "slots", has_failed).await.map(|slots| slots.body);
            let slots = slots.unwrap_or_default().to_string();
            assert!(!slots.contains(SECRET), "{slots}");
        }
        let request = rig.link.send_request(&chat("m"));
        let reply = rig.link.reply_within(LONG, &request).await.expect("a response");
        let failure = format!("{:?} {}", reply.end, String::from_utf8_lossy(&reply.body));
        assert!(failure.contains("could not be loaded") && !failure.contains(SECRET), "{failure}");
        let health = rig.worker.probe("/healthz").await.body;
        assert!(health.contains(SECRET), "{health}");
        rig.worker.process.wait_for_line(SECRET).await;
    }
}
