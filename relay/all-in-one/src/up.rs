//! `modelrelay up`: finds an inference server or starts the demo backend, starts relay and worker, and prints how to
//! use them.
//!
//! Relay, worker and demo backend are processes of this same program, so that each keeps its own settings, log and
//! drain. The first signal stops them in order, which finishes running responses; the second one kills them. If one of
//! them ends by itself, the rest is stopped too.

mod greeting;
mod parts;
mod ports;

use std::convert::Infallible;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;

use modelrelay_platform::signals::Signals;
use modelrelay_protocol::names::marked;
use modelrelay_worker::app::connect::backends::{self, FoundBackend};
use modelrelay_worker::app::shell::Shell;
use modelrelay_worker::backend::Backend;
use modelrelay_worker::settings::{BackendSettings, Engine};
use url::Url;

use crate::cli::UpArgs;
use crate::fail;
use crate::select::Program;
use parts::{Parts, Spec};

/// Port of the relay, unless `LISTEN_ADDR` names one.
const RELAY_PORT: u16 = 8080;

/// Port of the demo backend. It is not among the ports of inference servers: a second `up` must not take it for one.
const DEMO_PORT: u16 = 18_000;

/// The size limit of the relay's model list.
const MAX_LIST_BYTES: usize = 4 << 20;

/// Runs until a signal, or until a part ends.
pub(crate) fn run(args: &UpArgs) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.to_string()),
    };
    match runtime.block_on(up(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => fail(&why),
    }
}

/// Prints one line of its own between those of the parts.
pub(crate) fn print_line(line: &str) {
    print(&format!("modelrelay: {line}\n"));
}

/// The reader may be gone; the parts run on until they are stopped.
fn print(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}

async fn up(args: &UpArgs) -> Result<(), String> {
    check_variables()?;
    let mut signals = Signals::listen().map_err(|error| format!("cannot listen for signals: {error}"))?;
    let mut parts = Parts::new()?;
    let failure = tokio::select! {
        _ = signals.next() => None,
        Err(why) = start(args, &mut parts) => Some(why),
    };
    if let Some(why) = &failure {
        print_line(why);
    }
    print_line("stopping after running responses finish (press Ctrl-C again to stop immediately) …");
    tokio::select! {
        () = parts.stop() => print_line("stopped"),
        _ = signals.next() => {
            print_line("stopping immediately");
            parts.kill().await;
            return Err("stopped before running responses finished".to_owned());
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Settings of the relay under which `up` could not reach it.
fn check_variables() -> Result<(), String> {
    match std::env::var_os("TLS_CERT_FILE") {
        Some(file) if !file.is_empty() => {
            Err("TLS_CERT_FILE is set, but `up` connects to its relay over plain HTTP: unset it, or run relay and worker separately"
                .to_owned())
        }
        Some(_) | None => Ok(()),
    }
}

/// Starts everything, greets, and returns why it ended.
async fn start(args: &UpArgs, parts: &mut Parts) -> Result<Infallible, String> {
    let backend = choose_backend(args, parts).await?;
    let secret = args.worker_secret().map_or_else(random_hex, |secret| Ok(secret.to_owned()))?;
    let login = Login::choose(args)?;
    let url = start_relay(args, parts, &secret, &login).await?;
    let worker = Spec::of(Program::Worker)
        .env("PROXY_URL", &url)
        .env("BACKEND_URL", &backend)
        .env("WORKER_SECRET", &secret)
        .env("MODELS", args.models())
        .env("MAX_CONCURRENCY", args.max_concurrency());
    parts.start(worker).await?;
    let relay = peer(&url)?;
    let model =
        parts.wait_for(&format!("a model of the backend at {backend}"), async || first_model(&relay).await).await?;
    print(&greeting::greeting(&url, &model, &login.advice(), Shell::HERE));
    Err(parts.ended().await)
}

/// The address of the inference server that was given or found, or of the demo backend.
async fn choose_backend(args: &UpArgs, parts: &mut Parts) -> Result<String, String> {
    if let Some(url) = args.backend_url() {
        print_line(&format!("backend: {url} (from BACKEND_URL)"));
        return Ok(url.to_owned());
    }
    let numbers: Vec<String> = args.backend_ports().iter().map(u16::to_string).collect();
    let numbers = numbers.join(", ");
    print_line(&format!("probing for an inference server on ports {numbers} …"));
    let mut usable = usable(backends::discover(args.backend_ports()).await).into_iter();
    if let Some(first) = usable.next() {
        print_line(&format!("backend: found {}", first.line()));
        usable.for_each(|other| print_line(&format!("not used: {}; set BACKEND_URL to use it", other.line())));
        return Ok(address(&first.url));
    }
    let spec = |addr: SocketAddr| Spec::demo().env("DEMO_LISTEN", addr.to_string());
    let addr = parts.start_on_free_port(Ipv4Addr::LOCALHOST.into(), DEMO_PORT, spec).await?;
    print_line(&format!("backend: none found on ports {numbers}; using the demo backend at http://{addr}"));
    Ok(format!("http://{addr}"))
}

/// The servers with a model. Reports why each of the others is not used.
fn usable(looks: Vec<Result<FoundBackend, String>>) -> Vec<FoundBackend> {
    let mut usable = Vec::new();
    for look in looks {
        match look {
            Ok(found) if found.models.is_empty() => print_line(&format!("not used: {}", found.line())),
            Ok(found) => usable.push(found),
            Err(why) => print_line(&format!("not used: {}", marked(&why))),
        }
    }
    usable
}

/// Returns the address at which this machine reaches the relay.
async fn start_relay(args: &UpArgs, parts: &mut Parts, secret: &str, login: &Login<'_>) -> Result<String, String> {
    let spec = |addr: SocketAddr| {
        let spec = Spec::of(Program::Relay).env("LISTEN_ADDR", addr.to_string()).env("WORKER_SECRET", secret);
        match login {
            Login::Token { token, .. } => spec.env("MODELRELAY_ADMIN_TOKEN", token),
            Login::File(file) => spec.env("MODELRELAY_ADMIN_TOKEN_FILE", file),
        }
    };
    let addr = match args.listen_addr() {
        Some(addr) if addr.port() != 0 => {
            parts.start(spec(addr)).await?;
            addr
        }
        Some(any) => parts.start_on_free_port(any.ip(), 0, spec).await?,
        None => {
            let addr = parts.start_on_free_port(Ipv4Addr::LOCALHOST.into(), RELAY_PORT, spec).await?;
            if addr.port() != RELAY_PORT {
                print_line(&format!("relay: port {RELAY_PORT} is in use; listening on {} instead", addr.port()));
            }
            addr
        }
    };
    Ok(format!("http://{}", reachable(addr)))
}

/// An address that this machine can dial: a relay that listens on every address is reached by loopback.
fn reachable(addr: SocketAddr) -> SocketAddr {
    if !addr.ip().is_unspecified() {
        return addr;
    }
    let ip: IpAddr = if addr.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    SocketAddr::new(ip, addr.port())
}

/// The admin token of the relay.
enum Login<'a> {
    Token { token: String, is_random: bool },
    File(&'a Path),
}

impl<'a> Login<'a> {
    /// Random unless one was given: the holder of the token may do everything to this relay.
    fn choose(args: &'a UpArgs) -> Result<Self, String> {
        Ok(match (args.admin_token_file(), args.admin_token()) {
            (Some(file), _) => Self::File(file),
            (None, Some(token)) => Self::Token { token: token.to_owned(), is_random: false },
            (None, None) => Self::Token { token: random_hex()?, is_random: true },
        })
    }

    fn advice(&self) -> String {
        match self {
            Self::Token { token, is_random: true } => format!("log in with {token}"),
            Self::Token { .. } | Self::File(_) => "log in with your admin token".to_owned(),
        }
    }
}

/// The relay as an HTTP peer.
fn peer(url: &str) -> Result<Backend, String> {
    let url = Url::parse(url).map_err(|error| format!("{url}: {error}"))?;
    let settings = BackendSettings { url, engine: Engine::OpenAi, api_key: None, headers: Default::default() };
    Ok(Backend::new(settings))
}

/// The first model that the relay lists, if it lists one yet.
async fn first_model(relay: &Backend) -> Result<Option<String>, String> {
    let Ok(mut answer) = relay.fetch("/v1/models").await else { return Ok(None) };
    if answer.head.status.as_u16() == 401 {
        return Err(
            "the relay requires API keys, so `up` cannot list its models: unset MODELRELAY_REQUIRE_API_KEYS, or run \
             relay and worker separately"
                .to_owned(),
        );
    }
    let Ok(body) = answer.read_all(MAX_LIST_BYTES).await else { return Ok(None) };
    let list: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    Ok(list["data"][0]["id"].as_str().map(str::to_owned))
}

fn address(url: &Url) -> String {
    url.as_str().trim_end_matches('/').to_owned()
}

/// 128 random bits.
fn random_hex() -> Result<String, String> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| format!("system random number generator failed: {error}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_addresses_are_reached_by_loopback() {
        for (listen, reached) in
            [("0.0.0.0:8080", "127.0.0.1:8080"), ("[::]:1", "[::1]:1"), ("192.0.2.7:8081", "192.0.2.7:8081")]
        {
            assert_eq!(reachable(listen.parse().unwrap()).to_string(), reached);
        }
    }

    #[test]
    fn random_secrets_differ() {
        let (one, other) = (random_hex().unwrap(), random_hex().unwrap());
        assert!(one.len() == 32 && one != other, "{one} {other}");
    }
}
