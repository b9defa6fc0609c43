//! What the API server's audit log says of the cluster's ServiceAccounts: what was asked, and what was refused.

use std::collections::HashSet;
use std::fs;

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, ResourceExt};
use serde_json::Value;

use crate::Cluster;

/// One finished request of a ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Its user name, `system:serviceaccount:NAMESPACE:NAME`.
    pub user: String,
    /// `get`, `watch`, `patch` and so on.
    pub verb: String,
    /// `pods`, `providers/status`; empty where nothing of a kind was asked for.
    pub resource: String,
    /// The path.
    pub uri: String,
    /// Whether its rights did not suffice.
    pub refused: bool,
    /// What the API server said of it, and when; nothing where it went well.
    pub said: String,
}

impl Cluster {
    /// What the ServiceAccounts of one namespace were refused so far, and never allowed: who, verb, what, when and why. For
    /// telling whether a program's rights suffice.
    #[must_use]
    pub fn refusals(&self, namespace: &str) -> Vec<String> {
        let asked = self.audited(&format!("\"system:serviceaccount:{namespace}:"));
        let told = |Asked { user, verb, uri, said, .. }: &Asked| format!("{user} {verb} {uri}: {said}");
        lacking(&asked).into_iter().map(told).collect()
    }

    /// Everything that a ServiceAccount asked for so far. Of the one that is there now: an earlier one of that name may
    /// have lost its rights before its Pods ended, as when a release was uninstalled.
    ///
    /// # Panics
    /// When there is none.
    pub async fn asked_by(&self, namespace: &str, name: &str) -> Vec<Asked> {
        let account = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace).get(name).await;
        let account = account.unwrap_or_else(|error| panic!("no ServiceAccount {name} in {namespace}: {error}"));
        self.audited(&account.uid().expect("objects have a uid"))
    }

    /// Records that contain `mark`, which spares parsing the rest.
    fn audited(&self, mark: &str) -> Vec<Asked> {
        let log = fs::read_to_string(self.dir.join("logs/audit.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(mark)).filter_map(asked).collect()
    }
}

/// Requests that were refused whenever they were made. Others were refused at a time only: an API server that has just
/// started knows no rights yet, and a program that is being uninstalled may lose them before it ends.
#[must_use]
pub fn lacking(asked: &[Asked]) -> Vec<&Asked> {
    fn what(it: &Asked) -> (&str, &str, &str) {
        (&it.user, &it.verb, it.uri.split('?').next().unwrap_or_default())
    }
    let allowed: HashSet<_> = asked.iter().filter(|it| !it.refused).map(what).collect();
    asked.iter().filter(|it| it.refused && !allowed.contains(&what(it))).collect()
}

fn asked(record: &str) -> Option<Asked> {
    let record: Value = serde_json::from_str(record).ok()?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &record["objectRef"];
    let mut resource = text(&object["resource"]);
    if let Some(part) = object["subresource"].as_str() {
        resource = format!("{resource}/{part}");
    }
    let status = &record["responseStatus"];
    // Nothing can be created where everything is being deleted, and that is told by the same number.
    let why = text(&status["message"]);
    let ending = why.contains("because it is being terminated");
    let at = text(&record["requestReceivedTimestamp"]);
    Some(Asked {
        user: text(&record["user"]["username"]),
        verb: text(&record["verb"]),
        resource,
        uri: text(&record["requestURI"]),
        refused: status["code"] == 403 && !ending,
        said: if why.is_empty() { why } else { format!("{at} {why}") },
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
    fn a_refusal_is_told_from_other_records() {
        let refused = asked(&record(403, "providers is forbidden")).expect("a record");
        assert!(refused.refused, "{refused:?}");
        assert_eq!((refused.verb.as_str(), refused.resource.as_str()), ("patch", "providers/status"));
        assert!(!asked(&record(200, "")).expect("a record").refused);
        assert_eq!(asked("not JSON"), None);
    }

    #[test]
    fn what_was_allowed_once_is_no_lack() {
        let refused = asked(&record(403, "providers is forbidden")).expect("a record");
        let allowed = asked(&record(200, "")).expect("a record");
        assert_eq!(lacking(std::slice::from_ref(&refused)), [&refused]);
        assert!(lacking(&[refused.clone(), allowed]).is_empty());
        let another = Asked { uri: refused.uri.replace("local", "other"), refused: false, ..refused.clone() };
        assert_eq!(lacking(&[refused.clone(), another]), [&refused]);
    }

    #[test]
    fn a_namespace_that_ends_refuses_nobody() {
        let why = "unable to create new content in namespace a because it is being terminated";
        assert!(!asked(&record(403, why)).expect("a record").refused);
    }
}
