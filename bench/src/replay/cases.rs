//! The cases that are compared.

use std::io::Read as _;
use std::sync::LazyLock;
use std::time::Duration;

use flate2::read::GzDecoder;

use super::Time;
use super::journal::Journal;
use super::worker::Engine;
use super::workload::{Agents, Trace, Workload, unique};

static CONVERSATION: LazyLock<Trace> =
    LazyLock::new(|| unpack(include_bytes!("../../traces/mooncake_conversation.csv.gz")));
static SYNTHETIC: LazyLock<Trace> = LazyLock::new(|| unpack(include_bytes!("../../traces/mooncake_synthetic.csv.gz")));

/// The requests of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Requests {
    /// A trace of conversations, faster than recorded by this factor.
    Conversation(f64),
    /// A trace of generated conversations, faster by this factor.
    Synthetic(f64),
    /// This number of coding agents.
    Agents(usize),
    /// Prompts without any reuse.
    Unique {
        /// Requests a second.
        rate: f64,
        /// True if their heads are the same, so that the relay takes them for one conversation.
        alike: bool,
    },
    /// Those of request journals, as they arrived.
    Journal(&'static Journal),
}

/// Workers and their requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// The name on the command line.
    pub name: &'static str,
    /// The description in the table.
    pub title: &'static str,
    /// The requests.
    pub requests: Requests,
    /// The number of workers.
    pub workers: usize,
    /// The blocks that each worker's cache can hold.
    pub cache: usize,
    /// The requests that each worker serves at a time.
    pub concurrency: usize,
    /// The speed of each worker.
    pub engine: Engine,
    /// The simulated time. Requests that wait then are counted with their waiting time.
    pub length: Time,
}

/// The time for the last requests of a journal.
const AFTER_JOURNAL: Duration = Duration::from_secs(3600);

const fn case(name: &'static str, title: &'static str, requests: Requests, workers: usize, cache: usize) -> Case {
    Case {
        name,
        title,
        requests,
        workers,
        cache,
        concurrency: 16,
        engine: Engine::USUAL,
        length: Duration::from_secs(3600),
    }
}

impl Case {
    /// All cases, in the table's order.
    pub const ALL: [Self; 9] = [
        case("conversation", "conversation × 2.2, 8 workers", Requests::Conversation(2.2), 8, 4000),
        case("conversation-small", "conversation, 4 workers, small caches", Requests::Conversation(1.0), 4, 500),
        Self {
            concurrency: 8,
            ..case("conversation-busy", "conversation, 4 workers, all slots busy", Requests::Conversation(1.0), 4, 4000)
        },
        case("synthetic-busy", "synthetic × 1.2, 4 workers, overloaded", Requests::Synthetic(1.2), 4, 2000),
        case("synthetic", "synthetic × 1.6, 8 workers", Requests::Synthetic(1.6), 8, 4000),
        case("agents-tight", "24 agents, 4 workers, small caches", Requests::Agents(24), 4, 1000),
        case("agents", "80 agents, 8 workers", Requests::Agents(80), 8, 3000),
        case("unique", "nothing is repeated, 8 workers", Requests::Unique { rate: 7.5, alike: false }, 8, 4000),
        case("alike", "only heads are repeated, 8 workers", Requests::Unique { rate: 7.5, alike: true }, 8, 4000),
    ];

    /// The name of the case of a journal.
    pub const JOURNAL: &'static str = "journal";

    /// A journal, with workers whose caches hold this number of blocks.
    pub fn of_journal(journal: &'static Journal, workers: usize, cache: usize) -> Self {
        let length = journal.span() + AFTER_JOURNAL;
        Self { length, ..case(Self::JOURNAL, Self::JOURNAL, Requests::Journal(journal), workers, cache) }
    }

    /// The requests, which depend on the seed.
    pub fn workload(&self, seed: u64) -> Box<dyn Workload> {
        match self.requests {
            Requests::Conversation(speed) => Box::new(CONVERSATION.play(speed, seed)),
            Requests::Synthetic(speed) => Box::new(SYNTHETIC.play(speed, seed)),
            Requests::Agents(sessions) => Box::new(Agents::new(sessions, seed)),
            Requests::Journal(journal) => Box::new(journal.play(self.engine)),
            Requests::Unique { rate, alike } => {
                let requests = (rate * self.length.as_secs_f64()) as u32;
                Box::new(unique(requests, rate, alike, seed))
            }
        }
    }
}

fn unpack(trace: &[u8]) -> Trace {
    let mut text = String::new();
    GzDecoder::new(trace).read_to_string(&mut text).expect("a trace is text, compressed with gzip");
    Trace::parse(&text)
}
