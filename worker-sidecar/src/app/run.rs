//! The start and the end of a worker.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_platform::{log, readiness, scheduling};

use crate::app::demo::{self, DemoArgs};
use crate::settings::{self, Args, SettingError, Settings};
use crate::shutdown::{self, Cause, DrainOrder};
use crate::worker::Worker;
use crate::{probe, relays, telemetry};

/// Runs the worker until a signal. Errors of the settings end it with one line and exit code 1.
pub fn run(args: &Args) -> ExitCode {
    let settings = match Settings::load(args) {
        Ok(settings) => settings,
        Err(error) => return fail(&error),
    };
    telemetry::init(&settings.log_filter, settings.log_format);
    run_to_end(serve(args, settings))
}

/// Runs the demo backend until a signal.
pub fn run_demo(args: &Args, demo: DemoArgs) -> ExitCode {
    match settings::log_settings(args) {
        Ok((filter, format)) => telemetry::init(&filter, format),
        Err(error) => return fail(&error),
    }
    run_to_end(async {
        let listen = demo.listen.to_string();
        demo::run(demo).await.map_err(|error| SettingError::new("--listen", listen, error.to_string()))
    })
}

/// Runs `work` on a single thread, which forwards more tokens than any model generates; two threads would wake each
/// other, and each token would cost more. Slow work, such as a driver's commands, has its own threads. tokio's
/// multi-threaded scheduler with one thread would run a link's writer after each token, while this one lets it write
/// all tokens that are available.
fn run_to_end(work: impl Future<Output = Result<(), SettingError>>) -> ExitCode {
    scheduling::use_batch_scheduling();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&SettingError::hidden("runtime", error.to_string())),
    };
    let ended = runtime.block_on(work);
    log::finish();
    match ended {
        Ok(()) => {
            // The remaining tasks have nothing to finish.
            runtime.shutdown_background();
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

fn fail(error: &SettingError) -> ExitCode {
    log::print_error(&error.to_string());
    ExitCode::FAILURE
}

async fn serve(args: &Args, settings: Settings) -> Result<(), SettingError> {
    let first_signal = shutdown::first_signal().map_err(|error| SettingError::hidden("signals", error.to_string()))?;
    let listener = probe::bind(settings.probe).await?;
    let worker = Arc::new(Worker::new(settings)?);
    let metric_export = worker.start_metric_export()?;
    tokio::spawn(probe::serve(listener, Arc::clone(&worker)));
    if let Some(path) = args.config.clone() {
        let (apply, refuse) = (Arc::clone(&worker), Arc::clone(&worker));
        let args = args.clone();
        tokio::spawn(async move {
            settings::watch(args, path, |settings| apply.apply(settings), |error| refuse.refuse(error)).await;
        });
    }
    // `systemctl start` returns here, and fails if the settings are wrong. Waiting for an unavailable relay comes
    // afterwards.
    readiness::report();
    work(&worker, first_signal).await;
    let last_metrics = async {
        if let Some(export) = metric_export {
            export.shutdown().await;
        }
    };
    let last_traces = async {
        if let Some(traces) = worker.traces.clone() {
            traces.shutdown().await;
        }
    };
    tokio::join!(last_metrics, last_traces);
    Ok(())
}

/// Connects to the relays and serves requests, until `signal` resolves with its name and running requests have had
/// their time.
pub async fn work(worker: &Arc<Worker>, signal: impl Future<Output = &'static str>) {
    worker.serving.run();
    tokio::spawn(relays::run(Arc::clone(worker)));
    worker.spawn_upkeep();
    stop(worker, signal.await).await;
}

async fn stop(worker: &Worker, signal: &str) {
    tracing::info!(signal, "signal received");
    let order = worker.begin_drain(Cause::Signal, worker.settings.shutdown_timeout);
    end_links(worker, order).await;
    // Nothing is running any more. Only the worker's own backends are left, which must not outlive it.
    worker.serving.stop(order.deadline.saturating_duration_since(Instant::now())).await;
}

async fn end_links(worker: &Worker, order: DrainOrder) {
    let mut unlinked = worker.unlinked.subscribe();
    let idle = unlinked.wait_for(|unlinked| *unlinked);
    if tokio::time::timeout_at(order.deadline.into(), idle).await.is_ok() {
        return tracing::info!("graceful shutdown complete");
    }
    let links = worker.links.all();
    let severed: usize = links.iter().map(|link| link.cancel_all()).sum();
    tracing::warn!(severed, "drain timeout reached");
    for link in &links {
        link.close(1000, "graceful shutdown timed out");
    }
    // Long enough for the close frames, too short to matter.
    let _ = tokio::time::timeout(Duration::from_millis(500), unlinked.wait_for(|unlinked| *unlinked)).await;
}
