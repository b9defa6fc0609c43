//! Workers follow their relays to TLS, and never use a relay that cannot use TLS.

use super::*;
use crate::relays::tls::tests::{HOST, json_of, pair};

const SECRET: &str = "/api/v1/namespaces/llm/secrets/relay-tls";

fn put(scene: &Scene, entries: &[(&str, &str)]) {
    scene.server.lock().unwrap().objects.insert(SECRET.to_owned(), json_of(entries));
}

/// Returns the address that workers dial, and the authority that they receive.
fn dialled(scene: &Scene) -> (String, Option<String>) {
    let data = scene.server.lock().unwrap().objects[CONFIG_MAP]["data"].clone();
    let yaml = data["worker.yaml"].as_str().unwrap();
    let relay = yaml.lines().find_map(|line| line.strip_prefix("relay: ")).unwrap();
    assert_eq!(yaml.contains("relayCaFile: /etc/modelrelay/config/ca.crt\n"), data["ca.crt"].is_string(), "{yaml}");
    (relay.to_owned(), data["ca.crt"].as_str().map(str::to_owned))
}

#[tokio::test]
async fn workers_follow_relay_tls_without_new_pods() {
    let mut scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), ("dns+http://local-workers.llm.svc:8081".into(), None));
    scene.writes();
    let (certificate, key) = pair(&[HOST]);
    let (first, second) = (pair(&["ca"]).0, pair(&["ca"]).0);
    scene.certify();
    for authority in [Some(&first), Some(&second), None] {
        let mut entries = vec![("tls.crt", certificate.as_str()), ("tls.key", &key)];
        entries.extend(authority.map(|authority| ("ca.crt", authority.as_str())));
        put(&scene, &entries);
        scene.reconcile().await.unwrap();
        assert_eq!(dialled(&scene), ("dns+https://local-workers.llm.svc:8081".into(), authority.cloned()));
        assert_eq!(scene.writes(), written(&[CONFIG_MAP]), "backends were restarted");
    }
}

#[tokio::test]
async fn workers_keep_configuration_while_tls_secret_is_unusable() {
    let mut scene = Scene::new(&json!({}));
    let (certificate, key) = pair(&[HOST]);
    scene.certify();
    let plain = ("dns+http://local-workers.llm.svc:8081".to_owned(), None);
    let tls = ("dns+https://local-workers.llm.svc:8081".to_owned(), Some(certificate.clone()));
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), plain, "there is no Secret yet");
    put(&scene, &[("tls.crt", &certificate), ("tls.key", &key), ("ca.crt", &certificate)]);
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), tls);
    put(&scene, &[("tls.crt", &certificate), ("tls.key", &pair(&[HOST]).1)]);
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), tls, "relays keep the last good pair");
    // A recreated Provider finds its workers unchanged.
    scene.providers.apply_watcher_event(&watcher::Event::Delete(provider()));
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), tls);
    scene.providers.apply_watcher_event(&watcher::Event::Apply(provider()));
    scene.reconcile().await.unwrap();
    assert_eq!(dialled(&scene), plain);
}
