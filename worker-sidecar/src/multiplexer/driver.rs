//! How a backend is loaded, unloaded and looked at. One driver per slot; each kind of backend has one, and the table of
//! tests in `tests/backends` holds for all of them.
//!
//! Rules for every driver:
//! - A call is a future, and dropping it abandons the call. What it started itself ends with it; what a foreign server
//!   was already told to do may go on until [`Driver::force_evict`] has answered, which is what the machine asks for next,
//!   see [`sequence`].
//! - Calls can be repeated: loading what is loaded and unloading what is gone are successes.
//! - A model counts as loaded only when it is ready *and* the backend says that it is this one.
//! - Whatever changes a backend is sent to loopback or to a private network only, see [`http`].
//! - No call waits for ever for a server that takes the connection and is silent; how long a load or an eviction may take
//!   as a whole is the machine's business, which drops the call.

pub mod build;
pub mod hooks;
pub mod http;
pub mod key;
pub mod kubernetes;
pub mod launch;
pub mod llama_router;
pub mod memory;
pub mod nvidia;
pub mod ollama;
pub mod process;
pub mod roster;
pub mod sequence;
pub mod served;
pub mod sglang;
pub mod slot;
pub mod standing;
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

/// A call of a driver. Dropping it abandons the call.
pub type Call<'a, T> = BoxFuture<'a, T>;

/// Loads, unloads and looks at the models of one slot.
pub trait Driver: fmt::Debug + Send + Sync {
    /// What sets this kind apart.
    fn capabilities(&self) -> Capabilities;

    /// The models that it knows how to load, in the order of the configuration.
    fn models(&self) -> Vec<Model>;

    /// Where requests of the model go; `None` where nothing of it runs that has an address.
    fn url(&self, model: &Model) -> Option<Url>;

    /// Whether it could do anything for this model now: asked before another is unloaded for it. What the driver does not
    /// start itself must be reachable; one that starts its backends has nobody to ask.
    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        let known = self.models().contains(model);
        let unknown = || DriverError::UnknownModel(model.to_string());
        Box::pin(std::future::ready(known.then_some(()).ok_or_else(unknown)))
    }

    /// Whether [`check`](Self::check) fails where the backend is gone, and only there. Else its failure says nothing about the
    /// backend, and its success neither.
    fn tells_absence(&self) -> bool {
        true
    }

    /// `loadTimeout` was changed: for drivers that end a load themselves, because they know why it is not ready.
    fn set_load_timeout(&self, load_timeout: Duration) {
        let _ = load_timeout;
    }

    /// Looks at the backend of this model.
    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>>;

    /// Loads it, waits until it is ready, and checks that it is the right one.
    fn load<'a>(&'a self, model: &'a Model, kind: LoadKind) -> Call<'a, Result<(), LoadFailure>>;

    /// Unloads it, or puts it to sleep. Nothing of it should run any more; a driver that can see that something does
    /// refuses.
    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>>;

    /// Ends it, whatever state it is in and whatever it is doing.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>>;

    /// The worker ends: ends a backend of ours for good, and lets it finish what it has to, where it can be asked to.
    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        self.force_evict(model)
    }

    /// Whether the backend of this model is our child, which ends with the worker.
    fn owns(&self, model: &Model) -> bool {
        let _ = model;
        self.capabilities().owns_backends
    }

    /// The backend's name for the model; `None` if it is the model's id.
    fn backend_name(&self, model: &Model) -> Option<Model> {
        let _ = model;
        None
    }

    /// The slot holds nothing of this model, and its next load, if any, is another driver's.
    fn forget(&self, model: &Model) {
        let _ = model;
    }

    /// Ends when the model's backend does, for drivers that are its parent; else never.
    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        let _ = model;
        Box::pin(std::future::pending())
    }
}

/// What sets a kind of driver apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// What is left of a model that was unloaded, hence how it is loaded again.
    pub leaves: Left,
    /// The models of a slot may be loaded at the same time: unloading one does nothing.
    pub can_coexist: bool,
    /// Backends are our children, see [`Driver::owns`]: they end with the worker.
    pub owns_backends: bool,
    /// What of an unloaded model's memory has to come back.
    pub returns: Returns,
}

/// What of an unloaded model's memory has to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returns {
    /// Stays with a backend that sleeps, in bytes: its CUDA context and its captured graphs.
    pub residual: u64,
    /// Of the rest, in percent.
    pub percent: u8,
}

impl Returns {
    /// The backend is gone, and so is what it held.
    pub const ALL: Self = Self { residual: 0, percent: 90 };
}

/// What a look at a backend showed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// It would answer a request for the model now, and it is this model.
    pub ready: bool,
    /// Nothing of it serves, and that is certain: its process has ended, or its server says that it is unloaded or asleep.
    /// One that answers and is not ready is not gone.
    pub gone: bool,
    /// What it says that it serves.
    pub model_ids: Vec<String>,
}

impl Probed {
    /// Certainly nothing is there.
    pub fn gone() -> Self {
        Self { gone: true, ..Self::default() }
    }
}

/// Why a driver could not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverError {
    /// The slot's driver has no such model.
    UnknownModel(String),
    /// The address is outside the networks that may be told to load and unload.
    Forbidden {
        /// The address as configured.
        url: String,
        /// Why.
        why: String,
    },
    /// Nobody listens there.
    Unreachable {
        /// What was asked.
        url: String,
        /// What the operating system said.
        why: String,
    },
    /// It did not answer in time, or stopped in the middle.
    Silent {
        /// What was asked.
        url: String,
        /// What is missing.
        why: String,
    },
    /// It refused.
    Refused {
        /// What was asked.
        url: String,
        /// The status.
        status: u16,
        /// The first of its words.
        said: String,
    },
    /// It answered something that nobody expects of this kind of backend.
    Unexpected {
        /// What was asked.
        url: String,
        /// What is wrong with the answer.
        why: String,
    },
    /// The backend's process, or a command, ended.
    Ended {
        /// How, and its last words.
        last_words: String,
    },
    /// Requests run there.
    Busy {
        /// How many.
        requests: u32,
    },
    /// It would not go in time.
    StillThere(Duration),
    /// It serves something else.
    WrongModel {
        /// What should have been there.
        expected: String,
        /// What was.
        found: Vec<String>,
    },
    /// The operating system refused to start it.
    CannotStart(String),
    /// The worker itself dropped it.
    Abandoned(String),
    /// Only its own operator can do that.
    NotOurs(String),
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownModel(model) => write!(f, "the slot's driver has no model {model}"),
            Self::Forbidden { url, why } => write!(f, "{url} is not told to load or unload: {why}"),
            Self::Unreachable { url, why } => write!(f, "{url} cannot be reached: {why}"),
            Self::Silent { url, why } => write!(f, "{url} does not answer: {why}"),
            Self::Refused { url, status, said } => write!(f, "{url} answered {status}: {said}"),
            Self::Unexpected { url, why } => write!(f, "{url} answered something unexpected: {why}"),
            Self::Ended { last_words } => write!(f, "it ended: {last_words}"),
            Self::Busy { requests } => write!(f, "{requests} requests run there"),
            Self::StillThere(after) => write!(f, "it was still there after {} s", after.as_secs()),
            Self::WrongModel { expected, found } => {
                write!(f, "the backend serves {} instead of {expected}", found.join(", "))
            }
            Self::CannotStart(why) => write!(f, "it cannot be started: {why}"),
            Self::Abandoned(why) => write!(f, "it was not carried out: {why}"),
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

    /// Plays a backend until the test ends; where it is.
    pub(super) async fn serve(router: Router) -> Url {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        drop(tokio::spawn(async move { axum::serve(listener, router).await }));
        url
    }

    /// To be told that it was not ready in time, one would give it more time.
    #[test]
    fn a_load_that_fails_for_what_was_there_before_says_so() {
        let failure = LoadFailure::from(DriverError::StillThere(Duration::from_secs(50)));
        assert!(failure.to_string().contains("it was still there after 50 s"), "{failure}");
    }
}
