//! Clients that keep a Service busy while something happens to what is behind it.
//!
//! Every client sends one streaming request after the other, each over a connection of its own (so that the Service
//! chooses anew), and checks the demo backend's answer word by word: the backend repeats the prompt, which differs from
//! request to request, so an answer that is cut, doubled or somebody else's is noticed. Nothing is retried here: what a
//! user's SDK would have to retry is what the tests count.

mod exchange;

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinSet, time::Instant};

use crate::PATIENCE;
pub use exchange::Outcome;
use exchange::{Exchange, Stage};

/// Settings of the clients.
#[must_use]
#[derive(Debug, Clone)]
pub struct Traffic {
    service: SocketAddr,
    streams: usize,
    words: usize,
    api_key: Option<String>,
    model: String,
}

/// Clients at work. Dropping them ends them, and their requests, at once.
#[derive(Debug)]
pub struct Running {
    clients: JoinSet<()>,
    counts: watch::Receiver<Counts>,
    stop: watch::Sender<bool>,
}

/// What became of the requests so far.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Requests whose answer has begun and not ended.
    pub underway: usize,
    /// Requests that were answered wholly, word by word.
    pub answered: usize,
    /// Requests that were turned away before an answer began, in a way that every SDK retries.
    pub retryable: Vec<String>,
    /// Answers that broke off after they had begun; how they read to the client.
    pub cut: Vec<String>,
    /// Everything else: refusals that nobody retries, wrong answers, silence.
    pub failed: Vec<String>,
}

impl Traffic {
    /// Ten clients of the demo model at this address, whose answers take about three seconds each.
    pub fn to(service: SocketAddr) -> Self {
        Self { service, streams: 10, words: 60, api_key: None, model: crate::manifests::DEMO_MODEL.to_owned() }
    }

    /// So many clients at once.
    pub fn streams(self, streams: usize) -> Self {
        Self { streams, ..self }
    }

    /// So many words to repeat, at most 80, on top of the 13 that introduce them: at 40 ms each, how long answers take.
    pub fn words(self, words: usize) -> Self {
        Self { words, ..self }
    }

    /// A client key to present.
    pub fn api_key(self, key: &str) -> Self {
        Self { api_key: Some(key.to_owned()), ..self }
    }

    /// Another model name, such as an alias.
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
    /// What became of the requests so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts.borrow().clone()
    }

    /// Waits until so many answers are being streamed at once.
    pub async fn wait_for_underway(&self, number: usize) {
        self.wait_for(&format!("{number} answers at once"), |counts| counts.underway >= number).await;
    }

    /// Waits until so many further requests are answered: time for what a change did to show.
    pub async fn wait_for_answers(&self, number: usize) {
        let goal = self.counts().answered + number;
        self.wait_for(&format!("{number} further answers"), |counts| counts.answered >= goal).await;
    }

    /// Lets every client finish its request, and gives the counts.
    pub async fn finish(mut self) -> Counts {
        self.stop.send_replace(true);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("a client does not panic");
        }
        self.counts()
    }

    async fn wait_for(&self, what: &str, condition: impl FnMut(&Counts) -> bool) {
        let mut counts = self.counts.clone();
        let waited = tokio::time::timeout(PATIENCE, counts.wait_for(condition)).await;
        assert!(waited.is_ok(), "waited {PATIENCE:?} in vain for {what}: {}", self.counts());
    }
}

impl Counts {
    /// Panics unless every request was answered.
    pub fn expect_all_answered(&self) {
        let only_answers = self.retryable.is_empty() && self.cut.is_empty() && self.failed.is_empty();
        assert!(only_answers && self.answered > 0, "not every request was answered: {self}");
    }

    /// Panics when a request failed in a way that no client retries, or when none was answered. Broken answers may be.
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

/// One client. After a request that was not answered it pauses: a Service without endpoints refuses thousands a second.
async fn send_until(
    stopped: watch::Receiver<bool>,
    client: usize,
    settings: Arc<Traffic>,
    count: Arc<watch::Sender<Counts>>,
) {
    for request in 0.. {
        if *stopped.borrow() {
            return;
        }
        let exchange = Exchange::new(&settings, &format!("c{client}r{request}"));
        let mut began = false;
        let started = Instant::now();
        let outcome = exchange.run(|stage| match stage {
            Stage::Begun => {
                began = true;
                count.send_modify(|counts| counts.underway += 1);
            }
        });
        let outcome = outcome.await.after(started.elapsed());
        let pause = !matches!(outcome, Outcome::Answered);
        count.send_modify(|counts| {
            counts.underway -= usize::from(began);
            counts.add(outcome);
        });
        if pause {
            #[expect(clippy::disallowed_methods, reason = "the pace of a client, which nothing waits for")]
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

#[cfg(test)]
mod tests;
