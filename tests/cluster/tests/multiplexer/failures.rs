//! Models that cannot be loaded, next to one that can.

use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use modelrelay_cluster::{TEST_TIMEOUT, wait_until};
use serde_json::json;

use super::setup::{Setup, model, standalone};

/// `alpha` works, `broken` has an image that does not exist, `absent` has no Deployment.
async fn start(name: &str) -> Setup {
    let mut broken = model("broken");
    broken[0]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("localhost/nobody-has-this:dev");
    let objects = [model("alpha"), broken].concat();
    Setup::start(name, &standalone(&["alpha", "broken", "absent"]), &objects).await
}

impl Setup {
    /// Keeps requesting a model that cannot be loaded, as SDKs do, until an Event of the pool reports it: the operator
    /// polls every few seconds, and a first failure is forgotten sooner.
    async fn expect_event(&self, model: &str, reason: &str, parts: &[&str]) {
        wait_until(&format!("an Event {reason} that contains {parts:?}"), TEST_TIMEOUT, async || {
            self.refused(model).await;
            let events =
                self.namespace.api::<Event>().list(&ListParams::default()).await.expect("Events can be listed");
            events.items.iter().any(|event| {
                let message = event.message.as_deref().unwrap_or_default();
                event.involved_object.kind.as_deref() == Some("WorkerPool")
                    && event.reason.as_deref() == Some(reason)
                    && parts.iter().all(|part| message.contains(part))
            })
        })
        .await;
    }
}

#[tokio::test]
async fn model_without_deployment_does_not_disturb_resident() {
    let setup = start("mux-absent").await;
    setup.answers("alpha").await;
    let before = setup.uids().await;
    let (status, error) = setup.refused("absent").await;
    assert_eq!((status, &error["code"]), (503, &json!("backend_unavailable")), "{error}");
    setup.expect_event("absent", "LoadFailed", &["absent", "gpu0"]).await;
    setup.resident("alpha").await;
    assert_eq!(setup.uids().await, before, "the model was not unloaded");
    setup.answers("alpha").await;
}

#[tokio::test]
async fn model_without_image_releases_slot() {
    let setup = start("mux-broken").await;
    setup.answers("alpha").await;
    let (status, error) = setup.refused("broken").await;
    assert_eq!((status, &error["code"]), (503, &json!("backend_unavailable")), "{error}");
    setup.expect_event("broken", "LoadFailed", &["broken", "backend_unavailable"]).await;
    setup.resident("alpha").await;
    assert_eq!((setup.replicas("alpha").await, setup.replicas("broken").await), (1, 0));
    setup.answers("alpha").await;
}
