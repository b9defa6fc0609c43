//! Small commands that the chart's Jobs and tests use, because an image with kubectl may not be available.

use std::path::Path;
use std::time::{Duration, Instant};

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::{GroupVersionKind, TypeMeta};
use kube::discovery::{self, Scope};
use kube::{Client, ResourceExt};
use serde::Deserialize;

use crate::cluster::api;
use crate::crd;
use crate::settings::cli::FileArgs;

/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(500);
/// The timeout from the request of `get` to its response.
const GET_TIMEOUT: Duration = Duration::from_secs(5);
/// The field manager of objects that the chart's Jobs apply.
const FIELD_MANAGER: &str = "modelrelay-apply";

/// The reason that a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A document is not a resource.
    #[error("{path}: {source}")]
    Yaml {
        /// The file.
        path: String,
        /// The position and the error.
        source: serde_yaml::Error,
    },
    /// A document lacks a field that every resource has.
    #[error("{path}: each document needs apiVersion, kind and metadata.name")]
    NoResource {
        /// The file.
        path: String,
    },
    /// The operation did not succeed in time.
    #[error("{what}: timed out after {timeout:?}: {last}")]
    Timeout {
        /// The operation.
        what: String,
        /// The time limit.
        timeout: Duration,
        /// The result of the last attempt.
        last: String,
    },
    /// The cluster cannot be reached at all.
    #[error("failed to connect to a cluster: {0}")]
    NoCluster(#[from] kube::Error),
    /// The system lacks something that an HTTP client needs.
    #[error("failed to create an HTTP client: {0}")]
    NoHttp(#[from] reqwest::Error),
    /// Output could not be written.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// `crds`: prints the definitions or their reference, or writes the definitions.
pub fn crds(folder: Option<&Path>, reference: bool) -> Result<(), CommandError> {
    use std::io::Write;
    if reference {
        std::io::stdout().lock().write_all(crd::reference::markdown().as_bytes())?;
        return Ok(());
    }
    let Some(folder) = folder else {
        let mut out = std::io::stdout().lock();
        for (_, text) in crd::generate() {
            writeln!(out, "---\n{text}")?;
        }
        return Ok(());
    };
    let fail = |path: &Path| {
        let path = path.display().to_string();
        move |source| CommandError::File { path, source }
    };
    std::fs::create_dir_all(folder).map_err(fail(folder))?;
    for (name, text) in crd::generate() {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(fail(&path))?;
    }
    Ok(())
}

/// `apply`: applies every resource of a file.
pub async fn apply(args: &FileArgs) -> Result<(), CommandError> {
    let (client, deadline) = (api::client().await?, Instant::now() + args.timeout);
    let resources = read(&args.file)?;
    for resource in &resources {
        until(deadline, args.timeout, &describe(resource), async || {
            let api = api_of(&client, resource).await?;
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let applied = api.patch(&resource.name_any(), &params, &Patch::Apply(resource)).await;
            applied.map(drop).map_err(|error| error.to_string())
        })
        .await?;
        tracing::info!("{} applied", describe(resource));
    }
    if args.wait {
        for resource in &resources {
            let ready = async || is_ready(&client, resource).await;
            until(deadline, args.timeout, &describe(resource), ready).await?;
            tracing::info!("{} is ready", describe(resource));
        }
    }
    Ok(())
}

/// `delete`: deletes every resource of a file, the last one first, and waits until they are gone.
pub async fn delete(args: &FileArgs) -> Result<(), CommandError> {
    let (client, deadline) = (api::client().await?, Instant::now() + args.timeout);
    for resource in read(&args.file)?.iter().rev() {
        until(deadline, args.timeout, &describe(resource), async || {
            let api = match api_of(&client, resource).await {
                Ok(api) => api,
                // If the kind does not exist, neither does the object.
                Err(error) if error.contains("404") => return Ok(()),
                Err(error) => return Err(error),
            };
            match api.delete(&resource.name_any(), &DeleteParams::background()).await {
                Ok(_) => Err("still being deleted".to_owned()),
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
        .await?;
        tracing::info!("{} deleted", describe(resource));
    }
    Ok(())
}

/// `get`: succeeds with the first 2xx response.
pub async fn get(url: &str, timeout: Duration) -> Result<(), CommandError> {
    // Addresses in the cluster: a proxy does not reach them.
    let client = reqwest::Client::builder().timeout(GET_TIMEOUT).no_proxy().build()?;
    until(Instant::now() + timeout, timeout, url, async || {
        let answer = client.get(url).send().await.map_err(|error| error.to_string())?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(status.to_string()) }
    })
    .await
}

async fn is_ready(client: &Client, resource: &DynamicObject) -> Result<(), String> {
    let api = api_of(client, resource).await?;
    let object = api.get(&resource.name_any()).await.map_err(|error| error.to_string())?;
    let Some(conditions) = object.data.pointer("/status/conditions").and_then(|list| list.as_array()) else {
        // ModelRelay's kinds have conditions as soon as they have been reconciled once.
        let ours = object.types.as_ref().is_some_and(|types| types.api_version.starts_with(crd::GROUP));
        return if ours { Err("not reconciled yet".to_owned()) } else { Ok(()) };
    };
    let Some(ready) = conditions.iter().find(|condition| condition["type"] == "Ready") else { return Ok(()) };
    if ready["status"] == "True"
        && object.data.pointer("/status/observedGeneration") == Some(&object.metadata.generation.into())
    {
        return Ok(());
    }
    Err(format!("{}: {}", ready["reason"].as_str().unwrap_or_default(), ready["message"].as_str().unwrap_or_default()))
}

#[allow(clippy::wildcard_enum_match_arm, reason = "a foreign enum, of which two matter")]
async fn api_of(client: &Client, resource: &DynamicObject) -> Result<Api<DynamicObject>, String> {
    let types = resource.types.clone().unwrap_or_default();
    let gvk = GroupVersionKind::try_from(&types).map_err(|error| error.to_string())?;
    let (kind, capabilities) = discovery::pinned_kind(client, &gvk).await.map_err(|error| match &error {
        kube::Error::Api(status) => format!("{}: {}", status.code, status.message),
        // A kind that discovery does not list does not exist.
        kube::Error::Discovery(missing) => format!("404: {missing}"),
        _ => error.to_string(),
    })?;
    let namespace = resource.namespace().unwrap_or_else(|| client.default_namespace().to_owned());
    Ok(match capabilities.scope {
        Scope::Cluster => Api::all_with(client.clone(), &kind),
        Scope::Namespaced => Api::namespaced_with(client.clone(), &namespace, &kind),
    })
}

fn read(path: &Path) -> Result<Vec<DynamicObject>, CommandError> {
    let shown = || path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| CommandError::File { path: shown(), source })?;
    let mut resources = Vec::new();
    for document in serde_yaml::Deserializer::from_str(&text) {
        let object: Option<DynamicObject> =
            Option::deserialize(document).map_err(|source| CommandError::Yaml { path: shown(), source })?;
        let Some(object) = object else { continue };
        if object.types.is_none() || object.metadata.name.is_none() {
            return Err(CommandError::NoResource { path: shown() });
        }
        resources.push(object);
    }
    Ok(resources)
}

fn describe(resource: &DynamicObject) -> String {
    let TypeMeta { kind, .. } = resource.types.clone().unwrap_or_default();
    format!("{kind} {}", resource.name_any())
}

/// Retries until `attempt` succeeds or the deadline passes; then returns the last error.
async fn until(
    deadline: Instant,
    timeout: Duration,
    what: &str,
    attempt: impl AsyncFn() -> Result<(), String>,
) -> Result<(), CommandError> {
    let mut reported = String::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
        let silence = |_| Err("no response".to_owned());
        let Err(last) = tokio::time::timeout(left, attempt()).await.unwrap_or_else(silence) else { return Ok(()) };
        if Instant::now() + PAUSE > deadline {
            return Err(CommandError::Timeout { what: what.to_owned(), timeout, last });
        }
        if last != reported {
            tracing::info!("{what}: {last}; retrying");
            reported = last;
        }
        tokio::time::sleep(PAUSE).await;
    }
}
