//! The API server's address and the worker's credentials: what a Pod knows about its cluster.

use std::path::{Path, PathBuf};

use modelrelay_protocol::secret::Secret;
use url::Url;

use crate::net::Trust;
use crate::setting_error::SettingError;

/// The folder in which the kubelet mounts a Pod's ServiceAccount.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

const SETTING: &str = "multiplexer.slots";

/// An API server, a ServiceAccount, and the namespace of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    server: Url,
    account: PathBuf,
    namespace: String,
}

impl Access {
    /// `account`: a folder with a `token`, and with a `ca.crt` if the server uses TLS.
    pub fn new(server: Url, account: impl Into<PathBuf>, namespace: impl Into<String>) -> Self {
        Self { server, account: account.into(), namespace: namespace.into() }
    }

    /// Returns the access of the Pod in which this program runs.
    pub fn of_this_pod() -> Result<Self, SettingError> {
        Self::found(|name| std::env::var(name).ok().filter(|value| !value.is_empty()), Path::new(ACCOUNT))
    }

    fn found(variable: impl Fn(&str) -> Option<String>, account: &Path) -> Result<Self, SettingError> {
        let Some(host) = variable("KUBERNETES_SERVICE_HOST") else {
            return Err(SettingError::hidden(
                SETTING,
                "driver kubernetes works only in a Pod: KUBERNETES_SERVICE_HOST is not set; run the worker in \
                the cluster, or choose another driver",
            ));
        };
        // An IPv6 address has no brackets here.
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".to_owned());
        let server = format!("https://{host}:{port}");
        let server = server.parse().map_err(|error| {
            SettingError::new("KUBERNETES_SERVICE_HOST", &server, format!("an address of the API server ({error})"))
        })?;
        let mut access = Self::new(server, account, "");
        let unusable = |why: String| {
            let mend = "the Pod needs a ServiceAccount whose token is mounted (automountServiceAccountToken: true)";
            SettingError::hidden(SETTING, format!("driver kubernetes: {why}; {mend}"))
        };
        access.token().map_err(unusable)?;
        access.trust().check().map_err(|error| unusable(format!("{}: {error}", account.join("ca.crt").display())))?;
        access.namespace = access.read("namespace").map_err(unusable)?;
        Ok(access)
    }

    /// The API server.
    pub fn server(&self) -> &Url {
        &self.server
    }

    /// The namespace of all its objects.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Reads the token; called for each request, because the kubelet replaces it every hour.
    pub(super) fn token(&self) -> Result<Secret, String> {
        self.read("token").map(Secret::new)
    }

    /// Trusts only the cluster's own CA.
    pub(super) fn trust(&self) -> Trust {
        Trust::only(self.account.join("ca.crt"))
    }

    fn read(&self, name: &str) -> Result<String, String> {
        let path = self.account.join(name);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let text = text.trim();
        if text.is_empty() { Err(format!("{}: the file is empty", path.display())) } else { Ok(text.to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    fn in_cluster(name: &str) -> Option<String> {
        match name {
            "KUBERNETES_SERVICE_HOST" => Some("fd00::1".to_owned()),
            "KUBERNETES_SERVICE_PORT" => Some("6443".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn access_outside_cluster_fails_with_explanation() {
        let error = Access::found(|_| None, Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("only in a Pod") && error.contains("KUBERNETES_SERVICE_HOST"), "{error}");
    }

    #[test]
    fn pod_without_token_error_names_missing_setting() {
        for files in [&[][..], &[("token", "\n"), ("namespace", "llm")]] {
            let folder = account(files);
            let error = Access::found(in_cluster, folder.path()).unwrap_err().to_string();
            assert!(error.contains("token") && error.contains("automountServiceAccountToken"), "{error}");
        }
        let folder = account(&[("token", "t"), ("namespace", "llm"), ("ca.crt", "garbage")]);
        let error = Access::found(in_cluster, folder.path()).unwrap_err().to_string();
        assert!(error.contains("ca.crt"), "{error}");
    }

    #[test]
    fn token_is_read_again_each_time() {
        let folder = account(&[("token", "one\n")]);
        let access = Access::new("https://[fd00::1]:6443".parse().unwrap(), folder.path(), "llm");
        assert_eq!(access.token().unwrap().expose(), "one");
        std::fs::write(folder.path().join("token"), "two").unwrap();
        assert_eq!(access.token().unwrap().expose(), "two");
    }
}
