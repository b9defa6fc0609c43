//! The common part of the drivers of OpenAI-compatible servers: the readiness check and the list of served models.

use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::http::Client;
use super::key::Key;
use super::{DriverError, Probed};
use crate::Model;

/// The pauses between two probes of a server that is starting: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The health path of a server whose settings name none.
pub const HEALTH_PATH: &str = "/health";

/// One model, and how its server's readiness is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The model.
    pub id: Model,
    /// The id that `GET /v1/models` must list: the identity check.
    pub expect: String,
    /// The path that responds with 200 once the model is loaded.
    pub health_path: String,
    /// A path that costs the server nothing and responds with 200 once it is ready. After any other response, the
    /// health path decides.
    pub ready_path: Option<&'static str>,
    /// The server's API key.
    pub key: Key,
}

impl Served {
    /// Creates a model whose server names it by its id and has `/health`.
    pub fn new(id: impl Into<Model>) -> Self {
        let id = id.into();
        let expect = id.to_string();
        Self { id, expect, health_path: HEALTH_PATH.to_owned(), ready_path: None, key: Key::default() }
    }

    /// Creates a client for its server.
    pub fn client(&self, base: Url) -> Client {
        Client::new(base).with_key(self.key.clone())
    }

    /// Probes once: is the server ready, and does it serve the right model? Returns an error if nothing listens.
    pub async fn probe(&self, client: &Client) -> Result<Probed, DriverError> {
        let health = self.health(client).await?;
        if health == HealthCheck::Failed {
            return Ok(Probed::default());
        }
        let model_ids = match model_ids(client).await {
            // Servers such as whisper.cpp's have no list of models. Only the health path shows whether a model is
            // loaded there.
            Err(DriverError::Refused { status: 404 | 405, .. }) if health == HealthCheck::Passed => {
                return Ok(Probed { ready: true, ..Probed::default() });
            }
            listed => listed?,
        };
        Ok(Probed { ready: self.is_among(&model_ids), model_ids, ..Probed::default() })
    }

    /// Checks that the server responds, ready or not: a sleeping or busy server does.
    pub async fn reach(&self, client: &Client) -> Result<(), DriverError> {
        client.get(self.ready_path.unwrap_or(&self.health_path)).await.map(|_| ())
    }

    async fn health(&self, client: &Client) -> Result<HealthCheck, DriverError> {
        if let Some(path) = self.ready_path
            && check(client, path).await? == HealthCheck::Passed
        {
            return Ok(HealthCheck::Passed);
        }
        check(client, &self.health_path).await
    }

    /// Waits without a timeout until the model is ready. Fails at once if the server is ready and serves another model.
    pub async fn become_ready(&self, client: &Client) -> Result<(), DriverError> {
        let (mut pause, mut last) = (FIRST_PAUSE, None);
        loop {
            match self.probe(client).await {
                Ok(Probed { ready: true, .. }) => return Ok(()),
                Ok(Probed { model_ids, .. }) if !model_ids.is_empty() => {
                    return Err(DriverError::WrongModel { expected: self.expect.clone(), found: model_ids });
                }
                Ok(Probed { .. }) => {}
                // It has responded, and would respond the same to a retry.
                Err(error @ DriverError::Refused { status: 400..=407 | 409..=428 | 430..=499, .. }) => {
                    return Err(error);
                }
                Err(error) => {
                    // Logged once per reason: if the caller times out, the error is not returned.
                    if last.as_ref() != Some(&error) {
                        tracing::info!(model = &*self.id, %error, "not ready yet");
                    }
                    last = Some(error);
                }
            }
            tokio::time::sleep(pause).await;
            pause = after(pause);
        }
    }

    /// Generates one token.
    pub async fn warm(&self, client: &Client) -> Result<(), DriverError> {
        let body = json!({"model": self.expect, "prompt": "Hi", "max_tokens": 1});
        client.post_retrying("/v1/completions", Some(&body)).await?.accepted().map(|_| ())
    }

    /// Like [`warm`](Self::warm), without a retry.
    pub async fn warm_once(&self, client: &Client) -> Result<(), DriverError> {
        let body = json!({"model": self.expect, "prompt": "Hi", "max_tokens": 1});
        client.post_once("/v1/completions", Some(&body)).await?.accepted().map(|_| ())
    }

    fn is_among(&self, ids: &[String]) -> bool {
        ids.contains(&self.expect)
    }
}

/// Returns the pause that follows this one.
fn after(pause: Duration) -> Duration {
    (pause * 2).min(LONGEST_PAUSE)
}

/// Returns the port of a configured URL.
pub fn port_of(url: Option<&Url>) -> Option<u16> {
    url.and_then(Url::port_or_known_default)
}

/// The result of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HealthCheck {
    /// The check succeeded.
    Passed,
    /// The path does not exist: the list of models decides.
    NoPath,
    /// The server is not ready.
    Failed,
}

async fn check(client: &Client, path: &str) -> Result<HealthCheck, DriverError> {
    let reply = client.get(path).await?;
    if matches!(reply.status.as_u16(), 401 | 403) {
        return Err(reply.refusal());
    }
    Ok(match reply.status.as_u16() {
        200..=299 => HealthCheck::Passed,
        404 | 405 => HealthCheck::NoPath,
        _ => HealthCheck::Failed,
    })
}

/// Returns the models that `GET /v1/models` lists.
pub async fn model_ids(client: &Client) -> Result<Vec<String>, DriverError> {
    let reply = client.get("/v1/models").await?.accepted()?;
    let list = reply.json()?;
    let models = list["data"].as_array().ok_or_else(|| reply.unexpected("no list of models"))?;
    Ok(models.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
}

/// Returns the sum of the named gauges of a Prometheus metrics page, over all their labels; `None` if one is missing.
pub fn gauges(page: &str, names: &[&str]) -> Option<f64> {
    let value = |name: &str| {
        let of_it = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.rsplit_once(' ')?;
            (labels.is_empty() || labels.starts_with('{')).then(|| value.parse::<f64>().ok())?
        });
        of_it.reduce(|sum, value| sum + value)
    };
    names.iter().map(|name| value(name)).sum()
}

/// Returns a boolean field of a JSON object.
pub fn flag(value: &Value, name: &str) -> Option<bool> {
    value.get(name)?.as_bool()
}

#[cfg(test)]
mod tests {
    use ::http::{HeaderMap, StatusCode};
    use axum::routing::get;
    use axum::{Json, Router};
    use modelrelay_protocol::secret::Secret;

    use super::*;
    use crate::driver::tests::serve;

    /// Starts a server that lists its models only for requests with its key.
    async fn guarded() -> Url {
        let models = async |headers: HeaderMap| {
            if headers.get("authorization").is_some_and(|key| key == "Bearer k3y") {
                (StatusCode::OK, Json(json!({"data": [{"id": "m"}]})))
            } else {
                (StatusCode::UNAUTHORIZED, Json(json!({"error": "no key"})))
            }
        };
        serve(Router::new().route("/health", get(async || "ok")).route("/v1/models", get(models))).await
    }

    async fn ready(key: Option<&str>) -> Result<(), DriverError> {
        let served = Served { key: Key::new(key.map(Secret::new)), ..Served::new("m") };
        let client = served.client(guarded().await);
        let ready = tokio::time::timeout(Duration::from_secs(10), served.become_ready(&client)).await;
        ready.expect("an answer at once")
    }

    #[tokio::test]
    async fn server_refusing_model_list_is_not_awaited() {
        for key in [None, Some("wrong")] {
            let error = ready(key).await.unwrap_err();
            assert!(
                matches!(&error, DriverError::Refused { status: 401, message, .. } if message.contains("no key")),
                "{error}"
            );
        }
        assert_eq!(ready(Some("k3y")).await, Ok(()));
    }

    #[tokio::test]
    async fn server_without_list_is_judged_by_health() {
        let url = serve(Router::new().route("/health", get(async || "ok"))).await;
        let served = Served::new("m");
        assert!(served.probe(&served.client(url.clone())).await.unwrap().ready);
        let other_path = Served { health_path: "/ready".to_owned(), ..served };
        let error = other_path.probe(&other_path.client(url)).await.unwrap_err();
        assert!(matches!(error, DriverError::Refused { status: 404, .. }), "{error}");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn each_reason_for_unreadiness_is_logged_once() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicUsize, Ordering};

        use modelrelay_harness::own_log::{listen, logged};
        // Probed four times: the same error twice, then another one, then ready.
        let looks = Arc::new(AtomicUsize::new(0));
        let models = move || {
            let answer = match looks.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({"error": "loading"}))),
                2 => (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({"error": "compiling"}))),
                _ => (StatusCode::OK, Json(json!({"data": [{"id": "m"}]}))),
            };
            std::future::ready(answer)
        };
        let url = serve(Router::new().route("/v1/models", get(models))).await;
        let served = Served::new("m");
        listen();
        served.become_ready(&served.client(url)).await.unwrap();
        let errors: Vec<_> = logged().iter().map(|line| line["error"].to_string()).collect();
        assert!(errors.len() == 2 && errors[0].contains("loading") && errors[1].contains("compiling"), "{errors:?}");
    }

    #[test]
    fn probe_pause_of_starting_server_grows_to_limit() {
        let pauses: Vec<_> = std::iter::successors(Some(FIRST_PAUSE), |pause| Some(after(*pause))).take(5).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 2000].map(Duration::from_millis));
    }

    #[test]
    fn gauges_are_summed_over_labels_and_names() {
        let page =
            "# HELP a:running x\na:running{engine=\"0\"} 1.0\na:running{engine=\"1\"} 2\na:waiting 4\na:runningx 9\n";
        assert_eq!(gauges(page, &["a:running", "a:waiting"]), Some(7.0));
        assert_eq!(gauges(page, &["a:running", "a:missing"]), None);
    }
}
