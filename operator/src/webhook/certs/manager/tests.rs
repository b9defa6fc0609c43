use std::sync::{Arc, Mutex};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::*;
use crate::cluster::testing;
use crate::webhook::certs::keys;

type RecordedRequests = Arc<Mutex<Vec<(String, Value)>>>;

/// Returns a client of an API server that responds with `answer(method and path, body)`, and the recorded requests.
fn server(mut answer: impl FnMut(&str, &Value) -> (u16, Value) + Send + 'static) -> (Client, RecordedRequests) {
    let asked = RecordedRequests::default();
    let asking = Arc::clone(&asked);
    let client = testing::client("default", move |method, path, sent| {
        let what = format!("{method} {path}");
        let answered = answer(&what, &sent);
        asking.lock().unwrap().push((what, sent));
        answered
    });
    (client, asked)
}

fn failure(code: u16, reason: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason}))
}

/// Accepts every write, as an API server does.
fn accept(what: &str, sent: &Value) -> (u16, Value) {
    let mut object = sent.clone();
    match what.split(' ').next() {
        Some("POST" | "PUT") => {
            object["metadata"]["resourceVersion"] = json!("2");
            (200, object)
        }
        Some("PATCH") => (200, serde_json::to_value(configuration(None)).unwrap()),
        _ => failure(404, "NotFound"),
    }
}

fn settings() -> Settings {
    Settings {
        namespace: "system".to_owned(),
        secret: "cert".to_owned(),
        service: "webhook".to_owned(),
        configuration: "mr".to_owned(),
    }
}

fn configuration(bundle: Option<&[u8]>) -> MutatingWebhookConfiguration {
    let hook = |name: &str| {
        let mut hook = MutatingWebhook { name: name.to_owned(), ..MutatingWebhook::default() };
        hook.client_config.ca_bundle = bundle.map(|bundle| ByteString(bundle.to_owned()));
        hook
    };
    MutatingWebhookConfiguration {
        webhooks: Some(vec![hook("one.modelrelay.io"), hook("two.modelrelay.io")]),
        metadata: ObjectMeta { name: Some("mr".to_owned()), uid: Some("u".to_owned()), ..ObjectMeta::default() },
    }
}

/// A valid Secret of the operator.
fn secret() -> Secret {
    let policy = Policy::default();
    let mut data = material::Data::new();
    let names = settings().names();
    change(&mut data, Action::Replace(plan::IssueReason::Missing), SystemTime::now(), &policy, &names).unwrap();
    let labels = labels_of("webhook").into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Secret {
        data: Some(data),
        metadata: ObjectMeta { labels: Some(labels), resource_version: Some("1".to_owned()), ..ObjectMeta::default() },
        type_: Some(SECRET_TYPE.to_owned()),
        ..Secret::default()
    }
}

fn ended(mut secret: Secret) -> Secret {
    let long_ago = SystemTime::now() - Duration::from_secs(200 * 86_400);
    let data = secret.data.as_mut().unwrap();
    change(data, Action::NewLeaf(plan::IssueReason::Due), long_ago, &Policy::default(), &settings().names()).unwrap();
    secret
}

fn bundle_of(secret: &Secret) -> Vec<u8> {
    material::bundle(secret.data.as_ref().unwrap())
}

/// A manager that has observed these two objects.
fn manager<'a>(
    client: &Client,
    settings: &'a Settings,
    secret: Option<Secret>,
    configuration: Option<MutatingWebhookConfiguration>,
) -> Manager<'a> {
    let manager = Manager::new(client, settings, Policy::default());
    manager.secret.send_replace(secret.into());
    manager.configuration.send_replace(configuration.into());
    manager
}

/// Returns the write requests.
fn writes(requests: &RecordedRequests) -> Vec<String> {
    recorded(requests).into_iter().filter(|what| !what.starts_with("GET")).collect()
}

/// Returns the body of the first request with this method.
fn sent(requests: &RecordedRequests, method: &str) -> Value {
    let requests = requests.lock().unwrap();
    requests.iter().find(|(what, _)| what.starts_with(method)).unwrap().1.clone()
}

fn recorded(asked: &RecordedRequests) -> Vec<String> {
    asked.lock().unwrap().iter().map(|(what, _)| what.clone()).collect()
}

const SECRETS: &str = "/api/v1/namespaces/system/secrets";
const CONFIGURATION: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/mr";

#[tokio::test]
async fn missing_secret_is_created_and_published() {
    let (client, requests) = server(accept);
    let settings = settings();
    let manager = manager(&client, &settings, None, Some(configuration(None)));
    let mut memory = ManagerState::default();
    assert!(manager.step(&mut memory).await.unwrap());
    assert!(manager.step(&mut memory).await.unwrap());
    assert_eq!(writes(&requests), [format!("POST {SECRETS}"), format!("PATCH {CONFIGURATION}")]);

    let made: Secret = serde_json::from_value(sent(&requests, "POST")).unwrap();
    assert_eq!(made.type_.as_deref(), Some("kubernetes.io/tls"));
    let owner = &made.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.name.as_str(), owner.uid.as_str()),
        ("MutatingWebhookConfiguration", "mr", "u")
    );
    assert!(matches!(held(Some(&made), &settings.names()), SecretState::Ours(contents) if contents.can_sign));

    manager.configuration.send_replace(Some(configuration(Some(&bundle_of(&made)))).into());
    assert!(!manager.step(&mut memory).await.unwrap());
}

#[tokio::test]
async fn publishing_changes_only_webhook_bundles() {
    let (client, requests) = server(accept);
    let settings = settings();
    let secret = secret();
    let bundle = json!(ByteString(bundle_of(&secret)));
    manager(&client, &settings, Some(secret), Some(configuration(Some(b"other"))))
        .step(&mut ManagerState::default())
        .await
        .unwrap();
    assert_eq!(recorded(&requests), [format!("PATCH {CONFIGURATION}")]);
    assert_eq!(
        sent(&requests, "PATCH"),
        json!([
            {"op": "test", "path": "/webhooks/0/name", "value": "one.modelrelay.io"},
            {"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle},
            {"op": "test", "path": "/webhooks/1/name", "value": "two.modelrelay.io"},
            {"op": "add", "path": "/webhooks/1/clientConfig/caBundle", "value": bundle},
        ])
    );
}

#[tokio::test]
async fn secret_of_faster_leader_is_adopted() {
    let theirs = secret();
    let bundle = bundle_of(&theirs);
    let answer = serde_json::to_value(&theirs).unwrap();
    let (client, requests) = server(move |what, _| match what.split(' ').next() {
        Some("POST" | "PUT") => failure(409, "Conflict"),
        _ => (200, answer.clone()),
    });
    let settings = settings();
    for seen in [None, Some(ended(secret()))] {
        let manager = manager(&client, &settings, seen, Some(configuration(Some(&bundle))));
        assert!(manager.step(&mut ManagerState::default()).await.unwrap());
        assert!(!manager.step(&mut ManagerState::default()).await.unwrap(), "nothing is left to do");
    }
    let [get, post, put] = [format!("GET {SECRETS}/cert"), format!("POST {SECRETS}"), format!("PUT {SECRETS}/cert")];
    assert_eq!(recorded(&requests), [post, get.clone(), put, get]);
}

#[tokio::test]
async fn renewal_keeps_foreign_annotations_and_sends_resource_version() {
    let (client, requests) = server(accept);
    let settings = settings();
    let mut old = ended(secret());
    old.metadata.annotations = Some(BTreeMap::from([("theirs".to_owned(), "x".to_owned())]));
    let authority = old.data.as_ref().unwrap()[keys::AUTHORITY].clone();
    manager(&client, &settings, Some(old), None).step(&mut ManagerState::default()).await.unwrap();
    assert_eq!(writes(&requests), [format!("PUT {SECRETS}/cert")]);
    let sent = sent(&requests, "PUT");
    assert_eq!(sent["metadata"]["resourceVersion"], "1");
    assert_eq!(sent["metadata"]["annotations"], json!({"theirs": "x"}));
    assert_eq!(sent["data"]["ca.crt"], json!(authority));
}

#[tokio::test]
async fn immutable_secret_is_recreated() {
    let (client, requests) = server(|what, sent| match what.split(' ').next() {
        Some("PUT") => failure(422, "Invalid"),
        Some("DELETE") => (200, json!({"kind": "Status", "status": "Success"})),
        _ => accept(what, sent),
    });
    let settings = settings();
    let manager = manager(&client, &settings, Some(ended(secret())), None);
    let mut memory = ManagerState::default();
    manager.step(&mut memory).await.unwrap();
    manager.configuration.send_replace(Some(configuration(None)).into());
    manager.step(&mut memory).await.unwrap();
    let writes = writes(&requests);
    assert_eq!(writes, [format!("PUT {SECRETS}/cert"), format!("DELETE {SECRETS}/cert"), format!("POST {SECRETS}")]);
    assert_eq!(sent(&requests, "DELETE")["preconditions"]["resourceVersion"], "1");
}

#[tokio::test]
async fn foreign_secret_is_never_written() {
    let (client, requests) = server(accept);
    let settings = settings();
    let mut theirs = secret();
    theirs.metadata.labels = None;
    let manager = manager(&client, &settings, Some(theirs), Some(configuration(None)));
    assert!(!manager.step(&mut ManagerState::default()).await.unwrap());
    assert_eq!(recorded(&requests), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn rejected_write_is_not_retried_in_hot_loop() {
    let (client, requests) = server(|what, _| match what.split(' ').next() {
        Some("POST") => failure(403, "Forbidden"),
        Some("GET") if what.ends_with("/mr") => (200, serde_json::to_value(configuration(None)).unwrap()),
        _ => failure(404, "NotFound"),
    });
    let (_leads, leader) = watch::channel(true);
    let manager = run_manager(client, settings(), Policy::default(), leader);
    assert!(tokio::time::timeout(Duration::from_secs(600), manager).await.is_err());
    let creations = recorded(&requests).iter().filter(|what| what.starts_with("POST")).count();
    // 2, 4, 8, 16, 32 and then 60 seconds apart.
    assert!((10..=16).contains(&creations), "{creations}");
    let reads = recorded(&requests).len() - creations;
    assert!(reads < 150, "{reads} reads in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn non_leader_sends_no_requests() {
    let (client, requests) = server(accept);
    let (_leads, leader) = watch::channel(false);
    let manager = run_manager(client, settings(), Policy::default(), leader);
    assert!(tokio::time::timeout(Duration::from_secs(3600), manager).await.is_err());
    assert_eq!(recorded(&requests), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn time_since_publication_restarts_with_each_bundle() {
    let mut memory = ManagerState::default();
    let one = configuration(Some(b"one"));
    let second = Duration::from_secs(1);
    assert_eq!(published(None, b"one", &mut memory), Published::NoConfiguration);
    assert_eq!(published(Some(&one), b"one", &mut memory), Published::For(Duration::ZERO));
    tokio::time::advance(second).await;
    assert_eq!(published(Some(&one), b"one", &mut memory), Published::For(second));
    assert_eq!(published(Some(&one), b"two", &mut memory), Published::Differs);
    assert_eq!(published(Some(&one), b"one", &mut memory), Published::For(Duration::ZERO));
    // One of them was emptied externally.
    let mut emptied = one;
    emptied.webhooks.as_mut().unwrap()[1].client_config.ca_bundle = None;
    assert_eq!(published(Some(&emptied), b"one", &mut memory), Published::Differs);
}
