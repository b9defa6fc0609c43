//! An in-memory API server with the features that the controller uses: it stores applied objects, and rejects requests
//! as the test defines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kube::Client;
use serde_json::{Value, json};

use crate::cluster::testing;

type Refusal = Box<dyn Fn(&str, &str) -> Option<u16> + Send>;

/// The stored objects and the received writes.
#[derive(Default)]
pub(super) struct State {
    /// Objects by path.
    pub(super) objects: BTreeMap<String, Value>,
    /// `PATCH services/local` and so on, in order; reads are omitted.
    pub(super) writes: Vec<String>,
    /// The reasons of published Events, in order.
    events: Vec<String>,
    /// Returns the status code for a method and a path, if it is not the usual one.
    pub(super) refuse: Option<Refusal>,
    version: u64,
}

/// A handle on the server.
#[derive(Clone, Default)]
pub(super) struct FakeApi(pub(super) Arc<Mutex<State>>);

impl FakeApi {
    /// Returns a client of the server. It lives as long as the test's runtime.
    pub(super) fn client(&self) -> Client {
        let api = self.clone();
        testing::client("llm", move |method, path, body| api.answer(method, path, body))
    }

    pub(super) fn refuse(&self, refuse: impl Fn(&str, &str) -> Option<u16> + Send + 'static) {
        self.0.lock().unwrap().refuse = Some(Box::new(refuse));
    }

    pub(super) fn take_writes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().writes)
    }

    pub(super) fn events(&self) -> Vec<String> {
        self.0.lock().unwrap().events.clone()
    }

    /// Returns an object by the end of its path, such as `secrets/local-worker`.
    pub(super) fn object(&self, end: &str) -> Option<Value> {
        let state = self.0.lock().unwrap();
        let end = format!("/{end}");
        state.objects.iter().find(|(path, _)| path.ends_with(&end)).map(|(_, object)| object.clone())
    }

    pub(super) fn put(&self, path: &str, object: Value) {
        self.0.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    pub(super) fn annotate(&self, path: &str, annotation: &str, value: &str) {
        let mut state = self.0.lock().unwrap();
        state.objects.get_mut(path).unwrap()["metadata"]["annotations"][annotation] = json!(value);
    }

    fn answer(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let mut state = self.0.lock().unwrap();
        if method != "GET" && !path.contains("/events") {
            let short = path.rsplit("/llm/").next().unwrap_or(path);
            state.writes.push(format!("{method} {short}"));
        }
        if method == "POST" && path.contains("/events") {
            state.events.extend(body["reason"].as_str().map(str::to_owned));
        }
        if let Some(code) = state.refuse.as_ref().and_then(|refuse| refuse(method, path)) {
            return (code, status(code, "a test says so"));
        }
        match method {
            "GET" => found(state.objects.get(path).cloned()),
            "DELETE" => found(state.objects.remove(path)),
            "PATCH" => (200, state.patch(path, body)),
            _ => (201, body),
        }
    }
}

impl State {
    fn patch(&mut self, path: &str, body: Value) -> Value {
        let Some(parent) = path.strip_suffix("/status") else {
            self.version += 1;
            let is_applied = body.get("kind").is_some();
            let mut object = body;
            // A merge patch, of an object that a test may not have stored.
            if let Some(before) = self.objects.get(path).filter(|_| !is_applied) {
                let mut merged = before.clone();
                json_patch::merge(&mut merged, &object);
                object = merged;
            }
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            if path.contains("/pods/") {
                object["metadata"]["name"] = json!("pod");
            }
            self.objects.insert(path.to_owned(), object.clone());
            return object;
        };
        // As the controller reads it back, with the required fields of the spec.
        self.objects.insert(format!("{parent}/status"), body["status"].clone());
        json!({
            "apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": body["metadata"], "spec": {},
            "status": body["status"],
        })
    }
}

fn found(object: Option<Value>) -> (u16, Value) {
    object.map_or_else(|| (404, status(404, "not found")), |object| (200, object))
}

fn status(code: u16, message: &str) -> Value {
    let reason = if code == 404 { "NotFound" } else { "Test" };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": reason})
}
