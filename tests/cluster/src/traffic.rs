//! Clients that keep a Service busy while its Pods change.
//!
//! Every client sends one streaming request after the other, by default each over its own connection, so that the
//! Service selects a Pod each time. It checks the demo backend's response word by word: the backend repeats the prompt,
//! which differs from request to request, so a truncated, duplicated or foreign response is detected. Nothing is
//! retried here: the tests count the requests that a user's SDK would have to retry.

mod exchange;
mod mixed;

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinSet, time::Instant};

use crate::{TEST_TIMEOUT, tls::Trust};
pub use exchange::Outcome;
use exchange::{Exchange, Stage};
pub use mixed::Mixed;

/// Settings of the clients.
#[must_use]
#[derive(Debug, Clone)]
pub struct Traffic {
    service: SocketAddr,
    streams: usize,
    words: usize,
    api_key: Option<String>,
    model: String,
    keeps_connections: bool,
    trust: Option<Trust>,
}

/// Running clients. Dropping them ends them and their requests at once.
#[derive(Debug)]
pub struct Running {
    clients: JoinSet<()>,
    counts: watch::Receiver<Counts>,
    stop: watch::Sender<bool>,
}

/// The results of the requests so far.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Requests whose response has begun and not ended.
    pub underway: usize,
    /// Requests with a complete and correct response.
    pub answered: usize,
    /// Requests that were rejected before a response began, in a way that every SDK retries.
    pub retryable: Vec<String>,
    /// Responses that ended prematurely, as the client received them.
    pub cut: Vec<String>,
    /// All other failures: rejections that SDKs do not retry, wrong responses, timeouts.
    pub failed: Vec<String>,
}

impl Traffic {
    /// Ten clients of the demo model at this address, whose responses take about three seconds each.
    pub fn to(service: SocketAddr) -> Self {
        let model = crate::manifests::DEMO_MODEL.to_owned();
        Self { service, streams: 10, words: 60, api_key: None, model, keeps_connections: false, trust: None }
    }

    /// Sets the number of clients.
    pub fn streams(self, streams: usize) -> Self {
        Self { streams, ..self }
    }

    /// Sets the number of words to repeat, at most 80, in addition to the 13 introductory ones. At 40 ms each, this
    /// sets the duration of responses.
    pub fn words(self, words: usize) -> Self {
        Self { words, ..self }
    }

    /// Makes each client keep its connection for as long as the server does, as SDKs do.
    pub fn kept(self) -> Self {
        Self { keeps_connections: true, ..self }
    }

    /// Makes the clients use TLS.
    pub fn trusting(self, trust: &Trust) -> Self {
        Self { trust: Some(trust.clone()), ..self }
    }

    /// Sets the API key.
    pub fn api_key(self, key: &str) -> Self {
        Self { api_key: Some(key.to_owned()), ..self }
    }

    /// Sets the model name, such as an alias.
    pub fn model(self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self }
    }

    /// Starts the clients.
    #[must_use]
    pub fn start(self) -> Running {
        let (count, counts) = watch::channel(Counts::default());
        let (stop, stopped) = watch::channel(false);
        let (count, settings) = (Arc::new(count), Arc::new(self));
        let mut clients = JoinSet::new();
        for client in 0..settings.streams {
            clients.spawn(send_until(stopped.clone(), client, settings.clone(), count.clone()));
        }
        Running { clients, counts, stop }
    }
}

impl Running {
    /// Returns the results so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts.borrow().clone()
    }

    /// Waits until this number of responses is being streamed at once.
    pub async fn wait_for_underway(&self, number: usize) {
        self.wait_for(&format!("{number} answers at once"), |counts| counts.underway >= number).await;
    }

    /// Waits for this number of further responses: time for the effects of a change to appear.
    pub async fn wait_for_answers(&self, number: usize) {
        let goal = self.counts().answered + number;
        self.wait_for(&format!("{number} further answers"), |counts| counts.answered >= goal).await;
    }

    /// Lets every client finish its request, and returns the results.
    pub async fn finish(mut self) -> Counts {
        self.stop.send_replace(true);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("a client does not panic");
        }
        let counts = self.counts();
        // Shown by `--success-output immediate`, with the name of the test: the figures of
        // docs/kubernetes/operations.md.
        eprintln!("{counts}");
        counts
    }

    async fn wait_for(&self, what: &str, condition: impl FnMut(&Counts) -> bool) {
        let mut counts = self.counts.clone();
        let waited = tokio::time::timeout(TEST_TIMEOUT, counts.wait_for(condition)).await;
        assert!(waited.is_ok(), "timed out after {TEST_TIMEOUT:?} waiting for {what}: {}", self.counts());
    }
}

impl Counts {
    /// Panics unless every request succeeded.
    pub fn expect_all_answered(&self) {
        assert!(self.has_no_failure() && self.answered > 0, "not every request was answered: {self}");
    }

    /// True if no request failed in any way.
    #[must_use]
    pub fn has_no_failure(&self) -> bool {
        self.retryable.is_empty() && self.cut.is_empty() && self.failed.is_empty()
    }

    /// Panics if a request failed in a way that no client retries, or if none succeeded. Truncated responses are
    /// allowed.
    pub fn expect_no_final_failure(&self) {
        assert!(self.failed.is_empty() && self.answered > 0, "requests failed for good: {self}");
    }

    fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Answered => self.answered += 1,
            Outcome::Retryable(why) => self.retryable.push(why),
            Outcome::Cut(why) => self.cut.push(why),
            Outcome::Failed(why) => self.failed.push(why),
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered, {} underway", self.answered, self.underway)?;
        for (what, cases) in [("retryable", &self.retryable), ("cut off", &self.cut), ("failed", &self.failed)] {
            write!(f, "; {} {what}", cases.len())?;
            // Most are alike.
            cases.iter().take(5).try_for_each(|case| write!(f, "\n    {case}"))?;
        }
        Ok(())
    }
}

/// Runs one client. It pauses after each failed request, because a Service without endpoints rejects thousands a
/// second.
async fn send_until(
    stopped: watch::Receiver<bool>,
    client: usize,
    settings: Arc<Traffic>,
    count: Arc<watch::Sender<Counts>>,
) {
    let mut kept = None;
    for request in 0.. {
        if *stopped.borrow() {
            return;
        }
        let exchange = Exchange::new(&settings, &format!("c{client}r{request}"));
        let mut began = false;
        let started = Instant::now();
        let outcome = exchange.run(&mut kept, |stage| match stage {
            Stage::Begun => {
                began = true;
                count.send_modify(|counts| counts.underway += 1);
            }
        });
        let outcome = outcome.await.after(started.elapsed());
        let pause = !matches!(outcome, Outcome::Answered);
        kept = kept.filter(|_| settings.keeps_connections && !pause);
        count.send_modify(|counts| {
            counts.underway -= usize::from(began);
            counts.add(outcome);
        });
        if pause {
            #[expect(clippy::disallowed_methods, reason = "the pace of a client")]
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

#[cfg(test)]
mod tests;
