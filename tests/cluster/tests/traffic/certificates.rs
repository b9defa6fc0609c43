//! The relays' certificate is renewed, and then its authority is replaced.

use kube::api::DynamicObject;
use modelrelay_cluster::tls::{Authority, Pair, Trust, secret};
use modelrelay_cluster::traffic::{Mixed, Traffic};
use modelrelay_cluster::{Cluster, TEST_TIMEOUT, manifests, wait_until};
use serde_json::json;

use super::stack::{CLIENTS, POOL, POOL_PODS, PROVIDER, RELAY_PODS, WORDS, lives, pool, provider};

const SECRET: &str = "local-tls";

#[tokio::test]
async fn rotating_relay_certificates_fails_no_request() {
    let namespace = Cluster::connect().await.namespace("traffic-tls").await;
    let names = [PROVIDER, "local-workers"].map(|service| format!("{service}.{}.svc", namespace.name));
    let (authority, successor) = (Authority::make(), Authority::make());
    let write = async |authority: &str, pair: &Pair| {
        namespace.apply(&[secret(SECRET, authority, &pair.certificate, &pair.key)]).await;
    };
    write(&authority.certificate, &authority.sign(&names)).await;
    let mut pool = pool();
    pool["replicas"] = json!(2);
    let with_tls = provider(&json!({"tls": {"secretName": SECRET}}));
    namespace.apply(&[with_tls, manifests::worker_pool(POOL, &pool)]).await;
    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    let connected = |pool: &DynamicObject| pool.data["status"]["connected"] == 2;
    namespace.wait_for(&pools, POOL, "two connected workers", connected).await;
    namespace.rolled_out("deployment/local-relay").await;
    let service = namespace.service_address(PROVIDER).await;
    assert_eq!(service.port(), 443);
    let all = async || lives([namespace.pods(RELAY_PODS).await, namespace.pods(POOL_PODS).await].concat());
    let before = all().await;

    let trust = Trust::new(&[&authority, &successor], names[0].clone());
    let traffic = Mixed::start(&Traffic::to(service).words(WORDS).trusting(&trust), CLIENTS / 2);
    traffic.wait_for_underway(CLIENTS / 2).await;
    let both = authority.certificate.clone() + &successor.certificate;
    for (signed_by, trusted, what) in [
        (&authority, &authority.certificate, "the certificate was renewed"),
        (&successor, &both, "the authority was replaced"),
        (&successor, &successor.certificate, "the old authority was removed"),
    ] {
        let pair = signed_by.sign(&names);
        write(trusted, &pair).await;
        for relay in namespace.pods(RELAY_PODS).await {
            let address = relay.status.and_then(|status| status.pod_ip).expect("a relay runs").parse();
            let address = std::net::SocketAddr::new(address.expect("an address"), 8080);
            wait_until("the new certificate", TEST_TIMEOUT, async || trust.is_shown(address, &pair).await).await;
        }
        traffic.wait_for_answers(CLIENTS / 2).await;
        traffic.expect_no_failure(what);
    }
    namespace.wait_for(&pools, POOL, "two connected workers", connected).await;
    traffic.expect_all_answered().await;
    assert_eq!(all().await, before, "Pods were restarted or replaced");
}
