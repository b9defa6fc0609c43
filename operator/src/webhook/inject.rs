//! Injection: the webhook that adds a worker to Pods that carry a pool's label.
//!
//! The object selector of the webhook configuration restricts it to such Pods, so unlabelled Pods are created as usual
//! while no operator responds. A second rule sends the unlabelled Pods of namespaces that opted in, which pools may
//! select by other labels. The webhook reads the Pod as raw JSON and responds with the difference between the
//! received and the desired Pod, so fields that this program does not know are preserved.
//!
//! The webhook keeps no state and writes nothing, so a dry run is a run like any other. It reads the pool from the API
//! server each time, because a cache would reject the Pods of a pool that was created one line above them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::StatusCode;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use tracing::{debug, info, warn};

use crate::crd::WorkerPool;
use crate::net::intake::{Intake, Refused};
use crate::resources::namespaces::Namespaces;
use crate::settings::defaults::WorkerDefaults;
use decide::{Lookup, Question};
use review::{AdmissionDecision, Review};

pub mod decide;
pub mod review;
pub mod server;

/// The path to which the API server posts its reviews.
pub const PATH: &str = "/mutate-pods";
/// Every value of the label `result` of `modelrelay_operator_injections_total`.
pub const RESULTS: [&str; 5] = ["injected", "gated", "refused", "skipped", "error"];

/// The API server accepts requests of 3 MiB; a review of a Pod's creation contains the Pod once, as JSON, and little
/// else.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Ten thousand objects, with a name and a value each: a Pod has some hundreds. Parsed, they take 8 MiB, and as much
/// again when the Pod is changed.
const MAX_COST: u32 = 100_000;
/// The number of large reviews that are read at the same time, and of the costliest ones that are parsed and decided.
const AT_ONCE: usize = 4;
/// The name in errors about all pools of a namespace.
const ANY_POOL: &str = "*";
/// The timeout for reading the pool. The chart gives the webhook 5 s, and a response that names the problem is better
/// than a timeout.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout for the whole response, a slow sender included.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(4500);

/// The webhook's dependencies.
#[derive(Clone)]
pub struct Webhook {
    /// The client that reads pools.
    pub client: Client,
    /// Defaults for fields that pools omit.
    pub defaults: Arc<WorkerDefaults>,
    /// The namespaces in which the cluster assigns the ids of Pods.
    pub namespaces: Arc<Namespaces>,
    /// Receives one of [`RESULTS`] for each response.
    pub observe: Arc<dyn Fn(&'static str) + Send + Sync>,
}

/// Returns the router with the webhook's one route.
pub fn router(webhook: Webhook) -> Router {
    let intake = Intake::new(MAX_BODY_BYTES, MAX_COST, AT_ONCE, AT_ONCE);
    Router::new()
        .route(PATH, post(mutate))
        .layer(axum::middleware::from_fn(within_time))
        .with_state(Arc::new(WebhookState { webhook, intake }))
}

/// Returns a new drain token: 128 bits, in hexadecimal.
pub fn token() -> String {
    let mut bytes = [0_u8; 16];
    // Without a source of randomness the token would not be secret. Every supported system has one.
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct WebhookState {
    webhook: Webhook,
    intake: Intake,
}

async fn within_time(request: Request, next: axum::middleware::Next) -> Response {
    match tokio::time::timeout(ANSWER_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => (StatusCode::GATEWAY_TIMEOUT, "the review was not received and decided in time").into_response(),
    }
}

async fn mutate(State(served): State<Arc<WebhookState>>, request: Request) -> Response {
    let webhook = &served.webhook;
    let refuse = |status: StatusCode, why: String| {
        (webhook.observe)("error");
        warn!(error = why, "invalid admission review");
        (status, why).into_response()
    };
    // Held until the response: everything parsed from it lives as long.
    let body = match served.intake.read(request.into_body()).await {
        Ok(body) => body,
        Err(why @ Refused::BrokenOff) => return refuse(StatusCode::BAD_REQUEST, format!("body {why}")),
        Err(why @ (Refused::TooLong | Refused::TooManyValues)) => {
            return refuse(StatusCode::PAYLOAD_TOO_LARGE, format!("body {why}"));
        }
    };
    let review = match Review::parse(&body.bytes) {
        Ok(review) => review,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, error.to_string()),
    };
    match decide(webhook, &review).await {
        Ok(decision) => {
            (webhook.observe)(decision.result());
            log(&review, &decision);
            axum::Json(review.answer(&decision)).into_response()
        }
        Err(error) => {
            (webhook.observe)("error");
            warn!(namespace = review.namespace(), pod = review.name(), %error, "admission review failed");
            // The response is not a review, so the configuration's failurePolicy decides, as for any webhook that
            // fails.
            (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

async fn decide(webhook: &Webhook, review: &Review) -> Result<AdmissionDecision, LookupError> {
    let pool = match decide::question(review) {
        Question::Settled(decision) => return Ok(decision),
        Question::Pool(name) => name,
        Question::Selection(labels) => return decide_selected(webhook, review, &labels).await,
    };
    let namespace = review.namespace();
    let (lookup, assigns_ids) = if decide::may_exist(namespace, pool) {
        let (lookup, assigns_ids) =
            tokio::join!(lookup(&webhook.client, namespace, pool), webhook.namespaces.assigns_ids(namespace));
        (lookup?, assigns_ids)
    } else {
        (Lookup::Missing, false)
    };
    let defaults = webhook.defaults.for_namespace(assigns_ids);
    Ok(decide::decide(review, pool, &lookup, &defaults, &token()))
}

/// Decides on a Pod in a namespace whose pools may select it by its labels.
async fn decide_selected(
    webhook: &Webhook,
    review: &Review,
    labels: &BTreeMap<String, String>,
) -> Result<AdmissionDecision, LookupError> {
    let namespace = review.namespace();
    if !decide::is_namespace(namespace) {
        return Ok(AdmissionDecision::Unchanged("no such namespace"));
    }
    let (pools, assigns_ids) =
        tokio::join!(pools(&webhook.client, namespace), webhook.namespaces.assigns_ids(namespace));
    let defaults = webhook.defaults.for_namespace(assigns_ids);
    Ok(decide::decide_selected(review, labels, &pools?, &defaults, &token()))
}

/// The reason that a pool's existence could not be determined.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// The API server did not respond.
    #[error("failed to read WorkerPool {namespace}/{pool}: no response within {} s", LOOKUP_TIMEOUT.as_secs())]
    Timeout {
        /// The namespace.
        namespace: String,
        /// The pool's name.
        pool: String,
    },
    /// The API server responded with an error.
    #[error("failed to read WorkerPool {namespace}/{pool}: {}", api_message(.source))]
    Failed {
        /// The namespace.
        namespace: String,
        /// The pool's name.
        pool: String,
        /// The underlying error.
        source: Box<kube::Error>,
    },
}

/// Returns the API server's message; kube's own text repeats the whole status.
pub(crate) fn api_message(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error
        && !status.message.is_empty()
    {
        return status.message.clone();
    }
    error.to_string()
}

async fn lookup(client: &Client, namespace: &str, pool: &str) -> Result<Lookup, LookupError> {
    let api = Api::<WorkerPool>::namespaced(client.clone(), namespace);
    let found = in_time(namespace, pool, api.get_opt(pool)).await?;
    Ok(found.map_or(Lookup::Missing, |pool| Lookup::Found(Box::new(pool))))
}

/// Returns the pools of a namespace that can be parsed: another one must not block the Pods of all.
async fn pools(client: &Client, namespace: &str) -> Result<Vec<WorkerPool>, LookupError> {
    let api = Api::<DeserializeGuard<WorkerPool>>::namespaced(client.clone(), namespace);
    let pools = in_time(namespace, ANY_POOL, api.list(&ListParams::default())).await?;
    Ok(pools.items.into_iter().filter_map(|pool| pool.0.ok()).collect())
}

/// Waits for a response of the API server, for [`LOOKUP_TIMEOUT`] at most.
async fn in_time<T>(
    namespace: &str,
    pool: &str,
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, LookupError> {
    let names = || (namespace.to_owned(), pool.to_owned());
    match tokio::time::timeout(LOOKUP_TIMEOUT, response).await {
        Ok(response) => response.map_err(|source| {
            let (namespace, pool) = names();
            LookupError::Failed { namespace, pool, source: Box::new(source) }
        }),
        Err(_) => {
            let (namespace, pool) = names();
            Err(LookupError::Timeout { namespace, pool })
        }
    }
}

fn log(review: &Review, decision: &AdmissionDecision) {
    let (namespace, pod) = (review.namespace(), review.name());
    match decision {
        AdmissionDecision::Unchanged(why) => debug!(namespace, pod, why, "Pod unchanged"),
        AdmissionDecision::Injected { .. } => debug!(namespace, pod, "worker injected"),
        AdmissionDecision::Gated { message, .. } => {
            info!(namespace, pod, why = message, "Pod gated until its pool exists");
        }
        AdmissionDecision::Refused(why) => info!(namespace, pod, why, "Pod rejected"),
    }
}

#[cfg(test)]
mod tests;
