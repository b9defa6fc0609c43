//! The probe server's reports about slots.

use serde_json::json;

use crate::rig::{Rig, Slot, chat, request_once_loaded, slots1};

#[tokio::test]
async fn health_and_metrics_report_resident() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    for path in ["/livez", "/readyz", "/backendz"] {
        assert_eq!(rig.worker.probe(path).await.status, 200, "{path}");
    }
    let request = request_once_loaded(&mut rig.link, &chat("a"), "a").await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
    let health = rig.worker.probe("/healthz").await.json();
    let slot = &health["slots"][0];
    assert_eq!((&slot["id"], &slot["resident"], &health["models"]), (&json!("gpu0"), &json!("a"), &json!(["a", "b"])));
    assert!(health.get("backend_up").is_none() && health["max_concurrency"] == 4, "{health}");
    for series in ["slot_state{slot=\"gpu0\",state=\"ready\"}", "resident_info{model=\"a\",slot=\"gpu0\"}"] {
        assert_eq!(rig.worker.metric(&format!("modelrelay_worker_{series}")).await, 1.0, "{series}");
    }
    assert_eq!(rig.worker.metric("modelrelay_worker_requests_in_flight").await, 0.0);
    let metrics = rig.worker.probe("/metrics").await.body;
    assert!(!metrics.contains("backend_up"), "a backend that is stopped by design must not raise an alert");
}
