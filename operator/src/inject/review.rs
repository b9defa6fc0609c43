//! The API server's question and the answer to it, `admission.k8s.io/v1`.

use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};

use super::decide::Decision;

/// The one version that the webhook's configuration names.
const VERSION: &str = "admission.k8s.io/v1";

/// A question about one object.
#[derive(Clone, Debug)]
pub struct Review {
    uid: String,
    request: Map<String, Value>,
}

/// Why a body is no question.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// It is something else.
    #[error("the body is not JSON: {0}")]
    NotJson(serde_json::Error),
    /// It is JSON of something else.
    #[error("the body is not an AdmissionReview of {VERSION}")]
    OtherKind,
    /// It asks nothing.
    #[error("the AdmissionReview has no request with a uid")]
    NoRequest,
}

impl Review {
    /// Reads a question.
    pub fn parse(body: &[u8]) -> Result<Self, ReviewError> {
        let mut review: Value = serde_json::from_slice(body).map_err(ReviewError::NotJson)?;
        let text = |key: &str| review.get(key).and_then(Value::as_str);
        if (text("apiVersion"), text("kind")) != (Some(VERSION), Some("AdmissionReview")) {
            return Err(ReviewError::OtherKind);
        }
        let Some(Value::Object(request)) = review.get_mut("request").map(Value::take) else {
            return Err(ReviewError::NoRequest);
        };
        let uid = request.get("uid").and_then(Value::as_str).filter(|uid| !uid.is_empty());
        let uid = uid.ok_or(ReviewError::NoRequest)?.to_owned();
        Ok(Self { uid, request })
    }

    /// The Pod, if the question is about the creation of one.
    pub fn created_pod(&self) -> Option<&Value> {
        let resource = |key: &str| self.request.get("resource")?.get(key)?.as_str();
        let created = self.text("operation") == "CREATE" && self.text("subResource").is_empty();
        let pods = resource("group") == Some("") && resource("resource") == Some("pods");
        self.request.get("object").filter(|object| created && pods && object.is_object())
    }

    /// Its namespace; the object itself need not say it.
    pub fn namespace(&self) -> &str {
        self.text("namespace")
    }

    /// Its name, or what the name will begin with.
    pub fn name(&self) -> &str {
        let metadata = |key: &str| self.request.get("object")?.get("metadata")?.get(key)?.as_str();
        let names = [Some(self.text("name")), metadata("name"), metadata("generateName")];
        names.into_iter().flatten().find(|name| !name.is_empty()).unwrap_or_default()
    }

    /// The answer.
    pub fn answer(&self, decision: &Decision) -> Value {
        let mut response = json!({"uid": self.uid, "allowed": true});
        let (changed, warnings) = match decision {
            Decision::Unchanged(_) => (None, Vec::new()),
            Decision::Injected { pod, warnings } => (Some(pod), warnings.clone()),
            Decision::Gated { pod, message } => (Some(pod), vec![message.clone()]),
            Decision::Refused(message) => {
                response["allowed"] = false.into();
                response["status"] = json!({"code": 403, "reason": "Forbidden", "message": message});
                (None, Vec::new())
            }
        };
        if let (Some(changed), Some(object)) = (changed, self.request.get("object")) {
            let patch = json_patch::diff(object, changed);
            response["patchType"] = "JSONPatch".into();
            // A list of operations on text keys has no way to fail.
            response["patch"] = json!(ByteString(serde_json::to_vec(&patch).unwrap_or_default()));
        }
        if !warnings.is_empty() {
            response["warnings"] = json!(warnings);
        }
        json!({"apiVersion": VERSION, "kind": "AdmissionReview", "response": response})
    }

    fn text(&self, key: &str) -> &str {
        self.request.get(key).and_then(Value::as_str).unwrap_or_default()
    }
}
