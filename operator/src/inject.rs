//! Injection: the webhook that puts a worker into Pods that carry a pool's label.
//!
//! The API server asks it about such Pods only, by the configuration's object selector; so when no operator answers,
//! unlabelled Pods are created as ever. Everything here reads the Pod as raw JSON and answers with the difference between
//! what came and what should be: a Pod with fields that this program has never heard of keeps them.
//!
//! Nothing is remembered and nothing is written, so a dry run is a run like any other. The pool is asked for at the API
//! server each time, because a cache would refuse the Pods of a pool that was created one line above them.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::StatusCode;
use kube::{Api, Client};
use tracing::{debug, info, warn};

use crate::crd::WorkerPool;
use crate::defaults::WorkerDefaults;
use crate::intake::{Intake, Refused};
use decide::{Decision, Lookup, Question};
use review::Review;

pub mod decide;
pub mod review;
pub mod server;

/// Where the API server posts its reviews.
pub const PATH: &str = "/mutate-pods";
/// Every value of the label `result` of `modelrelay_operator_injections_total`.
pub const RESULTS: [&str; 5] = ["injected", "gated", "refused", "skipped", "error"];

/// The API server takes requests of 3 MiB; a review of a Pod's creation has it once, as JSON, and little else.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Ten thousand objects, with a name and a value each: a Pod has some hundreds. Parsed they are 8 MiB, and as much again
/// when the Pod is changed.
const MAX_COST: u32 = 100_000;
/// Large reviews that are read, and the costliest that are parsed and judged, at the same time.
const AT_ONCE: usize = 4;
/// For the pool. The chart gives the webhook 5 s, and an answer that says what is wrong is worth more than a timeout.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);
/// For the whole answer, a slow sender included.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(4500);

/// What the webhook needs.
#[derive(Clone)]
pub struct Webhook {
    /// To ask for pools.
    pub client: Client,
    /// What pools leave out.
    pub defaults: Arc<WorkerDefaults>,
    /// Told one of [`RESULTS`] for each answer.
    pub observe: Arc<dyn Fn(&'static str) + Send + Sync>,
}

/// The webhook's one route.
pub fn router(webhook: Webhook) -> Router {
    let intake = Intake::new(MAX_BODY_BYTES, MAX_COST, AT_ONCE, AT_ONCE);
    Router::new()
        .route(PATH, post(mutate))
        .layer(axum::middleware::from_fn(within_time))
        .with_state(Arc::new(Served { webhook, intake }))
}

/// A fresh drain token: 128 bits, in hexadecimal.
pub fn token() -> String {
    let mut bytes = [0_u8; 16];
    // Without a source of randomness the token would be no secret; every system that runs this has one.
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Served {
    webhook: Webhook,
    intake: Intake,
}

async fn within_time(request: Request, next: axum::middleware::Next) -> Response {
    match tokio::time::timeout(ANSWER_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            (StatusCode::GATEWAY_TIMEOUT, "the review did not arrive, or was not decided, in time").into_response()
        }
    }
}

async fn mutate(State(served): State<Arc<Served>>, request: Request) -> Response {
    let webhook = &served.webhook;
    let refuse = |status: StatusCode, why: String| {
        (webhook.observe)("error");
        warn!(error = why, "a request is no review that this webhook understands");
        (status, why).into_response()
    };
    // Held until the answer: what is parsed from it lives as long.
    let body = match served.intake.read(request.into_body()).await {
        Ok(body) => body,
        Err(why @ Refused::BrokenOff) => return refuse(StatusCode::BAD_REQUEST, format!("the body {why}")),
        Err(why @ (Refused::TooLong | Refused::TooManyValues)) => {
            return refuse(StatusCode::PAYLOAD_TOO_LARGE, format!("the body {why}"));
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
            warn!(namespace = review.namespace(), pod = review.name(), %error, "a Pod could not be judged");
            // No review: so the configuration's failurePolicy decides, as for any webhook that is out of order.
            (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

async fn decide(webhook: &Webhook, review: &Review) -> Result<Decision, LookupError> {
    let pool = match decide::question(review) {
        Question::Settled(decision) => return Ok(decision),
        Question::Pool(name) => name,
    };
    let namespace = review.namespace();
    let lookup = if decide::may_exist(namespace, pool) {
        lookup(&webhook.client, namespace, pool).await?
    } else {
        Lookup::Missing
    };
    Ok(decide::decide(review, pool, &lookup, &webhook.defaults, &token()))
}

/// Why it is not known whether there is a pool.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// The API server did not answer.
    #[error("WorkerPool {namespace}/{pool} could not be asked for within {} s", LOOKUP_TIMEOUT.as_secs())]
    Timeout {
        /// Where.
        namespace: String,
        /// Which.
        pool: String,
    },
    /// It answered with something else.
    #[error("WorkerPool {namespace}/{pool} could not be read: {}", said(.source))]
    Failed {
        /// Where.
        namespace: String,
        /// Which.
        pool: String,
        /// What was said.
        source: Box<kube::Error>,
    },
}

/// What the API server said; kube's own text repeats the whole status.
pub(crate) fn said(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error
        && !status.message.is_empty()
    {
        return status.message.clone();
    }
    error.to_string()
}

async fn lookup(client: &Client, namespace: &str, pool: &str) -> Result<Lookup, LookupError> {
    let api = Api::<WorkerPool>::namespaced(client.clone(), namespace);
    let names = || (namespace.to_owned(), pool.to_owned());
    match tokio::time::timeout(LOOKUP_TIMEOUT, api.get_opt(pool)).await {
        Ok(Ok(Some(pool))) => Ok(Lookup::Found(Box::new(pool))),
        Ok(Ok(None)) => Ok(Lookup::Missing),
        Ok(Err(source)) => {
            let (namespace, pool) = names();
            Err(LookupError::Failed { namespace, pool, source: Box::new(source) })
        }
        Err(_) => {
            let (namespace, pool) = names();
            Err(LookupError::Timeout { namespace, pool })
        }
    }
}

fn log(review: &Review, decision: &Decision) {
    let (namespace, pod) = (review.namespace(), review.name());
    match decision {
        Decision::Unchanged(why) => debug!(namespace, pod, why, "a Pod stays as it is"),
        Decision::Injected { .. } => debug!(namespace, pod, "a worker was put into a Pod"),
        Decision::Gated { message, .. } => info!(namespace, pod, why = message, "a Pod waits for its pool"),
        Decision::Refused(why) => info!(namespace, pod, why, "a Pod was refused"),
    }
}

#[cfg(test)]
mod tests;
