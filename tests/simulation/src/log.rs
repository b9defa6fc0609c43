//! The programs' own logs: the lines that the checker uses, and the search for secrets in them.

use std::cell::RefCell;
use std::fmt::{Debug, Write};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::Attributes;
use tracing::{Event, Id, Level, Metadata, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

use crate::determinism;

/// One line of a host's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The time.
    pub at: Duration,
    /// The host.
    pub host: String,
    /// The message, without the fields.
    pub message: String,
    /// The field `request_id`, if present.
    pub request_id: Option<String>,
    /// The field `model`, if present.
    pub model: Option<String>,
    /// The field `key_id`, if present.
    pub key_id: Option<String>,
    /// The whole line.
    pub text: String,
}

/// The target of the steps of the grants protocol.
const STEPS_TARGET: &str = "grants";

thread_local! {
    static LINES: RefCell<Option<Vec<Line>>> = const { RefCell::new(None) };
    static STEPS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Collects the logs of simulations, for the lifetime of the process, and the steps of the grants protocol if
/// `has_steps` is set.
pub fn install(has_steps: bool) {
    let is_collected = move |metadata: &Metadata<'_>| {
        let target = metadata.target();
        metadata.is_span() || target.starts_with("modelrelay") || has_steps && target == STEPS_TARGET
    };
    let filter = filter_fn(is_collected).with_max_level_hint(Level::DEBUG);
    let subscriber = Registry::default().with(Collector.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).expect("no other subscriber is set");
}

/// Starts collecting on this thread.
pub fn begin() {
    LINES.set(Some(Vec::new()));
}

/// Returns the lines that were logged on this thread since.
pub fn take() -> Vec<Line> {
    LINES.take().unwrap_or_default()
}

/// Returns the steps of the grants protocol on this thread, one JSON object a line.
pub fn take_steps() -> Vec<String> {
    STEPS.take()
}

/// Adds the step of a host that this program itself causes.
pub fn note_step(host: &str, op: &str) {
    STEPS.with_borrow_mut(|steps| steps.push(json!({"host": host, "op": op}).to_string()));
}

struct Collector;

/// The host of a span of turmoil's.
struct Host(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let (Some(span), Some(host)) = (context.span(id), fields.host) {
            span.extensions_mut().insert(Host(host));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let host = context.event_scope(event).into_iter().flatten();
        let host = host.filter_map(|span| span.extensions().get::<Host>().map(|host| host.0.clone())).last();
        if event.metadata().target() == STEPS_TARGET {
            let mut step = Step::default();
            event.record(&mut step);
            step.0.insert("host".to_owned(), host.unwrap_or_default().into());
            return STEPS.with_borrow_mut(|steps| steps.push(Value::Object(step.0).to_string()));
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let text = format!("{} {}{}", event.metadata().level(), fields.message, fields.text);
        let (at, host) = (determinism::elapsed(), host.unwrap_or_default());
        let Fields { message, request_id, model, key_id, .. } = fields;
        LINES.with_borrow_mut(|lines| {
            if let Some(lines) = lines {
                lines.push(Line { at, host, message, request_id, model, key_id, text });
            }
        });
    }
}

#[derive(Default)]
struct Step(Map<String, Value>);

impl Visit for Step {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

#[derive(Default)]
struct Fields {
    host: Option<String>,
    message: String,
    request_id: Option<String>,
    model: Option<String>,
    key_id: Option<String>,
    text: String,
}

impl Fields {
    fn note(&mut self, name: &str, value: String) {
        match name {
            "message" => return self.message = value,
            "name" => self.host = Some(value.clone()),
            "request_id" => self.request_id = Some(value.clone()),
            "model" => self.model = Some(value.clone()),
            "key_id" => self.key_id = Some(value.clone()),
            _ => {}
        }
        let _ = write!(self.text, " {name}={value}");
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.note(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.note(field.name(), format!("{value:?}"));
    }
}
