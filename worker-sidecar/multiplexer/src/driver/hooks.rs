//! A backend that the operator's own commands load and unload: anything that no other driver supports, from `docker
//! start` to checkpoints of a GPU's state.
//!
//! A command succeeds with exit code 0. It runs without a shell, under a supervisor: if a call is abandoned or the
//! worker dies, the command and its descendants are ended. Processes that a successful command started keep running;
//! they should close or redirect their output.

use std::collections::BTreeMap;
use std::ops::RangeFrom;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use super::http::Client;
use super::launch::{Children, Launch, Running};
use super::served::Served;
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// The environment variable with the model's name.
const MODEL_VARIABLE: &str = "MODELRELAY_MODEL";

/// `alive` runs often, and a hanging one must not be mistaken for a model.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two runs of `alive` after a load or an eviction.
const POLL: Duration = Duration::from_millis(250);

/// The same while a model that was alive gets ready, and the number of consecutive failures of `alive` that end the
/// load.
const LOADING_POLL: Duration = Duration::from_secs(1);
const DEAD_AFTER: u32 = 3;

/// Exit codes of a supervisor and a shell for a command that cannot be executed or does not exist, and, from 128 on,
/// for one that a signal ended: usually because memory is short, which is no result.
const NO_ANSWER: RangeFrom<i32> = 126..;

/// A model and its commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookedModel {
    /// How its readiness is checked.
    pub served: Served,
    /// Its URL; also where its identity is checked.
    pub url: Url,
    /// The command that makes it serve.
    pub load: Vec<String>,
    /// The command that makes it free its memory.
    pub evict: Vec<String>,
    /// The command that succeeds while it serves; `None`: its URL is probed instead.
    pub alive: Option<Vec<String>>,
}

/// The `hooks` driver.
#[derive(Debug)]
pub struct Hooks {
    models: Vec<HookTarget>,
    commands: Children,
    questions: Children,
}

#[derive(Debug)]
struct HookTarget {
    model: HookedModel,
    client: Client,
}

impl Hooks {
    /// `supervisor`: the path of this program.
    pub fn new(models: impl IntoIterator<Item = HookedModel>, supervisor: PathBuf) -> Self {
        let known = |model: HookedModel| HookTarget { client: model.served.client(model.url.clone()), model };
        let models = models.into_iter().map(known).collect();
        Self { models, commands: Children::new(supervisor.clone()), questions: Children::new(supervisor) }
    }

    fn find(&self, model: &Model) -> Result<&HookTarget, DriverError> {
        let found = self.models.iter().find(|known| known.model.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    async fn make_ready(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        if self.probe_target(known).await.is_ok_and(|probed| probed.ready) {
            return Ok(());
        }
        self.run(model, &known.model.load).await?;
        while !self.is_alive(known).await? {
            tokio::time::sleep(POLL).await;
        }
        tokio::select! {
            ready = known.model.served.become_ready(&known.client) => ready,
            words = self.died(known) => Err(DriverError::Ended { last_words: words }),
        }
    }

    /// Returns once `alive` has failed [`DEAD_AFTER`] times in a row.
    async fn died(&self, known: &HookTarget) -> String {
        let Some(alive) = &known.model.alive else { return std::future::pending().await };
        let mut noes = 0;
        while noes < DEAD_AFTER {
            tokio::time::sleep(LOADING_POLL).await;
            match self.is_alive(known).await {
                Ok(true) => noes = 0,
                Ok(false) => noes += 1,
                Err(error) => tracing::debug!(model = &*known.model.served.id, %error, "the alive command failed"),
            }
        }
        format!("it was alive, but according to `{}` it stopped before it was ready", alive.join(" "))
    }

    async fn give_up(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        self.run(model, &known.model.evict).await?;
        while self.is_there(known).await? {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn probe_target(&self, known: &HookTarget) -> Result<Probed, DriverError> {
        if self.is_alive(known).await? { known.model.served.probe(&known.client).await } else { Ok(Probed::gone()) }
    }

    /// True if any of it exists, ready or not: an eviction must not be reported as complete too early.
    async fn is_there(&self, known: &HookTarget) -> Result<bool, DriverError> {
        if known.model.alive.is_none() {
            let look = known.model.served.probe(&known.client).await;
            return Ok(!matches!(look, Err(DriverError::Unreachable { .. })));
        }
        match self.is_alive(known).await {
            Err(DriverError::Silent { .. }) => Ok(true),
            answer => answer,
        }
    }

    /// Returns an error if `alive` gave no result: one that cannot run must not be mistaken for a model that is gone.
    async fn is_alive(&self, known: &HookTarget) -> Result<bool, DriverError> {
        let Some(alive) = &known.model.alive else { return Ok(true) };
        let question =
            self.questions.start(&known.model.served.id, &launch(&known.model.served.id, alive, true), None)?;
        let _guard = question.kill_on_drop();
        let answer = tokio::time::timeout(ALIVE_TIMEOUT, question.ended()).await;
        let silent = || DriverError::Silent { url: alive.join(" "), why: "the command did not exit".to_owned() };
        match answer.map_err(|_| silent())?.code {
            Some(code) if !NO_ANSWER.contains(&code) => Ok(code == 0),
            // Without a code, its supervisor was killed.
            Some(_) | None => {
                Err(DriverError::Unexpected { url: alive.join(" "), why: question.failed().await.to_string() })
            }
        }
    }

    /// Runs a command to its end. Dropping the future ends the command.
    async fn run(&self, model: &Model, command: &[String]) -> Result<(), DriverError> {
        // One command at a time; the previous one may be the load that was abandoned.
        self.commands.kill(model).await?;
        let running = self.commands.start(model, &launch(model, command, false), None)?;
        let guard = running.kill_on_drop();
        succeeded(&running).await?;
        guard.keep();
        Ok(())
    }
}

async fn succeeded(running: &Running) -> Result<(), DriverError> {
    match running.ended().await.code {
        Some(0) => Ok(()),
        Some(_) | None => Err(running.failed().await),
    }
}

fn launch(model: &Model, command: &[String], is_quiet: bool) -> Launch {
    let env = BTreeMap::from([(MODEL_VARIABLE.to_owned(), model.to_string())]);
    Launch { command: command.to_vec(), env, leave_on_success: true, is_quiet }
}

impl Driver for Hooks {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        self.models.iter().map(|known| Model::clone(&known.model.served.id)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|known| known.model.url.clone())
    }

    /// Checks that `alive` can run; its result does not matter yet.
    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            match self.is_alive(self.find(model)?).await {
                Ok(_) | Err(DriverError::Silent { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async { self.probe_target(self.find(model)?).await })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.make_ready(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async {
            let known = self.find(model)?;
            // If that cannot be determined, it may exist.
            if self.is_there(known).await.unwrap_or(true) {
                self.give_up(model).await?;
            }
            Ok(Left::Nothing)
        })
    }

    /// The command runs even if nothing is found: a backend that does not respond may still hold the GPU.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.give_up(model))
    }
}
