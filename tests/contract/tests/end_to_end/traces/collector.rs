//! A fake collector of traces and metrics: it parses real exports and keeps their spans and metrics.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read;
use std::sync::{Arc, Mutex};

use flate2::read::GzDecoder;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::{TEST_TIMEOUT, poll_for};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1 as otlp;
use prost::Message;

/// The collector, and everything it received.
pub(super) struct Collector {
    pub(super) http: FakeBackend,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Default)]
struct Taken {
    spans: Vec<Span>,
    /// The last export of each service.
    metrics: BTreeMap<String, Vec<Metric>>,
    raw: Vec<u8>,
}

/// A span, with its ids in hex as in headers.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) service: String,
    pub(super) trace: String,
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) kind: i32,
    pub(super) is_error: bool,
    pub(super) nanos: u64,
    /// The spans of the same trace that it is linked to.
    pub(super) links: Vec<String>,
    attributes: Vec<KeyValue>,
}

impl Span {
    fn new(service: &str, span: &otlp::Span) -> Self {
        Self {
            service: service.to_owned(),
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            name: span.name.clone(),
            kind: span.kind,
            is_error: span.status.as_ref().is_some_and(|status| status.code == 2),
            nanos: span.end_time_unix_nano - span.start_time_unix_nano,
            links: span.links.iter().filter(|it| it.trace_id == span.trace_id).map(|it| hex(&it.span_id)).collect(),
            attributes: span.attributes.clone(),
        }
    }

    /// Returns an attribute as text, or an empty string.
    pub(super) fn attribute(&self, key: &str) -> String {
        text(self.attributes.iter().find(|attribute| attribute.key == key).and_then(|it| it.value.as_ref()))
    }
}

impl Collector {
    /// Starts a collector that accepts everything.
    pub(super) async fn start() -> Self {
        Self::answering(|_| 200).await
    }

    /// Starts a collector that responds to each batch with this status, by the number of earlier batches.
    pub(super) async fn answering(status: impl Fn(usize) -> u16 + Send + Sync + 'static) -> Self {
        let http = FakeBackend::start().await;
        let taken = Arc::new(Mutex::new(Taken::default()));
        let (keep, count) = (Arc::clone(&taken), Mutex::new(0));
        http.answer_with(move |head, body| {
            assert_eq!(head.header("content-type"), Some("application/x-protobuf"), "{}", head.path());
            let before = {
                let mut count = count.lock().expect("the count");
                *count += 1;
                *count - 1
            };
            let status = status(before);
            if status == 200 {
                let is_packed = head.header("content-encoding") == Some("gzip");
                let body = if is_packed { unpacked(body) } else { body.to_vec() };
                let mut taken = keep.lock().expect("no panic while the lock is held");
                match head.path() {
                    "/v1/traces" => taken.take(&body),
                    "/v1/metrics" => taken.take_metrics(&body),
                    path => panic!("an export to {path}"),
                }
            }
            Answer::new(status, &[("content-type", "application/x-protobuf")], b"")
        });
        Self { http, taken }
    }

    /// Returns all spans of this trace, once it has this number.
    pub(super) async fn trace(&self, id: &str, spans: usize) -> Vec<Span> {
        self.trace_when(id, |found| found.len() >= spans).await
    }

    /// Returns all of a relay's spans of this trace: the relay's own span is the last.
    pub(super) async fn ended_trace(&self, id: &str) -> Vec<Span> {
        self.trace_when(id, |found| found.iter().any(|span| span.name.starts_with("POST /"))).await
    }

    /// Returns all spans of this trace, once one has this name.
    pub(super) async fn trace_with(&self, id: &str, name: &str) -> Vec<Span> {
        self.trace_when(id, |found| found.iter().any(|span| span.name == name)).await
    }

    async fn trace_when(&self, id: &str, is_whole: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let of_trace = || self.spans().into_iter().filter(|span| span.trace == id).collect::<Vec<_>>();
        let whole = poll_for(TEST_TIMEOUT, async || Some(of_trace()).filter(|found| is_whole(found))).await;
        whole.unwrap_or_else(|| panic!("trace {id} is not whole: {:#?}", of_trace()))
    }

    /// Returns all spans so far.
    pub(super) fn spans(&self) -> Vec<Span> {
        self.taken.lock().expect("no panic while the lock is held").spans.clone()
    }

    /// Returns the metrics of this service as of its last export.
    pub(super) fn metrics(&self, service: &str) -> Vec<Metric> {
        let taken = self.taken.lock().expect("no panic while the lock is held");
        taken.metrics.get(service).cloned().unwrap_or_default()
    }

    /// True if any batch of spans contains these bytes.
    pub(super) fn has_received(&self, text: &str) -> bool {
        let taken = self.taken.lock().expect("no panic while the lock is held");
        taken.raw.windows(text.len()).any(|window| window == text.as_bytes())
    }
}

impl Taken {
    fn take(&mut self, body: &[u8]) {
        self.raw.extend_from_slice(body);
        let batch = ExportTraceServiceRequest::decode(body).expect("a batch of spans");
        for resource in &batch.resource_spans {
            let service = service(resource.resource.as_ref());
            let spans = resource.scope_spans.iter().flat_map(|scope| &scope.spans);
            self.spans.extend(spans.map(|span| Span::new(&service, span)));
        }
    }

    fn take_metrics(&mut self, body: &[u8]) {
        let export = ExportMetricsServiceRequest::decode(body).expect("an export of metrics");
        for resource in export.resource_metrics {
            let metrics = resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics).collect();
            self.metrics.insert(service(resource.resource.as_ref()), metrics);
        }
    }
}

/// Returns the name of the service that exported this.
fn service(resource: Option<&Resource>) -> String {
    let attributes = resource.map(|resource| &resource.attributes[..]).unwrap_or_default();
    let service = attributes.iter().find(|it| it.key == "service.name");
    text(service.and_then(|it| it.value.as_ref()))
}

fn unpacked(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(body).read_to_end(&mut bytes).expect("the body is valid gzip");
    bytes
}

pub(super) fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(truth)) => truth.to_string(),
        Some(Value::ArrayValue(list)) => {
            list.values.iter().map(|value| text(Some(value))).collect::<Vec<_>>().join(",")
        }
        _ => String::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
