//! The webhook of one replica: its server, its certificate, and its readiness.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::probe::Readiness;
use super::{RunError, listen};
use crate::context::Context;
use crate::settings::cli::RunArgs;
use crate::webhook::certs::{self, Certificates, Policy, Settings};
use crate::webhook::inject;

/// The interval at which the metric of the certificate's expiry is updated.
const METRIC_INTERVAL: Duration = Duration::from_secs(10);

/// The webhook, running or disabled.
pub(super) struct WebhookServer {
    running: Option<Running>,
}

struct Running {
    certificates: Arc<Certificates>,
    shutdown: CancellationToken,
    server: JoinHandle<Result<(), rustls::Error>>,
    helpers: Vec<JoinHandle<()>>,
}

impl WebhookServer {
    /// Starts serving, if the webhook is enabled. Handshakes fail until there is a certificate.
    pub(super) async fn start(args: &RunArgs, context: &Arc<Context>) -> Result<Self, RunError> {
        if args.webhook_configuration.is_empty() {
            return Ok(Self { running: None });
        }
        let listener = listen("--webhook-listen-addr", args.webhook_listen_addr)?;
        let certificates = Arc::new(Certificates::default());
        let shutdown = CancellationToken::new();
        let observer = context.clone();
        let router = inject::router(inject::Webhook {
            client: context.client.clone(),
            defaults: Arc::new(context.defaults.worker.clone()),
            namespaces: context.namespaces.clone(),
            observe: Arc::new(move |result| observer.metrics.injections.with_label_values(&[result]).inc()),
        });
        let served =
            inject::server::serve(listener, router, certificates.clone(), args.shutdown_grace, shutdown.clone());
        let reader = certs::run_reader(context.client.clone(), settings(args), certificates.clone());
        let helpers = vec![tokio::spawn(reader), tokio::spawn(show_expiry(context.clone(), certificates.clone()))];
        Ok(Self { running: Some(Running { certificates, shutdown, server: tokio::spawn(served), helpers }) })
    }

    /// Returns the readiness check: without a certificate, the API server's reviews would fail here.
    pub(super) fn readiness(&self) -> Readiness {
        let Some(running) = &self.running else { return Arc::new(|| Ok(())) };
        let certificates = running.certificates.clone();
        Arc::new(
            move || {
                if certificates.is_ready() { Ok(()) } else { Err("the webhook has no certificate yet".to_owned()) }
            },
        )
    }

    /// Returns the leader's management of the certificates, which does nothing if they come from elsewhere.
    pub(super) fn manage(
        &self,
        args: &RunArgs,
        client: &Client,
        leading: watch::Receiver<bool>,
    ) -> BoxFuture<'static, ()> {
        if self.running.is_none() || args.external_certificates {
            return std::future::pending().boxed();
        }
        let policy = Policy::of(args.certificate_lifetime);
        certs::run_manager(client.clone(), settings(args), policy, leading).boxed()
    }

    /// Serves for the grace period, then ends.
    pub(super) async fn finish(self) {
        let Some(running) = self.running else { return };
        running.shutdown.cancel();
        match running.server.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "failed to serve the webhook"),
            Err(error) => tracing::error!(%error, "webhook server failed"),
        }
        for helper in running.helpers {
            helper.abort();
        }
    }
}

fn settings(args: &RunArgs) -> Settings {
    Settings {
        namespace: args.namespace.clone(),
        secret: args.certificate_secret.clone(),
        service: args.webhook_service.clone(),
        configuration: args.webhook_configuration.clone(),
    }
}

async fn show_expiry(context: Arc<Context>, certificates: Arc<Certificates>) {
    loop {
        let seconds = certificates.expires_at().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        let seconds = seconds.and_then(|since| i64::try_from(since.as_secs()).ok()).unwrap_or_default();
        context.metrics.certificate_expiry.set(seconds);
        tokio::time::sleep(METRIC_INTERVAL).await;
    }
}
