//! A Provider changes to TLS while it serves, and its certificate is renewed: no backend restarts, and no relay for a
//! renewal.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use modelrelay_cluster::tls::{Authority, Trust, secret};
use modelrelay_cluster::{TEST_TIMEOUT, wait_until};
use rustls::pki_types::CertificateDer;
use serde_json::json;

use super::setup::{LOCAL, Setup, message_of};

const SECRET: &str = "local-tls";

/// Writes the Secret as cert-manager does.
async fn publish(setup: &Setup, authority: &str, certificate: &str, key: &str) {
    setup.namespace.apply(&[secret(SECRET, authority, certificate, key)]).await;
}

/// Sends a request over a new connection; returns the status, and the server's certificate.
async fn send_request(trust: &Trust, to: SocketAddr) -> Result<(u16, CertificateDer<'static>), String> {
    let stream = trust.connect(to).await?;
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).expect("a certificate").clone();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    tokio::spawn(connection);
    let body = json!({"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
    let request = Request::post("/v1/messages").header("host", "local").header("content-type", "application/json");
    let request = request.body(Full::new(Bytes::from(body.to_string()))).expect("it is well-formed");
    let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = answer.status().as_u16();
    answer.into_body().collect().await.map_err(|error| error.to_string())?;
    Ok((status, shown))
}

/// Returns each Pod with the number of its container restarts.
fn runs(pods: &[Pod]) -> Vec<(Option<String>, i32)> {
    let restarts = |pod: &Pod| {
        let status = pod.status.as_ref();
        let all = status.into_iter().flat_map(|it| it.container_statuses.iter().chain(&it.init_container_statuses));
        all.flatten().map(|container| container.restart_count).sum()
    };
    let mut runs: Vec<_> = pods.iter().map(|pod| (pod.uid(), restarts(pod))).collect();
    runs.sort();
    runs
}

async fn backends(setup: &Setup) -> Vec<(Option<String>, i32)> {
    runs(&setup.namespace.pods("modelrelay.io/pool=llama").await)
}

#[tokio::test]
async fn provider_serves_renewed_certificate_without_backend_restart() {
    let setup = Setup::serving(&json!({})).await;
    let backends_before = backends(&setup).await;
    let authority = Authority::make();
    let namespace = setup.namespace.name.clone();
    let names = ["local", "local-workers"].map(|service| format!("{service}.{namespace}.svc"));
    let first = authority.sign(&names);

    // A Deployment that could not start is not rolled out, and the running one keeps serving.
    setup.patch(&json!({"relay": {"tls": {"secretName": SECRET}}})).await;
    let provider = setup.reason("Ready", "False", "SecretNotFound").await;
    let message = message_of(&provider, "Ready");
    assert!(message.starts_with("spec.relay.tls.secretName: Secret local-tls does not exist"), "{message}");
    publish(&setup, &authority.certificate, &first.certificate, &authority.sign(&names).key).await;
    let provider = setup.reason("Ready", "False", "SecretInvalid").await;
    assert!(message_of(&provider, "Ready").contains("does not belong to the certificate"), "{provider:?}");
    setup.answers(None).await;

    publish(&setup, &authority.certificate, &first.certificate, &first.key).await;
    let provider = setup.reason("Ready", "True", "Serving").await;
    let host = &names[0];
    assert_eq!(provider.data["status"]["endpoint"], format!("https://{host}/v1"));
    // The operator reached the new relay over TLS, and the existing worker moved to it.
    setup.reason("Programmed", "True", "ConfigurationApplied").await;
    let service = setup.namespace.service_address(LOCAL).await;
    assert_eq!(service.port(), 443);
    let client = Trust::new(&[&authority], host.clone());
    let answers = async || matches!(send_request(&client, service).await, Ok((200, shown)) if shown == first.der());
    wait_until("a response over TLS from the existing worker", TEST_TIMEOUT * 2, answers).await;
    assert_eq!(backends(&setup).await, backends_before, "a backend was restarted");
    setup.connected().await;

    let relays_before = runs(&setup.relays().await);
    let generation = setup.deployment().await.metadata.generation;
    let second = authority.sign(&names);
    publish(&setup, &authority.certificate, &second.certificate, &second.key).await;
    let renewed = async || matches!(send_request(&client, service).await, Ok((200, shown)) if shown == second.der());
    wait_until("the renewed certificate", TEST_TIMEOUT, renewed).await;
    assert_eq!(runs(&setup.relays().await), relays_before, "a relay was restarted");
    assert_eq!(setup.deployment().await.metadata.generation, generation, "the Deployment was touched");

    // Another authority: relays serve its certificate, and workers that dial again trust it.
    let (other, both) = (Authority::make(), |other: &Authority| authority.certificate.clone() + &other.certificate);
    let third = other.sign(&names);
    publish(&setup, &both(&other), &third.certificate, &third.key).await;
    let client = Trust::new(&[&other], host.clone());
    let replaced = async || matches!(send_request(&client, service).await, Ok((200, shown)) if shown == third.der());
    wait_until("a certificate of another authority", TEST_TIMEOUT, replaced).await;
    setup.namespace.kubectl("rollout restart deployment/local-relay").await;
    setup.namespace.rolled_out("deployment/local-relay").await;
    wait_until("a worker that trusts the other authority", TEST_TIMEOUT * 2, replaced).await;
    setup.reason("Programmed", "True", "ConfigurationApplied").await;
    assert_eq!(backends(&setup).await, backends_before, "a backend was restarted");
}
