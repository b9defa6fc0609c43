//! What drivers of OpenAI-compatible servers share: when such a server is ready, and what it says that it serves.

use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::http::Client;
use super::key::Key;
use super::{DriverError, Probed};
use crate::multiplexer::Model;

/// The pauses between two looks at a server that starts: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The health path of a server whose settings name none.
pub const HEALTH_PATH: &str = "/health";

/// One model and how its server tells that it is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The model.
    pub id: Model,
    /// What `GET /v1/models` has to say: the identity check.
    pub expect: String,
    /// Answers 200 once the model is loaded.
    pub health_path: String,
    /// A path that costs the server nothing and answers 200 once it is ready. The health path decides after any other answer.
    pub ready_path: Option<&'static str>,
    /// What the server wants to be shown.
    pub key: Key,
}

impl Served {
    /// A model whose server calls it by its id and says `/health`.
    pub fn new(id: impl Into<Model>) -> Self {
        let id = id.into();
        let expect = id.to_string();
        Self { id, expect, health_path: HEALTH_PATH.to_owned(), ready_path: None, key: Key::default() }
    }

    /// Talks to its server.
    pub fn client(&self, base: Url) -> Client {
        Client::new(base).with_key(self.key.clone())
    }

    /// One look: whether it is ready and the right one. A server that nobody listens for is an error.
    pub async fn look(&self, client: &Client) -> Result<Probed, DriverError> {
        let health = self.health(client).await?;
        if health == Health::Failed {
            return Ok(Probed::default());
        }
        let model_ids = match model_ids(client).await {
            // Servers such as whisper.cpp's have no list of models. What is loaded there is then known by the health path alone.
            Err(DriverError::Refused { status: 404 | 405, .. }) if health == Health::Passed => {
                return Ok(Probed { ready: true, ..Probed::default() });
            }
            listed => listed?,
        };
        Ok(Probed { ready: self.is_among(&model_ids), model_ids, ..Probed::default() })
    }

    /// Whether anybody is there, ready or not: a server that sleeps, or is busy, is.
    pub async fn reach(&self, client: &Client) -> Result<(), DriverError> {
        client.look(self.ready_path.unwrap_or(&self.health_path)).await.map(|_| ())
    }

    async fn health(&self, client: &Client) -> Result<Health, DriverError> {
        if let Some(path) = self.ready_path
            && check(client, path).await? == Health::Passed
        {
            return Ok(Health::Passed);
        }
        check(client, &self.health_path).await
    }

    /// Waits until it is ready, and fails at once if it is ready and another model. As long as it takes.
    pub async fn become_ready(&self, client: &Client) -> Result<(), DriverError> {
        let (mut pause, mut last) = (FIRST_PAUSE, None);
        loop {
            match self.look(client).await {
                Ok(Probed { ready: true, .. }) => return Ok(()),
                Ok(Probed { model_ids, .. }) if !model_ids.is_empty() => {
                    return Err(DriverError::WrongModel { expected: self.expect.clone(), found: model_ids });
                }
                Ok(Probed { .. }) => {}
                // It has answered, and will not answer otherwise for being asked again.
                Err(error @ DriverError::Refused { status: 400..=407 | 409..=428 | 430..=499, .. }) => {
                    return Err(error);
                }
                Err(error) => {
                    // Once for each reason: nobody hears of it if the wait ends by its time.
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

    /// Asks for one token.
    pub async fn warm(&self, client: &Client) -> Result<(), DriverError> {
        let body = json!({"model": self.expect, "prompt": "Hi", "max_tokens": 1});
        client.tell("/v1/completions", Some(&body)).await?.accepted().map(|_| ())
    }

    /// As [`warm`](Self::warm), without a second attempt.
    pub async fn warm_once(&self, client: &Client) -> Result<(), DriverError> {
        let body = json!({"model": self.expect, "prompt": "Hi", "max_tokens": 1});
        client.tell_once("/v1/completions", Some(&body)).await?.accepted().map(|_| ())
    }

    fn is_among(&self, ids: &[String]) -> bool {
        ids.contains(&self.expect)
    }
}

/// The pause behind this one.
fn after(pause: Duration) -> Duration {
    (pause * 2).min(LONGEST_PAUSE)
}

/// The port that a configured address names.
pub fn port_of(url: Option<&Url>) -> Option<u16> {
    url.and_then(Url::port_or_known_default)
}

/// The result of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    /// It succeeded.
    Passed,
    /// There is no such path: the list of models decides.
    NoPath,
    /// Not now.
    Failed,
}

async fn check(client: &Client, path: &str) -> Result<Health, DriverError> {
    let reply = client.look(path).await?;
    if matches!(reply.status.as_u16(), 401 | 403) {
        return Err(reply.refusal());
    }
    Ok(match reply.status.as_u16() {
        200..=299 => Health::Passed,
        404 | 405 => Health::NoPath,
        _ => Health::Failed,
    })
}

/// What `GET /v1/models` lists.
pub async fn model_ids(client: &Client) -> Result<Vec<String>, DriverError> {
    let reply = client.look("/v1/models").await?.accepted()?;
    let list = reply.json()?;
    let models = list["data"].as_array().ok_or_else(|| reply.unexpected("no list of models"))?;
    Ok(models.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
}

/// The named gauges of a page of Prometheus metrics, each summed over its labels; `None` where one is missing.
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

/// A field of JSON that must be a boolean.
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
    use crate::multiplexer::driver::tests::serve;

    /// A server that shows its models to those who have its key.
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
    async fn a_server_that_refuses_to_show_its_models_is_not_waited_for() {
        for key in [None, Some("wrong")] {
            let error = ready(key).await.unwrap_err();
            assert!(
                matches!(&error, DriverError::Refused { status: 401, said, .. } if said.contains("no key")),
                "{error}"
            );
        }
        assert_eq!(ready(Some("k3y")).await, Ok(()));
    }

    #[tokio::test]
    async fn server_without_a_list_is_judged_by_its_health() {
        let url = serve(Router::new().route("/health", get(async || "ok"))).await;
        let served = Served::new("m");
        assert!(served.look(&served.client(url.clone())).await.unwrap().ready);
        let other_path = Served { health_path: "/ready".to_owned(), ..served };
        let error = other_path.look(&other_path.client(url)).await.unwrap_err();
        assert!(matches!(error, DriverError::Refused { status: 404, .. }), "{error}");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn why_a_model_is_not_ready_is_told_once_for_each_reason() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicUsize, Ordering};

        use modelrelay_harness::own_log::{listen, logged};
        // Asked four times: it says the same twice, then something else, then that it is ready.
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
        let told: Vec<_> = logged().iter().map(|line| line["error"].to_string()).collect();
        assert!(told.len() == 2 && told[0].contains("loading") && told[1].contains("compiling"), "{told:?}");
    }

    #[test]
    fn a_server_that_starts_is_asked_less_and_less_often_up_to_a_limit() {
        let pauses: Vec<_> = std::iter::successors(Some(FIRST_PAUSE), |pause| Some(after(*pause))).take(5).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 2000].map(Duration::from_millis));
    }

    #[test]
    fn gauges_are_summed_over_their_labels_and_over_their_names() {
        let page =
            "# HELP a:running x\na:running{engine=\"0\"} 1.0\na:running{engine=\"1\"} 2\na:waiting 4\na:runningx 9\n";
        assert_eq!(gauges(page, &["a:running", "a:waiting"]), Some(7.0));
        assert_eq!(gauges(page, &["a:running", "a:missing"]), None);
    }
}
