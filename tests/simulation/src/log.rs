//! The programs' own logs: the lines that the checker uses, and the search for secrets in them.

use std::cell::RefCell;
use std::fmt::{Debug, Write};
use std::time::Duration;

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

thread_local!(static LINES: RefCell<Option<Vec<Line>>> = const { RefCell::new(None) });

/// Collects the logs of simulations, for the lifetime of the process.
pub fn install() {
    let is_own = |metadata: &Metadata<'_>| metadata.is_span() || metadata.target().starts_with("modelrelay");
    let subscriber =
        Registry::default().with(Collector.with_filter(filter_fn(is_own).with_max_level_hint(Level::DEBUG)));
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
