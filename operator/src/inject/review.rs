//! The API server's review and the response to it, `admission.k8s.io/v1`.

use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};

use super::decide::Decision;

/// The one version that the webhook's configuration lists.
const VERSION: &str = "admission.k8s.io/v1";

/// A review of one object.
#[derive(Clone, Debug)]
pub struct Review {
    uid: String,
    request: Map<String, Value>,
}

/// The reason that a body is not a review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not JSON.
    #[error("body is not valid JSON: {0}")]
    NotJson(serde_json::Error),
    /// The body is JSON of another kind.
    #[error("body is not an AdmissionReview of {VERSION}")]
    OtherKind,
    /// The review contains no request.
    #[error("AdmissionReview has no request with a uid")]
    NoRequest,
}

impl Review {
    /// Parses a review.
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

    /// Returns the Pod, if the review is about the creation of one.
    pub fn created_pod(&self) -> Option<&Value> {
        let resource = |key: &str| self.request.get("resource")?.get(key)?.as_str();
        let created = self.text("operation") == "CREATE" && self.text("subResource").is_empty();
        let pods = resource("group") == Some("") && resource("resource") == Some("pods");
        self.request.get("object").filter(|object| created && pods && object.is_object())
    }

    /// Returns the Pod's namespace, which the object itself may omit.
    pub fn namespace(&self) -> &str {
        self.text("namespace")
    }

    /// Returns the Pod's name, or its prefix if the name is generated.
    pub fn name(&self) -> &str {
        let metadata = |key: &str| self.request.get("object")?.get("metadata")?.get(key)?.as_str();
        let names = [Some(self.text("name")), metadata("name"), metadata("generateName")];
        names.into_iter().flatten().find(|name| !name.is_empty()).unwrap_or_default()
    }

    /// Returns the response.
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
            // Serializing a list of operations with text keys cannot fail.
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
