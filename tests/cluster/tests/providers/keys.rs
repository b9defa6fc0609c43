//! API keys.

use kube::ResourceExt;
use serde_json::{Value, json};

use super::setup::{Setup, address_of};
use modelrelay_cluster::http::fetch;

#[tokio::test]
async fn key_works_at_both_relays_until_revoked() {
    let setup = Setup::ready(&json!({"relay": {"replicas": 2, "requireApiKeys": true}})).await;
    setup.namespace.rolled_out("deployment/local-relay").await;
    let relays = setup.relays().await;
    let [one, other] = relays.as_slice() else { panic!("two relays, not {}", relays.len()) };
    let anybody = fetch(address_of(one, 8080), "GET /v1/models", &[], &Value::Null).await.expect("a response");
    assert_eq!(anybody.status, 401, "{anybody:?}");
    let (id, key) = setup.make_key(one).await;
    setup.wait_for_status(one, &key, 200).await;
    setup.wait_for_status(other, &key, 200).await;
    let listed = setup.admin(other, "GET /admin/keys", &Value::Null).await;
    assert!(listed.body.contains(&id) && !listed.body.contains(&key), "{listed:?}");
    let revoked = setup.admin(other, &format!("DELETE /admin/keys/{id}"), &Value::Null).await;
    assert_eq!(revoked.status, 204, "{revoked:?}");
    setup.wait_for_status(other, &key, 401).await;
    setup.wait_for_status(one, &key, 401).await;
    // The Secret was changed and nothing restarted.
    let names = |pods: &[k8s_openapi::api::core::v1::Pod]| pods.iter().map(ResourceExt::uid).collect::<Vec<_>>();
    assert_eq!(names(&setup.relays().await), names(&relays));
}

#[tokio::test]
async fn admin_api_requires_its_token() {
    let setup = Setup::ready(&json!({})).await;
    let relays = setup.relays().await;
    let address = address_of(relays.first().expect("a relay"), 8082);
    for headers in [&[][..], &[("authorization", "Bearer guessed")]] {
        let reply = fetch(address, "GET /admin/state", headers, &Value::Null).await.expect("a response");
        assert_eq!(reply.status, 403, "{reply:?}");
    }
    // Nor is it available on the clients' port.
    let reply = setup.namespace.service_address("local").await;
    let reply = fetch(reply, "GET /admin/state", &[], &Value::Null).await.expect("a response");
    assert_eq!(reply.status, 404, "{reply:?}");
}
