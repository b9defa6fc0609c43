//! `modelrelay-worker convert llama-swap FILE`: converts another program's configuration into a `worker.yaml`.
//!
//! Settings without a counterpart become notes at the head of the file, so that nothing is dropped silently.

mod llama_swap;
mod slots;
#[cfg(test)]
mod tests;
mod words;

use std::path::PathBuf;

use serde::Serialize;

/// Arguments of the subcommand.
#[derive(Debug, Clone, clap::Args)]
pub struct ConvertArgs {
    /// Program to convert from: llama-swap
    #[arg(value_name = "FROM", value_parser = origin)]
    pub from: Origin,
    /// Configuration file of that program; the worker.yaml is written to standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// Programs whose configuration can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// llama-swap's config.yaml
    LlamaSwap,
}

fn origin(text: &str) -> Result<Origin, String> {
    match text {
        "llama-swap" => Ok(Origin::LlamaSwap),
        _ => Err("only llama-swap is supported".to_owned()),
    }
}

/// Returns the text of a `worker.yaml`. An error is one line that states what to change in the other file.
pub fn run(args: &ConvertArgs) -> Result<String, String> {
    let name = args.file.display();
    let text = std::fs::read_to_string(&args.file).map_err(|error| format!("cannot read {name}: {error}"))?;
    let variable = |name: &str| std::env::var(name).ok();
    match args.from {
        Origin::LlamaSwap => llama_swap::convert(&text, &variable).map_err(|error| format!("{name}: {error}")),
    }
}

/// Notes about the result, in the order in which they were added.
#[derive(Debug, Default)]
struct Notes(Vec<String>);

impl Notes {
    fn add(&mut self, place: &str, note: &str) {
        self.0.push(format!("{place}: {note}"));
    }
}

/// The part of `worker.yaml` that a conversion writes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConvertedWorker {
    relay: String,
    worker_secret: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_level: Option<String>,
    multiplexer: ConvertedMultiplexer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConvertedMultiplexer {
    load_timeout: String,
    slots: Vec<ConvertedSlot>,
}

#[derive(Debug, Serialize)]
struct ConvertedSlot {
    id: String,
    driver: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<String>,
    models: Vec<ConvertedModel>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConvertedModel {
    id: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    command: Vec<String>,
    #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    env: std::collections::BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    max_concurrency: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    health_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expect_model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_ttl: Option<String>,
}

impl ConvertedWorker {
    /// Returns the file's text, notes first.
    fn text(&self, notes: &Notes) -> Result<String, String> {
        let yaml = serde_yaml::to_string(self).map_err(|error| format!("cannot serialize worker.yaml: {error}"))?;
        let mut text = String::from("# Set relay and workerSecret, then run: modelrelay-worker --config worker.yaml\n");
        if !notes.0.is_empty() {
            text.push_str("#\n# Notes:\n");
        }
        for note in &notes.0 {
            text.push_str(&format!("# - {}\n", note.replace(['\n', '\r'], " ")));
        }
        text.push('\n');
        text.push_str(&yaml);
        Ok(text)
    }
}
