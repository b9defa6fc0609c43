//! The export of metrics: the program's Prometheus families, pushed at an interval.
//!
//! The families are the ones that `/metrics` serves, under the same names, so that a dashboard works for both. They are
//! cumulative: an export that fails loses nothing, because the next one contains all values.

mod convert;
mod target;

pub use target::MetricsTarget;

use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::time::SystemTime;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Request, Uri};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_sdk::Resource;
use prometheus::proto::MetricFamily;
use prost::Message;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use crate::collector::{Collector, Signal};
use crate::{FLUSH_PATIENCE, Service, SettingError, resource};

/// The present values of all families, once they are gathered.
pub type GatherFuture = Pin<Box<dyn Future<Output = Vec<MetricFamily>> + Send>>;

/// Gathers the present values of all families.
pub type Gather = Box<dyn Fn() -> GatherFuture + Send + Sync>;

/// A running export of metrics.
#[derive(Debug)]
pub struct MetricExport {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// The parts of a running export.
struct Pusher {
    collector: Collector,
    target: MetricsTarget,
    uri: Uri,
    resource: Resource,
    scope: convert::Scope,
    gather: Gather,
}

impl MetricExport {
    /// Starts to push to `target`, for the first time after one interval. Must be called within a tokio runtime.
    pub fn start(target: &MetricsTarget, service: &Service<'_>, gather: Gather) -> Result<Self, SettingError> {
        let collector = Collector::new(&target.target, Signal::Metrics, Some(Handle::current()))?;
        let pusher = Pusher {
            collector,
            uri: target.uri()?,
            target: target.clone(),
            resource: resource(service),
            scope: convert::Scope { name: service.name, version: service.version, started: SystemTime::now() },
            gather,
        };
        tracing::info!(collector = target.target.shown(), interval = ?target.interval, "exporting metrics");
        let (stop, stopped) = oneshot::channel();
        Ok(Self { stop, task: tokio::spawn(pusher.run(stopped)) })
    }

    /// Pushes the final values, for at most two seconds.
    pub async fn shutdown(self) {
        // The task ends only after this.
        let _ = self.stop.send(());
        if self.task.await.is_err() {
            tracing::debug!("cannot export the last metrics");
        }
    }
}

impl MetricsTarget {
    /// Checks for the errors of [`MetricExport::start`], without a task, a connection or a runtime.
    pub fn check(&self) -> Result<(), SettingError> {
        self.uri()?;
        Collector::new(&self.target, Signal::Metrics, None).map(|_| ())
    }
}

impl Pusher {
    async fn run(self, mut stopped: oneshot::Receiver<()>) {
        let mut ticks = tokio::time::interval(self.target.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is immediate.
        ticks.tick().await;
        loop {
            let next = async {
                ticks.tick().await;
                self.push().await;
            };
            tokio::select! {
                () = next => {}
                _ = &mut stopped => break,
            }
        }
        let _ = tokio::time::timeout(FLUSH_PATIENCE, self.push()).await;
    }

    /// Pushes the present values once. The collector's log lines report a failure.
    async fn push(&self) {
        let families = (self.gather)().await;
        match self.request(families).await {
            Ok(request) => drop(self.collector.send_bytes(request).await),
            Err(error) => tracing::debug!(%error, "cannot encode metrics"),
        }
    }

    /// Encodes on another thread: ten thousand workers are megabytes.
    #[expect(clippy::disallowed_methods, reason = "simulations export no metrics")]
    async fn request(&self, families: Vec<MetricFamily>) -> Result<Request<Bytes>, HttpError> {
        let (scope, resource, is_packed) = (self.scope, self.resource.clone(), self.target.is_packed);
        let encode = move || {
            let body = convert::export(&families, &resource, &scope, SystemTime::now()).encode_to_vec();
            if is_packed { packed(&body) } else { Ok(body) }
        };
        let body = tokio::task::spawn_blocking(encode).await??;
        let mut request = Request::post(self.uri.clone()).body(Bytes::from(body))?;
        let headers = request.headers_mut();
        headers.extend(self.target.headers.iter().cloned());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        if is_packed {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        Ok(request)
    }
}

fn packed(body: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body)?;
    encoder.finish()
}
