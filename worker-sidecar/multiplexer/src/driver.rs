//! Loads, unloads and probes backends. Each slot has one driver, each kind of backend has its own, and the table of
//! tests in `tests/backends` applies to all of them.
//!
//! Rules for every driver:
//! - A call is a future, and dropping it abandons the call. Processes that the call started end with it; an action that
//!   was already sent to a foreign server may continue until [`Driver::force_evict`] has returned, which is the
//!   machine's next call, see [`sequence`].
//! - Calls are idempotent: loading a loaded model and unloading a model that is gone succeed.
//! - A model is loaded only when it is ready *and* the backend reports that it serves this model.
//! - Calls that change a backend are sent only to loopback or to a private network, see [`http`].
//! - No call waits indefinitely for a server that accepts the connection and sends nothing; the machine limits the
//!   whole duration of a load or an eviction, and drops the call.

pub mod build;
mod exchange;
pub mod hooks;
pub mod http;
pub mod key;
pub mod kubernetes;
pub mod launch;
pub mod llama_router;
pub mod memory;
pub mod nvidia;
pub mod ollama;
pub mod persistent;
pub mod process;
pub mod roster;
pub mod sequence;
pub mod served;
pub mod settings;
pub mod sglang;
pub mod slot;
pub mod static_url;
pub mod supervisor;
pub mod vllm_sleep;

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use url::Url;

use super::Model;
use super::error::LoadFailure;
use super::estimate::LoadKind;
use super::event::Left;

/// A driver call. Dropping it abandons the call.
pub type Call<'a, T> = BoxFuture<'a, T>;

/// Loads, unloads and probes the models of one slot.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Returns the properties of this kind of driver.
    fn capabilities(&self) -> Capabilities;

    /// Returns the models that it can load, in the order of the configuration.
    fn models(&self) -> Vec<Model>;

    /// Returns the address for the model's requests; `None` if no backend with an address runs for it.
    fn url(&self, model: &Model) -> Option<Url>;

    /// Checks that a load of this model could succeed now, before another model is unloaded for it. A backend that the
    /// driver does not start itself must be reachable; a driver that starts its backends has nothing to check.
    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        let known = self.models().contains(model);
        let unknown = || DriverError::UnknownModel(model.to_string());
        Box::pin(std::future::ready(known.then_some(()).ok_or_else(unknown)))
    }

    /// True if [`check`](Self::check) fails if and only if the backend is gone. Otherwise its result is no evidence
    /// about the backend.
    fn detects_absence(&self) -> bool {
        true
    }

    /// `loadTimeout` was changed. For drivers that end a load themselves, because they know why it is not ready.
    fn set_load_timeout(&self, load_timeout: Duration) {
        let _ = load_timeout;
    }

    /// Probes the backend of this model.
    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>>;

    /// Loads the model, waits until it is ready, and checks that the backend serves the right one.
    fn load<'a>(&'a self, model: &'a Model, kind: LoadKind) -> Call<'a, Result<(), LoadFailure>>;

    /// Unloads the model, or puts it to sleep. None of its requests should be running; a driver that can see running
    /// requests returns an error.
    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>>;

    /// Ends the model's backend, whatever its state.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>>;

    /// The worker is stopping: ends the driver's own backend for good, gracefully if that is possible.
    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        self.force_evict(model)
    }

    /// True if the model's backend is a child process of the worker, which ends with the worker.
    fn owns(&self, model: &Model) -> bool {
        let _ = model;
        self.capabilities().owns_backends
    }

    /// Returns the backend's name for the model; `None` if it is the model's id.
    fn backend_name(&self, model: &Model) -> Option<Model> {
        let _ = model;
        None
    }

    /// The slot holds nothing of this model, and its next load, if any, uses another driver.
    fn forget(&self, model: &Model) {
        let _ = model;
    }

    /// Completes when the model's backend ends, for drivers that are its parent process; otherwise never.
    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        let _ = model;
        Box::pin(std::future::pending())
    }
}

/// The properties of a kind of driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The remains of an unloaded model, which determine how it is loaded again.
    pub leaves: Left,
    /// True if the models of a slot may be loaded at the same time: unloading one does nothing.
    pub can_coexist: bool,
    /// True if backends are child processes that end with the worker, see [`Driver::owns`].
    pub owns_backends: bool,
    /// The share of an unloaded model's memory that must become free.
    pub returns: Returns,
}

/// The share of an unloaded model's memory that must become free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returns {
    /// The memory that a sleeping backend keeps, in bytes: its CUDA context and its captured graphs.
    pub residual: u64,
    /// The part of the rest that must become free, in percent.
    pub percent: u8,
}

impl Returns {
    /// The backend is gone, and with it all of its memory.
    pub const ALL: Self = Self { residual: 0, percent: 90 };
}

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// True if it would serve a request for the model now, and it is the right model.
    pub ready: bool,
    /// True if it certainly serves nothing: its process has ended, or its server reports that the model is unloaded or
    /// asleep. A backend that responds and is not ready is not gone.
    pub gone: bool,
    /// The models that it reports.
    pub model_ids: Vec<String>,
}

impl Probed {
    /// Returns the result for a backend that certainly serves nothing.
    pub fn gone() -> Self {
        Self { gone: true, ..Self::default() }
    }
}

/// The reason why a driver call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverError {
    /// The slot's driver has no such model.
    UnknownModel(String),
    /// The address is outside the networks in which backends may be loaded and unloaded.
    Forbidden {
        /// The address as configured.
        url: String,
        /// The reason.
        why: String,
    },
    /// Nothing listens there.
    Unreachable {
        /// The requested URL.
        url: String,
        /// The error of the operating system.
        why: String,
    },
    /// The server did not respond in time, or stopped in the middle.
    Silent {
        /// The requested URL.
        url: String,
        /// The missing part.
        why: String,
    },
    /// The server rejected the request.
    Refused {
        /// The requested URL.
        url: String,
        /// The status.
        status: u16,
        /// The beginning of the response body.
        message: String,
    },
    /// The response is not one that this kind of backend sends.
    Unexpected {
        /// The requested URL.
        url: String,
        /// The problem with the response.
        why: String,
    },
    /// The backend's process, or a command, ended.
    Ended {
        /// How it ended, and its last output.
        last_words: String,
    },
    /// Requests run there.
    Busy {
        /// The number of running requests.
        requests: u32,
    },
    /// The backend did not end in time.
    StillThere(Duration),
    /// The backend serves another model.
    WrongModel {
        /// The expected model.
        expected: String,
        /// The models that it serves.
        found: Vec<String>,
    },
    /// The operating system could not start it.
    CannotStart(String),
    /// The worker abandoned the call.
    Abandoned(String),
    /// Only the backend's own operator can do that.
    NotOurs(String),
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownModel(model) => write!(f, "the slot's driver has no model {model}"),
            Self::Forbidden { url, why } => write!(f, "refusing to control the backend at {url}: {why}"),
            Self::Unreachable { url, why } => write!(f, "{url} cannot be reached: {why}"),
            Self::Silent { url, why } => write!(f, "{url} does not respond: {why}"),
            Self::Refused { url, status, message } => write!(f, "{url} returned {status}: {message}"),
            Self::Unexpected { url, why } => write!(f, "{url} returned an unexpected response: {why}"),
            Self::Ended { last_words } => write!(f, "it exited: {last_words}"),
            Self::Busy { requests } => write!(f, "{requests} requests are running there"),
            Self::StillThere(after) => write!(f, "it had not stopped after {} s", after.as_secs()),
            Self::WrongModel { expected, found } => {
                write!(f, "the backend serves {} instead of {expected}", found.join(", "))
            }
            Self::CannotStart(why) => write!(f, "cannot start it: {why}"),
            Self::Abandoned(why) => write!(f, "not carried out: {why}"),
            Self::NotOurs(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for DriverError {}

impl From<DriverError> for LoadFailure {
    fn from(error: DriverError) -> Self {
        match error {
            DriverError::Ended { last_words } => Self::Exited(last_words),
            DriverError::WrongModel { expected, found } => Self::WrongModel { expected, found },
            other @ (DriverError::StillThere(_)
            | DriverError::UnknownModel(_)
            | DriverError::Forbidden { .. }
            | DriverError::Unreachable { .. }
            | DriverError::Silent { .. }
            | DriverError::Refused { .. }
            | DriverError::Unexpected { .. }
            | DriverError::Busy { .. }
            | DriverError::CannotStart(_)
            | DriverError::Abandoned(_)
            | DriverError::NotOurs(_)) => Self::Driver(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;

    use super::*;

    /// Serves a fake backend until the test ends, and returns its URL.
    pub(super) async fn serve(router: Router) -> Url {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        drop(tokio::spawn(async move { axum::serve(listener, router).await }));
        url
    }

    /// "Not ready in time" would suggest a longer load timeout, which would not help.
    #[test]
    fn failed_load_names_leftover_backend_as_cause() {
        let failure = LoadFailure::from(DriverError::StillThere(Duration::from_secs(50)));
        assert!(failure.to_string().contains("it had not stopped after 50 s"), "{failure}");
    }
}
