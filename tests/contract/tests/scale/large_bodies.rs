//! The largest prompts and larger responses, continuously, on the one socket between relay and worker: their effect on
//! others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use modelrelay_harness::{
    TEST_TIMEOUT,
    client::{Piece, Request},
    fake_backend::{Answer, Call, FakeBackend, sse},
    poll_for,
    worker_process::Stack,
};
use serde_json::json;
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};

const UPLOAD_PATH: &str = "/v1/completions";
const DOWNLOAD_PATH: &str = "/v1/audio/speech";
const CHAT_PATH: &str = "/v1/chat/completions";

const UPLOAD_BYTES: usize = 32 << 20;
const DOWNLOAD_BYTES: usize = 64 << 20;
const ROUNDS: u32 = 20;

/// Ten times the 100 ms that the contract specifies.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Body bytes that were fully transferred.
#[derive(Default)]
struct Moved {
    up: AtomicU64,
    down: AtomicU64,
}

/// Continuous transfers, until dropped.
struct Traffic {
    moved: Arc<Moved>,
    _tasks: JoinSet<()>,
    chats: mpsc::UnboundedReceiver<Call>,
}

/// A prompt of escaped control characters as large as a request may be.
fn control_characters() -> Bytes {
    let mut body = b"{\"model\":\"m\",\"prompt\":\"".to_vec();
    let escapes = (UPLOAD_BYTES - body.len() - 2) / 6;
    body.extend(b"\\u0001".repeat(escapes));
    body.extend(b"\"}");
    body.into()
}

impl Traffic {
    /// Starts one upload and one download after the other, each kind on its own; chats go to the test.
    fn start(stack: &mut Stack, backend: FakeBackend) -> Self {
        let moved = Arc::new(Moved::default());
        let mut tasks = JoinSet::new();
        let (sender, chats) = mpsc::unbounded_channel();
        tasks.spawn(serve(backend, Arc::clone(&moved), sender));
        let (to, log, prompt) = (stack.relay.addr(), stack.relay.log().clone(), control_characters());
        tasks.spawn(async move {
            loop {
                let upload = Request::new("POST", UPLOAD_PATH).body(prompt.clone());
                let _ = upload.fetch(to, &log).await.with_status(200);
            }
        });
        let (log, down) = (stack.relay.log().clone(), Arc::clone(&moved));
        tasks.spawn(async move {
            loop {
                let mut answer = Request::post(DOWNLOAD_PATH, &json!({"model": "m"})).send(to, &log).await;
                loop {
                    match answer.next_piece().await {
                        Piece::Data(data) => down.down.fetch_add(data.len() as u64, Ordering::Relaxed),
                        Piece::End => break,
                        Piece::Aborted(error) => panic!("the response was truncated: {error}"),
                    };
                }
            }
        });
        Self { moved, _tasks: tasks, chats }
    }

    /// Waits until both directions have moved this much from now.
    async fn moves(&self, bytes: u64) {
        let (up, down) = (self.moved.up.load(Ordering::Relaxed), self.moved.down.load(Ordering::Relaxed));
        let have_moved = async || {
            let (now_up, now_down) = (self.moved.up.load(Ordering::Relaxed), self.moved.down.load(Ordering::Relaxed));
            (now_up >= up + bytes && now_down >= down + bytes).then_some(())
        };
        poll_for(TEST_TIMEOUT, have_moved).await.expect("the large bodies move");
    }

    async fn chat(&mut self) -> Call {
        let call = tokio::time::timeout(Duration::from_secs(10), self.chats.recv()).await;
        call.expect("no chat reached the backend in 10 s").expect("the backend lives")
    }
}

async fn serve(mut backend: FakeBackend, moved: Arc<Moved>, chats: mpsc::UnboundedSender<Call>) {
    let large = Arc::new(Answer::new(200, &[("content-type", "audio/mpeg")], &vec![0x1b; DOWNLOAD_BYTES]));
    loop {
        let call = backend.call().await;
        let _task: JoinHandle<()> = match call.head.path() {
            UPLOAD_PATH => tokio::spawn(take_upload(call, Arc::clone(&moved))),
            DOWNLOAD_PATH => {
                let large = Arc::clone(&large);
                tokio::spawn(async move { call.answer(&large).await })
            }
            _ => {
                let _ = chats.send(call);
                continue;
            }
        };
    }
}

async fn take_upload(mut call: Call, moved: Arc<Moved>) {
    let mut total = 0;
    loop {
        let bytes = call.read_some(1 << 16).await.expect("the upload does not end prematurely");
        if bytes.is_empty() {
            break;
        }
        total += bytes.len();
        moved.up.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
    assert!(total > UPLOAD_BYTES - 16 && total <= UPLOAD_BYTES, "received {total} bytes of the prompt");
    call.answer_json(200, &json!({})).await;
}

/// The usual stack, with traffic flowing in both directions.
async fn busy_stack() -> (Stack, Traffic) {
    let mut stack = Stack::with(|relay| relay, |worker| worker.concurrency(8)).await;
    let backend = std::mem::replace(&mut stack.backend, FakeBackend::start().await);
    let traffic = Traffic::start(&mut stack, backend);
    traffic.moves(UPLOAD_BYTES as u64).await;
    (stack, traffic)
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_both_ways_do_not_delay_cancel() {
    let (stack, mut traffic) = busy_stack().await;
    let mut slowest = Duration::ZERO;
    for _ in 0..ROUNDS {
        let victim = stack.relay.begin(Request::post(CHAT_PATH, &json!({"model": "m", "stream": true})));
        let mut call = traffic.chat().await;
        call.read_body().await;
        call.start_stream().await;
        call.chunk(&sse("first")).await;
        let mut response = victim.response().await;
        response.read_until("first").await;
        traffic.moves(1 << 20).await;
        let left = Instant::now();
        drop(response);
        slowest = slowest.max(call.closed().await - left);
        traffic.moves(1 << 20).await;
    }
    eprintln!("the slowest cancel took {slowest:?}");
    assert!(slowest < AT_ONCE, "a cancel took {slowest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_do_not_delay_neighbour() {
    let (stack, mut traffic) = busy_stack().await;
    let mut slowest = Duration::ZERO;
    for _ in 0..ROUNDS {
        traffic.moves(1 << 20).await;
        let start = Instant::now();
        let neighbour = stack.relay.begin(Request::post(CHAT_PATH, &json!({"model": "m"})));
        traffic.chat().await.answer_json(200, &json!({"small": true})).await;
        assert_eq!(neighbour.reply().await.with_status(200).json(), json!({"small": true}));
        slowest = slowest.max(start.elapsed());
    }
    eprintln!("the slowest neighbour took {slowest:?}");
    assert!(slowest < AT_ONCE, "a neighbour took {slowest:?}");
}
