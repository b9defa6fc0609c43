//! Every question with the check of its answer, in the order of the dialogue.

use std::path::PathBuf;
use std::sync::Arc;

use modelrelay_multiplexer::net::Trust;
use modelrelay_protocol::names::marked;
use modelrelay_protocol::secret::Secret;
use tokio::runtime::Runtime;
use url::Url;

use super::ConnectArgs;
use super::backends::{self, FoundBackend};
use super::files::{self, Answers, SecretPlace};
use super::terminal::Terminal;
use crate::link::{Endpoint, RelayRefusal, Way, try_dial};
use crate::settings::{self, Credential, Engine, Given, Proxies, RelayHeaders, RelayUrl};

/// The default for a relay on the same machine.
const USUAL_RELAY: &str = "http://127.0.0.1:8080";

/// The assumed number of concurrent requests of a server of unknown kind.
const USUAL_AT_ONCE: u32 = 4;

/// The dialogue, and the network to try answers with.
pub(super) struct Questions<'a> {
    args: ConnectArgs,
    terminal: Option<Arc<Terminal>>,
    runtime: &'a Runtime,
}

struct Chosen {
    url: Url,
    engine: Engine,
    at_once: u32,
}

impl<'a> Questions<'a> {
    /// Uses the terminal, unless there is none or `--yes` was given.
    #[expect(
        clippy::disallowed_methods,
        reason = "the main thread waits for a line of the terminal and cannot be interrupted"
    )]
    pub(super) fn new(args: ConnectArgs, runtime: &'a Runtime) -> Self {
        let terminal = if args.yes { None } else { Terminal::open().map(Arc::new) };
        if let Some(terminal) = terminal.clone() {
            runtime.spawn(async move {
                if tokio::signal::ctrl_c().await.is_ok() {
                    terminal.restore();
                    print_line("\nnothing was written");
                    std::process::exit(130);
                }
            });
        }
        Self { args, terminal, runtime }
    }

    pub(super) fn args(&self) -> &ConnectArgs {
        &self.args
    }

    /// Checks that the files may be written, before any question.
    pub(super) fn output(&self) -> Result<(), String> {
        let output = &self.args.output;
        let secret = files::secret_file(output);
        if secret == *output {
            let why = "the secret file next to it would have the same name; choose a name such as worker.yaml";
            return Err(format!("--output {}: {why}", output.display()));
        }
        let writes_secret = self.args.worker_secret_file.is_none();
        let mut files = vec![output.clone()];
        files.extend(writes_secret.then_some(secret));
        self.may_write(files)
    }

    /// Checks that these files may be written: overwriting existing ones must be confirmed.
    fn may_write(&self, mut files: Vec<PathBuf>) -> Result<(), String> {
        files.retain(|file| file.symlink_metadata().is_ok());
        if files.is_empty() || self.args.force {
            return Ok(());
        }
        let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let (exist, them) = if files.len() == 1 { ("exists", "it") } else { ("exist", "them") };
        let there = format!("{} already {exist}", names.join(" and "));
        match &self.terminal {
            Some(terminal) if terminal.confirm(&format!("{there}. Overwrite {them}?"))? => Ok(()),
            Some(_) | None => Err(format!("{there}; pass --force to overwrite {them}, or choose another --output")),
        }
    }

    /// Returns all answers, each of them tried.
    pub(super) fn answers(&self) -> Result<Answers, String> {
        let provider = Given { setting: "PROVIDER_NAME (--provider-name)", value: self.args.provider_name.trim() };
        let provider = provider.provider().map_err(|error| error.to_string())?;
        let (relay, secret) = self.relay(&provider)?;
        // The relay rejected the secret in the given file, so another one has to be written after all.
        if matches!(secret, SecretPlace::New(_)) && self.args.worker_secret_file.is_some() {
            self.may_write(vec![files::secret_file(&self.args.output)])?;
        }
        let chosen = self.backend()?;
        let at_once = self.judged(
            ("MAX_CONCURRENCY (--max-concurrency)", self.args.max_concurrency.as_deref()),
            "Maximum number of concurrent requests",
            Some(&chosen.at_once.to_string()),
            |given| given.concurrency().map_err(|error| error.to_string()),
        )?;
        let name = self.judged(
            ("WORKER_NAME (--worker-name)", self.args.worker_name.as_deref()),
            "Display name of this worker",
            Some(&settings::host_name()),
            |given| given.label().map_err(|error| error.to_string()),
        )?;
        Ok(Answers {
            relay,
            relay_ca_file: self.args.relay_ca_file.clone(),
            relay_headers_file: self.args.relay_headers_file.clone(),
            provider,
            secret,
            name,
            backend: chosen.url.as_str().trim_end_matches('/').to_owned(),
            engine: chosen.engine,
            api_key_file: self.args.backend_api_key_file.clone(),
            at_once,
        })
    }

    /// Returns the address, as it was written, of a relay that admits this worker, and the location of the secret.
    fn relay(&self, provider: &str) -> Result<(String, SecretPlace), String> {
        let mut address = self.args.relay.as_deref();
        let mut secret = self.given_secret()?;
        loop {
            let reach = |given: Given<'_>| {
                let url = RelayUrl::parse(given.setting, given.value).map_err(|error| error.to_string())?;
                self.reach(&url).map(|trust| (given.value.to_owned(), url, trust))
            };
            let (text, url, trust) =
                self.judged(("RELAY-URL", address.take()), "The relay's address", Some(USUAL_RELAY), reach)?;
            if let Some(place) = self.admit(&url, &trust, provider, &mut secret)? {
                return Ok((text, place));
            }
        }
    }

    /// Checks that the address accepts connections, with valid TLS if used, before prompting for a secret.
    fn reach(&self, url: &RelayUrl) -> Result<Trust, String> {
        let trust = crate::worker::trust(self.args.relay_ca_file.as_ref()).map_err(|error| error.to_string())?;
        let (headers, proxies) = (RelayHeaders::default(), Proxies::from_env());
        let way = Way { headers: &headers, proxies: &proxies, trust: &trust };
        let endpoint = Endpoint { url: url.clone(), addr: None };
        let unreached = |error| {
            format!(
                "cannot reach the relay at {}: {error}; check that it is running and that the address is correct",
                url.address()
            )
        };
        self.runtime.block_on(way.connect(&endpoint)).map_err(unreached)?;
        Ok(trust)
    }

    /// Returns the secret with which the relay admits this worker; `None` if the relay's address has to change.
    fn admit(
        &self,
        url: &RelayUrl,
        trust: &Trust,
        provider: &str,
        given: &mut Option<(Secret, SecretPlace)>,
    ) -> Result<Option<SecretPlace>, String> {
        loop {
            let (secret, place) = match given.take() {
                Some(given) => given,
                None => self.prompt_secret(provider)?,
            };
            let credential = Credential::Secret(secret);
            let headers = self.args.relay_headers_file.clone().map(RelayHeaders::File).unwrap_or_default();
            let way = Way { headers: &headers, proxies: &Proxies::from_env(), trust };
            match self.runtime.block_on(try_dial(url, provider, &credential, &way)) {
                Ok(()) => {
                    print_line(&format!("The relay at {} accepts this worker.", url.address()));
                    return Ok(Some(place));
                }
                Err(RelayRefusal::Credential(why)) => {
                    self.again(&format!("{}; {}", marked(&why), credential.question()))?;
                }
                Err(RelayRefusal::Other(why)) => {
                    let why = marked(&why);
                    let question = format!("check the relay's address, and that it has a provider {provider}");
                    self.again(&format!("{}: {why}; {question}", url.address()))?;
                    return Ok(None);
                }
            }
        }
    }

    fn given_secret(&self) -> Result<Option<(Secret, SecretPlace)>, String> {
        let of_file = |file: &PathBuf| {
            let read = settings::read_secret("WORKER_SECRET_FILE (--worker-secret-file)", file);
            read.map(|secret| (secret, SecretPlace::File(file.clone()))).map_err(|error| error.to_string())
        };
        match (&self.args.worker_secret_file, &self.args.worker_secret) {
            (Some(file), _) => of_file(file).map(Some),
            (None, Some(secret)) => judge_secret(secret.expose()).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn prompt_secret(&self, provider: &str) -> Result<(Secret, SecretPlace), String> {
        let Some(terminal) = &self.terminal else {
            return Err(
                "the worker secret is missing, and prompts are disabled: set WORKER_SECRET or --worker-secret-file"
                    .to_owned(),
            );
        };
        loop {
            let typed = terminal.prompt_hidden(&format!("Worker secret of provider {provider} (not echoed)"))?;
            match judge_secret(&typed) {
                Ok(secret) => return Ok(secret),
                Err(why) => print_line(&why),
            }
        }
    }

    /// Returns the given backend, or one of those that respond on this machine.
    fn backend(&self) -> Result<Chosen, String> {
        if self.args.backend.is_some() {
            return self.named_backend(None);
        }
        let looks = self.runtime.block_on(backends::discover(&self.args.backend_ports));
        let (found, odd): (Vec<_>, Vec<_>) = looks.into_iter().partition(Result::is_ok);
        odd.into_iter().filter_map(Result::err).for_each(|why| print_line(&marked(&why)));
        let mut found: Vec<FoundBackend> = found.into_iter().flatten().collect();
        if self.terminal.is_none() {
            return match found.pop() {
                Some(only) if found.is_empty() && self.args.yes => self.chosen(only),
                Some(last) => {
                    found.push(last);
                    Err(format!("BACKEND_URL (--backend) is missing, and prompts are disabled: {}", list(&found)))
                }
                None => Err(format!("BACKEND_URL (--backend) is missing: {}", self.nothing_found())),
            };
        }
        if found.is_empty() {
            print_line(&format!("{}; start one, or enter its address.", self.nothing_found()));
            return self.named_backend(None);
        }
        print_line("Backends on this machine:");
        found.iter().enumerate().for_each(|(at, found)| print_line(&format!("  {}) {}", at + 1, found.line())));
        self.named_backend(Some(found))
    }

    /// Returns the backend at an address, or with a number in the list.
    fn named_backend(&self, mut listed: Option<Vec<FoundBackend>>) -> Result<Chosen, String> {
        let question =
            if listed.is_some() { "Backend to use: a number, or another address" } else { "The backend's address" };
        let default = listed.is_some().then_some("1");
        let setting = "BACKEND_URL (--backend)";
        let found = self.judged((setting, self.args.backend.as_deref()), question, default, |given| {
            if let (Some(found), Ok(number)) = (&mut listed, given.value.parse::<usize>()) {
                let is_listed = (1..=found.len()).contains(&number);
                return if is_listed {
                    Ok(Ok(found.swap_remove(number - 1)))
                } else {
                    Err(format!("no backend has number {number}"))
                };
            }
            let url = given.backend_url().map_err(|error| error.to_string())?;
            match self.runtime.block_on(backends::probe_address(url.clone(), self.api_key()?)) {
                Ok(found) => Ok(Ok(found)),
                // It may be started later; the worker waits for it.
                Err(why) => match &self.terminal {
                    Some(terminal) => {
                        print_line(&format!("{url}: {}", marked(&why)));
                        if terminal.confirm("Use it anyway? The worker waits until it responds.")? {
                            Ok(Err(url))
                        } else {
                            Err("enter another address".to_owned())
                        }
                    }
                    None => {
                        print_line(&format!("{url}: {}; the worker waits until it responds", marked(&why)));
                        Ok(Err(url))
                    }
                },
            }
        })?;
        match found {
            Ok(found) => {
                print_line(&format!("Backend: {}", found.line()));
                self.chosen(found)
            }
            Err(url) => Ok(Chosen { url, engine: self.engine(Engine::OpenAi)?, at_once: USUAL_AT_ONCE }),
        }
    }

    fn chosen(&self, found: FoundBackend) -> Result<Chosen, String> {
        Ok(Chosen { at_once: found.at_once(), engine: self.engine(found.engine)?, url: found.url })
    }

    fn engine(&self, found: Engine) -> Result<Engine, String> {
        let Some(value) = &self.args.backend_engine else { return Ok(found) };
        let given = Given { setting: "BACKEND_ENGINE (--backend-engine)", value };
        given.engine().map_err(|error| error.to_string())
    }

    fn api_key(&self) -> Result<Option<Secret>, String> {
        let read = |file| settings::read_secret("BACKEND_API_KEY_FILE (--backend-api-key-file)", file);
        self.args.backend_api_key_file.as_deref().map(read).transpose().map_err(|error| error.to_string())
    }

    fn nothing_found(&self) -> String {
        let ports: Vec<String> = self.args.backend_ports.iter().map(u16::to_string).collect();
        format!("no backend responds on local ports {}", ports.join(", "))
    }

    /// Returns the given value, or else the answer, once it is valid. A wrong answer is prompted for again.
    fn judged<T>(
        &self,
        (setting, given): (&str, Option<&str>),
        question: &str,
        default: Option<&str>,
        mut judge: impl FnMut(Given<'_>) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut given = given.map(|given| given.trim().to_owned());
        loop {
            let value = match given.take() {
                Some(given) => given,
                None => self.prompt(setting, question, default)?,
            };
            match judge(Given { setting, value: &value }) {
                Ok(judged) => return Ok(judged),
                Err(why) => self.again(&why)?,
            }
        }
    }

    fn prompt(&self, setting: &str, question: &str, default: Option<&str>) -> Result<String, String> {
        match (&self.terminal, default) {
            (Some(terminal), _) => terminal.prompt(question, default),
            (None, Some(default)) if self.args.yes => Ok(default.to_owned()),
            (None, Some(default)) => {
                Err(format!("{setting} is missing, and prompts are disabled: set it, or pass --yes for {default}"))
            }
            (None, None) => Err(format!("{setting} is missing, and prompts are disabled: set it")),
        }
    }

    /// Reports what is wrong with an answer, if it will be prompted for again.
    fn again(&self, why: &str) -> Result<(), String> {
        match &self.terminal {
            Some(_) => {
                print_line(why);
                Ok(())
            }
            None => Err(why.to_owned()),
        }
    }
}

/// Validates a secret that is not in a file yet.
fn judge_secret(text: &str) -> Result<(Secret, SecretPlace), String> {
    if text.trim().is_empty() {
        return Err("the worker secret is empty; the relay's administrator can provide it".to_owned());
    }
    let secret = settings::header_secret("WORKER_SECRET", text).map_err(|error| error.to_string())?;
    Ok((secret.clone(), SecretPlace::New(secret)))
}

fn list(found: &[FoundBackend]) -> String {
    let lines: Vec<String> = found.iter().map(FoundBackend::line).collect();
    let hint = if found.len() == 1 { "set it, or pass --yes for" } else { "set it to one of" };
    format!("{hint} {}", lines.join(" · "))
}

#[allow(clippy::print_stderr)]
fn print_line(line: &str) {
    eprintln!("{line}");
}
