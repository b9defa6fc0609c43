//! Commands that query and control a running relay through its admin API, for terminals and scripts.

mod api;
mod tables;
mod usage;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use crate::settings::commands::{Command, KeyChange, KeyUpdate, OutputFormat, RelayAccess, RequestChange};
use api::Api;

/// The interval at which the progress of a drain is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A failed command; the message is one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct AdminCliError(String);

/// Runs a command against a relay. Commands that need no relay are handled elsewhere.
pub async fn run(command: Command) -> Result<(), AdminCliError> {
    match command {
        Command::Check | Command::Completions(_) | Command::Man(_) | Command::Service(_) => Ok(()),
        Command::Status(relay) => {
            let api = Api::new(&relay)?;
            let (state, stats) = (api.get("/admin/state").await?, api.get("/admin/stats").await?);
            let both = json!({ "state": state, "stats": stats });
            print_output(relay.output, &both, || tables::status(&state, &stats))
        }
        Command::Workers(relay) => {
            let answer = Api::new(&relay)?.get("/admin/workers").await?;
            print_output(relay.output, &answer, || tables::workers(&answer))
        }
        Command::Requests { relay, change: None } => {
            let answer = Api::new(&relay)?.get("/admin/requests").await?;
            print_output(relay.output, &answer, || tables::requests(&answer))
        }
        Command::Requests { change: Some(RequestChange::Cancel { relay, id }), .. } => {
            let path = format!("/admin/requests/{}/cancel", api::segment(&id));
            let answer = Api::new(&relay)?.call(Method::POST, &path, None).await?;
            print_output(relay.output, &answer, || format!("request {id} cancelled\n"))
        }
        Command::Keys { relay, change: None } => {
            let answer = Api::new(&relay)?.get("/admin/keys").await?;
            print_output(relay.output, &answer, || tables::keys(&answer))
        }
        Command::Keys { change: Some(change), .. } => change_keys(*change).await,
        Command::Usage { relay, wanted, output } => {
            let answer = usage::read(&Api::at(&relay)?, &wanted).await?;
            print(&usage::shown(&answer, &wanted, output))
        }
        Command::Drain { relay, worker, no_wait } => drain(&relay, &worker, no_wait).await,
    }
}

async fn change_keys(change: KeyChange) -> Result<(), AdminCliError> {
    match change {
        KeyChange::Create {
            relay,
            name,
            models,
            providers,
            expires_at,
            max_in_flight,
            max_queue_percent,
            tokens_per_minute,
            tokens_per_day,
            weight,
            class,
        } => {
            let wanted = fields_of(KeyUpdate {
                name: Some(name.clone()),
                models: models.map(Value::from),
                providers: providers.map(Value::from),
                expires_at: expires_at.map(Value::from),
                max_in_flight: max_in_flight.map(Value::from),
                max_queue_percent: max_queue_percent.map(Value::from),
                tokens_per_minute: tokens_per_minute.map(Value::from),
                tokens_per_day: tokens_per_day.map(Value::from),
                weight,
                class,
            });
            let answer = Api::new(&relay)?.call(Method::POST, "/admin/keys", Some(&wanted)).await?;
            let text = |name: &str| answer[name].as_str().unwrap_or_default();
            print_output(relay.output, &answer, || {
                format!("{}\n\nkey {} created for {name}; the secret is shown only once\n", text("secret"), text("id"))
            })
        }
        KeyChange::Update { relay, id, fields } => {
            let path = format!("/admin/keys/{}", api::segment(&id));
            let answer = Api::new(&relay)?.call(Method::PATCH, &path, Some(&fields_of(fields))).await?;
            print_output(relay.output, &answer, || tables::keys(&json!({ "keys": [answer] })))
        }
        KeyChange::Revoke { relay, id } => {
            let path = format!("/admin/keys/{}", api::segment(&id));
            let answer = Api::new(&relay)?.call(Method::DELETE, &path, None).await?;
            print_output(relay.output, &answer, || format!("key {id} revoked\n"))
        }
    }
}

/// The body of a request to create or change a key: the fields that were given. A relay of an earlier version does not
/// know all.
fn fields_of(fields: KeyUpdate) -> Value {
    let KeyUpdate {
        name,
        models,
        providers,
        expires_at,
        max_in_flight,
        max_queue_percent,
        tokens_per_minute,
        tokens_per_day,
        weight,
        class,
    } = fields;
    let fields = [
        ("name", name.map(Value::from)),
        ("models", models),
        ("providers", providers),
        ("expires_at", expires_at),
        ("max_in_flight", max_in_flight),
        ("max_queue_percent", max_queue_percent),
        ("tokens_per_minute", tokens_per_minute),
        ("tokens_per_day", tokens_per_day),
        ("weight", weight.map(|weight| json!(weight))),
        ("class", class.map(|class| json!(class))),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

async fn drain(relay: &RelayAccess, wanted: &str, no_wait: bool) -> Result<(), AdminCliError> {
    let api = Api::new(relay)?;
    let id = find(&api.get("/admin/workers").await?, wanted)?;
    let path = format!("/admin/workers/{}", api::segment(&id));
    let answer = api.call(Method::POST, &format!("{path}/drain"), None).await?;
    // Relays of earlier versions do not send this field.
    let returns = answer["stays_away"] == false;
    let advice =
        if returns { "; its older version reconnects within seconds: stop its process to prevent that" } else { "" };
    if no_wait {
        return print_output(relay.output, &answer, || format!("worker {wanted} is draining{advice}\n"));
    }
    let mut reported = None;
    loop {
        let workers = api.get("/admin/workers").await?;
        let Some(worker) = list(&workers, "workers").iter().find(|worker| worker["worker_id"] == *id) else { break };
        let left = worker["in_flight_count"].as_u64().unwrap_or(0);
        if reported != Some(left) {
            eprintln!("worker {wanted} is draining: {left} request{} left", if left == 1 { "" } else { "s" });
            reported = Some(left);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    print_output(relay.output, &answer, || format!("worker {wanted} disconnected{advice}\n"))
}

/// Returns the id of the only worker with this name or id.
fn find(workers: &Value, wanted: &str) -> Result<String, AdminCliError> {
    let is_it = |worker: &&Value| worker["worker_id"] == wanted || worker["worker_name"] == wanted;
    let found: Vec<&str> =
        list(workers, "workers").iter().filter(is_it).filter_map(|worker| worker["worker_id"].as_str()).collect();
    match found[..] {
        [id] => Ok(id.to_owned()),
        [] => Err(AdminCliError(format!("no connected worker has the name or id {wanted}"))),
        _ => Err(AdminCliError(format!(
            "{} workers are named {wanted}: specify an id, {}",
            found.len(),
            found.join(" or ")
        ))),
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn print_output(output: OutputFormat, answer: &Value, table: impl FnOnce() -> String) -> Result<(), AdminCliError> {
    print(&match output {
        OutputFormat::Json => json_text(answer),
        OutputFormat::Table => table(),
    })
}

/// The JSON of a response, indented for a terminal.
fn json_text(answer: &Value) -> String {
    if io::stdout().is_terminal() { format!("{answer:#}\n") } else { format!("{answer}\n") }
}

fn print(text: &str) -> Result<(), AdminCliError> {
    match io::stdout().write_all(text.as_bytes()) {
        // The reader of a pipe may close it before the end of the output.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(AdminCliError(format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}
