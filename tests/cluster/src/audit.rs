//! Requests of the cluster's ServiceAccounts in the API server's audit log, and those that were denied.

use std::collections::HashSet;
use std::fs;

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, ResourceExt};
use serde_json::Value;

use crate::Cluster;

/// One finished request of a ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditedRequest {
    /// The user name, `system:serviceaccount:NAMESPACE:NAME`.
    pub user: String,
    /// `get`, `watch`, `patch` and so on.
    pub verb: String,
    /// `pods`, `providers/status`; empty if the request is about no resource.
    pub resource: String,
    /// The path.
    pub uri: String,
    /// True if the account lacked the rights.
    pub refused: bool,
    /// The API server's message and its time; empty on success.
    pub reason: String,
}

impl Cluster {
    /// Returns the requests that were always denied to the ServiceAccounts of a namespace so far: account, verb, path,
    /// time and reason. Shows whether a program's rights suffice.
    #[must_use]
    pub fn refusals(&self, namespace: &str) -> Vec<String> {
        let requests = self.audited(&format!("\"system:serviceaccount:{namespace}:"));
        let describe =
            |AuditedRequest { user, verb, uri, reason, .. }: &AuditedRequest| format!("{user} {verb} {uri}: {reason}");
        lacking(&requests).into_iter().map(describe).collect()
    }

    /// Returns all requests of a ServiceAccount so far. Only the current account is included: an earlier one of the
    /// same name may have lost its rights before its Pods ended, as when a release is uninstalled.
    ///
    /// # Panics
    /// If the account does not exist.
    pub async fn requests_by(&self, namespace: &str, name: &str) -> Vec<AuditedRequest> {
        let account = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace).get(name).await;
        let account = account.unwrap_or_else(|error| panic!("no ServiceAccount {name} in {namespace}: {error}"));
        self.audited(&account.uid().expect("objects have a uid"))
    }

    /// Returns the records that contain `mark`, which avoids parsing the rest.
    fn audited(&self, mark: &str) -> Vec<AuditedRequest> {
        let log = fs::read_to_string(self.dir.join("logs/audit.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(mark)).filter_map(parse_record).collect()
    }
}

/// Returns the requests that were denied every time. Others were denied only temporarily: an API server that has just
/// started knows no rights yet, and a program that is being uninstalled may lose them before it ends.
#[must_use]
pub fn lacking(requests: &[AuditedRequest]) -> Vec<&AuditedRequest> {
    fn subject(it: &AuditedRequest) -> (&str, &str, &str) {
        (&it.user, &it.verb, it.uri.split('?').next().unwrap_or_default())
    }
    let allowed: HashSet<_> = requests.iter().filter(|it| !it.refused).map(subject).collect();
    requests.iter().filter(|it| it.refused && !allowed.contains(&subject(it))).collect()
}

fn parse_record(record: &str) -> Option<AuditedRequest> {
    let record: Value = serde_json::from_str(record).ok()?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &record["objectRef"];
    let mut resource = text(&object["resource"]);
    if let Some(part) = object["subresource"].as_str() {
        resource = format!("{resource}/{part}");
    }
    let status = &record["responseStatus"];
    // Nothing can be created in a namespace that is being deleted, which has the same status code.
    let why = text(&status["message"]);
    let ending = why.contains("because it is being terminated");
    let at = text(&record["requestReceivedTimestamp"]);
    Some(AuditedRequest {
        user: text(&record["user"]["username"]),
        verb: text(&record["verb"]),
        resource,
        uri: text(&record["requestURI"]),
        refused: status["code"] == 403 && !ending,
        reason: if why.is_empty() { why } else { format!("{at} {why}") },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(code: u16, message: &str) -> String {
        json!({
            "user": {"username": "system:serviceaccount:mr-system:operator"}, "verb": "patch",
            "requestURI": "/apis/modelrelay.io/v1alpha1/namespaces/a/providers/local/status",
            "objectRef": {"resource": "providers", "subresource": "status", "namespace": "a", "name": "local"},
            "responseStatus": {"code": code, "message": message},
        })
        .to_string()
    }

    #[test]
    fn refusal_is_distinguished_from_other_records() {
        let refused = parse_record(&record(403, "providers is forbidden")).expect("a record");
        assert!(refused.refused, "{refused:?}");
        assert_eq!((refused.verb.as_str(), refused.resource.as_str()), ("patch", "providers/status"));
        assert!(!parse_record(&record(200, "")).expect("a record").refused);
        assert_eq!(parse_record("not JSON"), None);
    }

    #[test]
    fn refused_request_allowed_later_is_not_lacking() {
        let refused = parse_record(&record(403, "providers is forbidden")).expect("a record");
        let allowed = parse_record(&record(200, "")).expect("a record");
        assert_eq!(lacking(std::slice::from_ref(&refused)), [&refused]);
        assert!(lacking(&[refused.clone(), allowed]).is_empty());
        let another = AuditedRequest { uri: refused.uri.replace("local", "other"), refused: false, ..refused.clone() };
        assert_eq!(lacking(&[refused.clone(), another]), [&refused]);
    }

    #[test]
    fn refusal_by_terminating_namespace_is_ignored() {
        let why = "unable to create new content in namespace a because it is being terminated";
        assert!(!parse_record(&record(403, why)).expect("a record").refused);
    }
}
