//! The responses of the API server.

use std::collections::VecDeque;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Map, Value, json};

use super::{Data, Fault, NAMESPACE, SECRET, State, Unanswered};

pub(super) type Answer = Response<Full<Bytes>>;

impl State {
    pub(super) fn answer(&mut self, request: &http::request::Parts, body: &[u8]) -> Result<Answer, Unanswered> {
        let presented = request.headers.get("authorization").and_then(|value| value.to_str().ok());
        if presented != Some(&format!("Bearer {}", self.token)) {
            return Ok(self.refuse(401, "Unauthorized"));
        }
        if request.uri.path() == super::tokens::PATH {
            return self.review(&request.method, body);
        }
        if request.uri.path() != format!("/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET}") {
            return Ok(self.refuse(403, "the account has no right to this path"));
        }
        let is_read = request.method == Method::GET;
        let faults: &mut VecDeque<Fault> = if is_read { &mut self.read_faults } else { &mut self.write_faults };
        match faults.pop_front() {
            None => Ok(self.obey(request, body)),
            Some(Fault::Status(status, message)) => Ok(self.refuse(status, message)),
            Some(Fault::TooManyRequests) => {
                let mut answer = self.refuse(429, "too many requests, please try again later");
                answer.headers_mut().insert("retry-after", http::HeaderValue::from_static("1"));
                Ok(answer)
            }
            Some(Fault::Drop) => {
                self.refusals += 1;
                Err(Unanswered::Dropped)
            }
            Some(Fault::DropAfterwards) => {
                self.obey(request, body);
                Err(Unanswered::Dropped)
            }
            Some(Fault::Silence) => Err(Unanswered::Silent),
        }
    }

    fn obey(&mut self, request: &http::request::Parts, body: &[u8]) -> Answer {
        let media_type = request.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        match (&request.method, media_type) {
            (&Method::GET, _) => self.read(),
            (&Method::PUT, "application/json") => self.write(body, true),
            (&Method::PATCH, "application/merge-patch+json") => self.write(body, false),
            _ => self.refuse(405, "the account may get, update and patch"),
        }
    }

    fn read(&mut self) -> Answer {
        if self.secret.is_none() {
            return self.refuse(404, &format!("secrets \"{SECRET}\" not found"));
        }
        self.reads += 1;
        let answer = self.show();
        if let Some(change) = self.after_next_read.take() {
            change(self.secret.as_mut().expect("checked above"));
            self.version += 1;
        }
        answer
    }

    fn write(&mut self, body: &[u8], replaces: bool) -> Answer {
        if self.secret.is_none() {
            return self.refuse(404, &format!("secrets \"{SECRET}\" not found"));
        }
        let Ok(wanted) = serde_json::from_slice::<Value>(body) else { return self.refuse(400, "no JSON") };
        // Like the real one: without a version, a write overwrites any present content. A test must notice that.
        let based_on = wanted["metadata"]["resourceVersion"].as_str();
        if based_on.is_some_and(|version| version != self.version.to_string()) {
            return self.refuse(409, "the object has been modified; please apply your changes to the latest version");
        }
        let Some(mut data) = decode(&wanted["data"]) else { return self.refuse(400, "illegal base64 data") };
        if !replaces {
            let kept = self.secret.clone().unwrap_or_default();
            data = kept.into_iter().chain(data).collect();
        }
        if data.values().map(Vec::len).sum::<usize>() > 1 << 20 {
            return self.refuse(422, "data: Too long: may not be more than 1048576 bytes");
        }
        self.secret = Some(data);
        self.version += 1;
        self.writes += 1;
        self.show()
    }

    fn show(&self) -> Answer {
        let data: Map<String, Value> =
            self.secret.iter().flatten().map(|(name, value)| (name.clone(), json!(STANDARD.encode(value)))).collect();
        let mut object = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": SECRET,
                "namespace": NAMESPACE,
                "resourceVersion": self.version.to_string(),
                "labels": {"modelrelay.io/provider": "local"},
            },
            "type": "Opaque",
        });
        // The real one omits an empty map.
        if !data.is_empty() {
            object["data"] = Value::Object(data);
        }
        json_answer(200, &object)
    }

    pub(super) fn refuse(&mut self, status: u16, message: &str) -> Answer {
        self.refusals += 1;
        let object =
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status});
        json_answer(status, &object)
    }
}

fn decode(data: &Value) -> Option<Data> {
    let Some(data) = data.as_object() else { return Some(Data::new()) };
    data.iter().map(|(name, value)| Some((name.clone(), STANDARD.decode(value.as_str()?).ok()?))).collect()
}

pub(super) fn json_answer(status: u16, object: &Value) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(object.to_string())));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    answer.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    answer
}
