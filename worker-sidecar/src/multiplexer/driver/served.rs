//! What drivers of OpenAI-compatible servers share: when such a server is ready, and what it says that it serves.

use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::http::Client;
use super::{DriverError, Probed};
use crate::multiplexer::Model;

/// The pauses between two looks at a server that starts: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// One model and how its server tells that it is there.
#[derive(Clone, Debug)]
pub struct Served {
    /// The model.
    pub id: Model,
    /// What `GET /v1/models` has to say: the identity check.
    pub expect: String,
    /// Answers 200 once the model is loaded.
    pub health_path: String,
    /// Whether one token is asked for before the model counts as loaded: what is compiled at first use is compiled then.
    pub warm_up: bool,
}

impl Served {
    /// A model whose server calls it by its id, says `/health`, and is not warmed up.
    pub fn new(id: impl Into<Model>) -> Self {
        let id = id.into();
        let expect = id.to_string();
        Self { id, expect, health_path: "/health".to_owned(), warm_up: false }
    }

    /// One look: whether it is ready and the right one. A server that nobody listens for is an error.
    pub async fn look(&self, client: &Client) -> Result<Probed, DriverError> {
        if !is_healthy(client, &self.health_path).await? {
            return Ok(Probed::default());
        }
        let model_ids = model_ids(client).await?;
        Ok(Probed { ready: self.is_among(&model_ids), model_ids, busy: None })
    }

    /// Waits until it is ready, and fails at once if it is ready and another model. As long as it takes.
    pub async fn become_ready(&self, client: &Client) -> Result<(), DriverError> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.look(client).await {
                Ok(Probed { ready: true, .. }) => break,
                Ok(Probed { model_ids, .. }) if !model_ids.is_empty() => {
                    return Err(DriverError::WrongModel { expected: self.expect.clone(), found: model_ids });
                }
                Ok(Probed { .. }) => {}
                Err(error) => tracing::trace!(model = &*self.id, %error, "not ready yet"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        if self.warm_up { self.warm(client).await } else { Ok(()) }
    }

    /// Asks for one token.
    pub async fn warm(&self, client: &Client) -> Result<(), DriverError> {
        let body = json!({"model": self.expect, "prompt": "Hi", "max_tokens": 1});
        client.tell("/v1/completions", Some(&body)).await?.accepted().map(|_| ())
    }

    fn is_among(&self, ids: &[String]) -> bool {
        ids.contains(&self.expect)
    }
}

/// The port that a configured address names.
pub fn port_of(url: Option<&Url>) -> Option<u16> {
    url.and_then(Url::port_or_known_default)
}

/// Whether the health path says so. Servers that have none are asked for their models instead.
async fn is_healthy(client: &Client, path: &str) -> Result<bool, DriverError> {
    let reply = client.look(path).await?;
    // 404 and 405: there is no such path. Whatever else: not now.
    Ok(reply.status.is_success() || matches!(reply.status.as_u16(), 404 | 405))
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
    use super::*;

    #[test]
    fn gauges_are_summed_over_their_labels_and_over_their_names() {
        let page =
            "# HELP a:running x\na:running{engine=\"0\"} 1.0\na:running{engine=\"1\"} 2\na:waiting 4\na:runningx 9\n";
        assert_eq!(gauges(page, &["a:running", "a:waiting"]), Some(7.0));
        assert_eq!(gauges(page, &["a:running", "a:missing"]), None);
    }
}
