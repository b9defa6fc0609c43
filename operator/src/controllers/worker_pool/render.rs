//! Decides which Pod template a pool's workload gets: a newly rendered one, or the existing one.
//!
//! A new operator renders the worker differently, at least with its own release's image, and a changed Pod template
//! restarts every backend, each of which may take minutes to load its model. A template is therefore rendered again
//! only when the pool requests it: by its spec, or by another value of the annotation `modelrelay.io/upgrade`.
//!
//! The workload therefore carries, in [an annotation](crate::manifests::backend::RENDERED_ANNOTATION), the inputs of
//! its template and the additions to the user's part, as a JSON patch. While neither spec nor annotation change, the
//! user's part is the same, and the patch applied to it yields the same template, byte for byte, whichever operator
//! applies it. External changes to the template are still reverted.
//!
//! "The same spec" is determined in two ways, because either alone would restart backends for nothing. The generation
//! does not change when a newer schema adds a field with a default, but does with every change of `replicas`. A hash of
//! the template's inputs behaves the other way around. Each reconciliation writes both as this operator sees them.

use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::crd::WorkerPool;
use crate::manifests::backend;
use crate::manifests::sidecar::{self, Note, Refusal, SidecarInputs};
use crate::resources::names;
use crate::settings::defaults::WorkerDefaults;
use crate::spec::workload::Workload;

/// Fields that the template does not depend on: they are in worker.yaml, which workers reload, or set the number of
/// Pods.
const ELSEWHERE: [&str; 5] = ["maxConcurrency", "models", "replicas", "scaling", "standalone"];

/// The current workload.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// [`backend::RENDERED_ANNOTATION`].
    pub rendered: Option<String>,
    /// Its Pod template.
    pub template: Value,
}

/// The template to apply.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    /// `{metadata, spec}`.
    pub template: Value,
    /// The annotation to write with it.
    pub annotation: String,
    /// True if it was rendered now; otherwise it is the existing one.
    pub is_new: bool,
    /// True if it differs from the one that would be rendered now.
    pub outdated: bool,
    /// Notes for the user about a template that was rendered now.
    pub notes: Vec<Note>,
}

/// The content of the annotation.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uid: String,
    generation: i64,
    spec: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    upgrade: Option<String>,
    added: json_patch::Patch,
}

/// Returns the template to apply. `spare_token` becomes the drain token if there is none yet.
pub fn render(
    workload: Workload,
    pool: &WorkerPool,
    defaults: &WorkerDefaults,
    live: &Live,
    spare_token: &str,
) -> Result<Rendered, Refusal> {
    let drain_token = sidecar::drain_token_of(&live.template).unwrap_or(spare_token);
    let fresh = backend::template(workload, &SidecarInputs { pool, defaults, drain_token });
    let given = backend::given(pool);
    if let Some((template, added)) = kept(pool, &given, live) {
        // A template that this version would reject still runs.
        let outdated = fresh.map_or(true, |(fresh, _)| fresh != template);
        return Ok(Rendered {
            template,
            annotation: annotation(pool, added),
            is_new: false,
            outdated,
            notes: Vec::new(),
        });
    }
    let (template, notes) = fresh?;
    let added = json_patch::diff(&given, &template);
    Ok(Rendered { template, annotation: annotation(pool, added), is_new: true, outdated: false, notes })
}

/// Returns the existing template, if it still matches the pool.
fn kept(pool: &WorkerPool, given: &Value, live: &Live) -> Option<(Value, json_patch::Patch)> {
    let record: Record = serde_json::from_str(live.rendered.as_deref()?).ok()?;
    let same_generation =
        pool.metadata.generation == Some(record.generation) && pool.metadata.uid.as_deref() == Some(&record.uid);
    if record.upgrade.as_deref() != upgrade(pool) || !(same_generation || record.spec == fingerprint(pool)) {
        return None;
    }
    let mut template = given.clone();
    json_patch::patch(&mut template, &record.added).ok()?;
    Some((template, record.added))
}

fn annotation(pool: &WorkerPool, added: json_patch::Patch) -> String {
    let record = Record {
        uid: pool.uid().unwrap_or_default(),
        generation: pool.metadata.generation.unwrap_or_default(),
        spec: fingerprint(pool),
        upgrade: upgrade(pool).map(str::to_owned),
        added,
    };
    serde_json::to_string(&record).unwrap_or_default()
}

fn upgrade(pool: &WorkerPool) -> Option<&str> {
    pool.annotations().get(names::UPGRADE_ANNOTATION).map(String::as_str)
}

/// Returns the hash of the template's inputs.
fn fingerprint(pool: &WorkerPool) -> String {
    let mut spec = serde_json::to_value(&pool.spec).unwrap_or_default();
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|field, _| !ELSEWHERE.contains(&field.as_str()));
        // Of a multiplexer, the template depends only on the parts that a running worker cannot reload.
        if let Some(multiplexer) = pool.spec.slots() {
            spec.insert("multiplexer".to_owned(), serde_json::to_value(multiplexer.fixed()).unwrap_or_default());
        }
    }
    let digest = Sha256::digest(spec.to_string());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::manifests::testing;

    fn spec() -> Value {
        json!({
            "provider": "local", "backend": {"engine": "vllm"}, "replicas": 2,
            "template": {"spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}]}},
        })
    }

    fn pool(generation: i64, change: &Value) -> WorkerPool {
        let mut spec = spec();
        json_patch::merge(&mut spec, change);
        let mut pool = testing::pool(&spec);
        pool.metadata.generation = Some(generation);
        pool
    }

    fn release(version: &str) -> WorkerDefaults {
        WorkerDefaults { image: format!("worker:{version}"), ..WorkerDefaults::default() }
    }

    fn rendered(pool: &WorkerPool, version: &str, live: &Live) -> Rendered {
        render(Workload::Backend, pool, &release(version), live, "spare").unwrap()
    }

    /// Returns the workload after the template was applied.
    fn applied(rendered: &Rendered) -> Live {
        Live { rendered: Some(rendered.annotation.clone()), template: rendered.template.clone() }
    }

    fn image(rendered: &Rendered) -> &str {
        sidecar::worker(&rendered.template).unwrap()["image"].as_str().unwrap()
    }

    #[test]
    fn other_operator_with_same_spec_renders_same_bytes() {
        let pool = pool(1, &json!({}));
        let first = rendered(&pool, "1", &Live::default());
        assert!(first.is_new && !first.outdated);
        let second = rendered(&pool, "2", &applied(&first));
        assert_eq!(
            (second.template.to_string(), second.is_new, second.outdated),
            (first.template.to_string(), false, true)
        );
        assert_eq!(second.annotation, first.annotation);
        assert!(!rendered(&pool, "1", &applied(&second)).outdated);
    }

    #[test]
    fn scaling_after_operator_upgrade_restarts_nothing() {
        let first = rendered(&pool(1, &json!({})), "1", &Live::default());
        let scaled = pool(2, &json!({"replicas": 7, "models": ["a"], "maxConcurrency": 3}));
        let second = rendered(&scaled, "2", &applied(&first));
        assert_eq!((&second.template, second.is_new), (&first.template, false));
        // Nor does the next such change.
        let third = rendered(&pool(3, &json!({"replicas": 8})), "2", &applied(&second));
        assert_eq!(third.template, first.template);
    }

    #[test]
    fn only_unreloadable_multiplexer_changes_create_new_pods() {
        let with = |generation: i64, change: &Value| {
            let model = json!({"id": "a", "url": "http://127.0.0.1:8000", "maxConcurrency": 4});
            let mut slot = json!({"id": "gpu0", "driver": "static", "models": [model]});
            let mut block = json!({"multiplexer": {"linger": "auto"}, "backend": null});
            json_patch::merge(&mut slot, &change["slot"]);
            json_patch::merge(&mut slot["models"][0], &change["model"]);
            json_patch::merge(&mut block["multiplexer"], &change["block"]);
            block["multiplexer"]["slots"] = json!([slot]);
            pool(generation, &block)
        };
        let nothing = json!({"slot": {}, "model": {}, "block": {}});
        let first = rendered(&with(1, &nothing), "1", &Live::default());
        let second = |part: &str, change: Value| {
            let mut full = nothing.clone();
            full[part] = change;
            // By a new operator with another worker image.
            rendered(&with(2, &full), "2", &applied(&first))
        };
        for (part, change) in [
            ("block", json!({"linger": "off", "maxWait": "2m"})),
            ("slot", json!({"memory": "24Gi", "default": "a"})),
            ("model", json!({"maxConcurrency": 8, "pin": true, "idleTtl": "1h", "aliases": ["b"]})),
        ] {
            assert_eq!(second(part, change.clone()).template, first.template, "{change}");
        }
        for (part, change) in [
            ("slot", json!({"devices": ["1"]})),
            ("model", json!({"url": "http://127.0.0.1:8000/other"})),
            ("model", json!({"id": "b"})),
        ] {
            let second = second(part, change.clone());
            assert!(second.is_new, "{change}");
            let hash = |of: &Rendered| of.template["metadata"]["annotations"][names::SLOTS_HASH_ANNOTATION].clone();
            assert_ne!(hash(&second), hash(&first), "{change}: the hash distinguishes running Pods from new ones");
        }
    }

    #[test]
    fn schema_with_new_default_restarts_nothing() {
        let pool = pool(1, &json!({}));
        let first = rendered(&pool, "1", &Live::default());
        let by_other_types = first.annotation.replace(&fingerprint(&pool), "0123456789abcdef");
        assert_ne!(by_other_types, first.annotation);
        let live = Live { rendered: Some(by_other_types), template: first.template.clone() };
        let second = rendered(&pool, "2", &live);
        assert_eq!((&second.template, &second.annotation), (&first.template, &first.annotation));
    }

    #[test]
    fn changed_spec_is_rerendered_with_same_drain_token() {
        let first = rendered(&pool(1, &json!({})), "1", &Live::default());
        let changed = pool(2, &json!({"shutdownTimeout": "5m"}));
        let second = render(Workload::Backend, &changed, &release("2"), &applied(&first), "other").unwrap();
        assert!(second.is_new);
        assert_eq!(image(&second), "worker:2");
        assert_eq!(sidecar::drain_token_of(&second.template), Some("spare"));
    }

    #[test]
    fn changed_backend_location_creates_new_pods() {
        let before = |change: Value| rendered(&pool(1, &change), "1", &Live::default());
        // The container is named, so the port affects nothing else in the template.
        let first = before(json!({"backend": {"container": "vllm"}}));
        for change in [json!({"port": 9000}), json!({"basePath": "/v2"}), json!({"engine": "sglang", "port": 8000})] {
            let mut backend = json!({"backend": {"container": "vllm"}});
            json_patch::merge(&mut backend["backend"], &change);
            let second = rendered(&pool(2, &backend), "1", &applied(&first));
            assert_ne!(second.template, first.template, "{change}");
        }
    }

    #[test]
    fn upgrade_annotation_rerenders_once() {
        let mut pool = pool(1, &json!({}));
        let first = rendered(&pool, "1", &Live::default());
        pool.annotations_mut().insert(names::UPGRADE_ANNOTATION.to_owned(), "now".to_owned());
        let second = rendered(&pool, "2", &applied(&first));
        assert_eq!((image(&second), second.is_new), ("worker:2", true));
        let third = rendered(&pool, "3", &applied(&second));
        assert_eq!((image(&third), third.is_new, third.outdated), ("worker:2", false, true));
    }

    #[test]
    fn externally_changed_template_is_restored_without_upgrade() {
        let pool = pool(1, &json!({}));
        let first = rendered(&pool, "1", &Live::default());
        let mut live = applied(&first);
        live.template["spec"]["containers"][0]["image"] = json!("theirs");
        assert_eq!(rendered(&pool, "2", &live).template, first.template);
    }

    #[test]
    fn corrupted_record_is_rendered_again() {
        let pool = pool(1, &json!({}));
        let first = rendered(&pool, "1", &Live::default());
        for spoilt in ["", "{}", "[1]", &first.annotation.replace("/spec/volumes", "/no/such/place")] {
            let live = Live { rendered: Some(spoilt.to_owned()), template: first.template.clone() };
            let second = rendered(&pool, "1", &live);
            assert_eq!((second.template, second.is_new), (first.template.clone(), true), "{spoilt}");
        }
    }

    #[test]
    fn recreated_pool_does_not_inherit_by_generation() {
        let first = rendered(&pool(1, &json!({})), "1", &Live::default());
        let mut successor = pool(1, &json!({"sidecar": {"port": 18000}}));
        successor.metadata.uid = Some("another".to_owned());
        assert!(rendered(&successor, "1", &applied(&first)).is_new);
    }

    #[test]
    fn template_accepted_by_older_operator_still_runs() {
        let pool = pool(1, &json!({"sidecar": {"port": 8000}}));
        assert!(render(Workload::Backend, &pool, &release("1"), &Live::default(), "t").is_err());
        let added = json_patch::diff(&backend::given(&pool), &json!({"metadata": {}, "spec": {"old": true}}));
        let live = Live { rendered: Some(annotation(&pool, added)), template: json!({}) };
        let kept = render(Workload::Backend, &pool, &release("1"), &live, "t").unwrap();
        assert_eq!((kept.template["spec"].clone(), kept.outdated), (json!({"old": true}), true));
    }

    /// If this changes with a release, a pool that is scaled while the operator is being upgraded restarts its
    /// backends: new fields must have no default that is serialized.
    #[test]
    fn spec_fingerprint_is_stable_across_releases() {
        assert_eq!(fingerprint(&pool(1, &json!({}))), "bb5fff7542bd2702");
    }
}
