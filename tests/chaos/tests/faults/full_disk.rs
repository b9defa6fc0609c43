//! No space for the file of API keys: existing keys keep working, and a key that cannot be stored is not issued.

use std::{collections::BTreeSet, path::Path};

use modelrelay_chaos::{
    load::Plan,
    request::RequestSpec,
    site::{RelayNode, Site},
};
use modelrelay_harness::client::{Reply, Request};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::{BACKEND, inside};

async fn create(relay: &RelayNode, name: &str) -> Reply {
    relay.relay.admin_post("/admin/keys", &json!({"name": name})).await
}

async fn listed(relay: &RelayNode) -> BTreeSet<String> {
    let keys = relay.relay.admin_json("/admin/keys").await["keys"].clone();
    let names = keys.as_array().expect("a list of keys").iter().filter_map(|key| key["name"].as_str());
    names.map(str::to_owned).collect()
}

async fn models_status(relay: &RelayNode, key: &Value) -> u16 {
    let key = key.as_str().expect("a secret");
    relay.relay.fetch(Request::get("/v1/models").bearer(key)).await.status
}

/// Fills the rest of a small disk.
fn fill(dir: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(dir.join("filler")).expect("a file on the disk");
    while file.write_all(&[0; 512]).is_ok() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_rejects_new_keys_and_corrupts_none() {
    inside("full_disk::full_disk_rejects_new_keys_and_corrupts_none", |namespace| async move {
        let disk = namespace.dir().join("disk");
        std::fs::create_dir(&disk).expect("a folder");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&disk).status().await;
        assert!(mount.is_ok_and(|status| status.success()), "a tmpfs cannot be mounted");
        let file = disk.join("keys.json");
        let settings = |relay: modelrelay_harness::relay::RelayBuilder| {
            let relay = relay.env("MODELRELAY_REQUIRE_API_KEYS", "true");
            relay.env("API_KEYS_FILE", &file.to_string_lossy())
        };
        let mut site = Site::with_workers(BACKEND, 2, settings, |worker| worker).await;
        let first = create(&site.relays[0], "first").await.with_status(201).json()["secret"].clone();
        site.relays[0].target.wants(first.as_str().expect("a secret"));
        let load = site.load(Plan::of(8, RequestSpec::mixed)).await;

        load.ledger().fault();
        fill(&disk);
        let relay = &site.relays[0];
        for number in 0..5 {
            let refused = create(relay, &format!("refused-{number}")).await;
            assert!(refused.status >= 500, "{} {}", refused.status, refused.text());
            let message = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
            assert!(!message.is_empty(), "{}", refused.text());
            assert!(refused.json().get("secret").is_none(), "{}", refused.text());
        }
        assert_eq!(listed(relay).await, BTreeSet::from(["first".to_owned()]));
        load.ledger().answers(50).await;
        let _: Value = serde_json::from_slice(&std::fs::read(&file).expect("the file")).expect("whole JSON");

        std::fs::remove_file(disk.join("filler")).expect("removed");
        let second = create(relay, "second").await.with_status(201).json()["secret"].clone();
        load.ledger().answers(20).await;
        let summary = site.check("full disk under the API keys", load).await;
        assert_eq!(summary.failures(), 0, "{summary}");

        // No change existed only in memory.
        site.relays[0].kill().await;
        site.relays[0].restart().await;
        let relay = &site.relays[0];
        assert_eq!(listed(relay).await, BTreeSet::from(["first".to_owned(), "second".to_owned()]));
        for key in [&first, &second] {
            assert_eq!(models_status(relay, key).await, 200);
        }
    })
    .await;
}
