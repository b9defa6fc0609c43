//! Too much of something in one request: each is rejected or forwarded as is, and no neighbour waits for it.

use std::io::Write;
use std::time::{Duration, Instant};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use modelrelay_harness::{
    client::{RawConnection, Request},
    relay::Relay,
    worker::FakeWorker,
};
use serde_json::json;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::neighbour::Neighbour;

const CHAT: &str = "/v1/chat/completions";
const FORM: &str = "/v1/audio/transcriptions";
const BOUNDARY: &str = "BOUNDARY";

/// Ten times the meaning of "at once", for busy machines.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The relay's reaction to a flood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passes,
    Refused(u16),
}

use Fate::{Passes, Refused};

struct Flood {
    name: &'static str,
    path: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Bytes,
    fate: Fate,
}

fn json_flood(name: &'static str, body: String, fate: Fate) -> Flood {
    Flood { name, path: CHAT, headers: vec![("content-type", "application/json".into())], body: body.into(), fate }
}

fn form_flood(name: &'static str, body: String, fate: Fate) -> Flood {
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    Flood { name, path: FORM, headers: vec![("content-type", content_type)], body: body.into(), fate }
}

/// Returns a body with `inner` next to the model's name.
fn with_model(inner: &str) -> String {
    format!("{{\"model\":\"m\",\"x\":{inner}}}")
}

fn json_floods() -> Vec<Flood> {
    let million = 1_000_000;
    let keys = |key: fn(usize) -> String| (0..million).map(|at| format!("{}:1", key(at))).collect::<Vec<_>>().join(",");
    let nested_models = format!("{}\"m\"{}", "{\"model\":".repeat(million), "}".repeat(million));
    vec![
        json_flood("a million arrays", with_model(&format!("{}{}", "[".repeat(million), "]".repeat(million))), Passes),
        json_flood("a million arrays, left open", with_model(&"[".repeat(million)), Refused(400)),
        json_flood(
            "a million objects",
            with_model(&format!("{}1{}", "{\"a\":".repeat(million), "}".repeat(million))),
            Passes,
        ),
        json_flood("a million objects, left open", with_model(&"{\"a\":".repeat(million)), Refused(400)),
        json_flood(
            "arrays that close too much",
            with_model(&format!("{}{}", "[".repeat(9), "]".repeat(million))),
            Refused(400),
        ),
        json_flood("only arrays", "[".repeat(million), Refused(400)),
        json_flood("a million keys", format!("{{\"model\":\"m\",{}}}", keys(|at| format!("\"k{at}\""))), Passes),
        json_flood("a million times one key", format!("{{\"model\":\"m\",{}}}", keys(|_| "\"k\"".into())), Passes),
        json_flood("a million models", format!("{{{}}}", keys(|_| "\"model\"".into())), Refused(400)),
        json_flood("a million models in one another", nested_models.clone(), Refused(400)),
        json_flood("a million models below the model", with_model(&nested_models), Passes),
        json_flood("models in a list", with_model(&format!("[{}1]", "{\"model\":\"n\"},".repeat(million / 2))), Passes),
        json_flood("a model of a million letters", format!("{{\"model\":\"{}\"}}", "m".repeat(million)), Refused(404)),
        json_flood("a number of a million digits", with_model(&"9".repeat(million)), Passes),
        json_flood("a million escapes", with_model(&format!("\"{}\"", "\\u0000".repeat(million))), Passes),
        json_flood("a string that does not end", with_model(&format!("\"{}", "\\\\".repeat(million))), Refused(400)),
        json_flood("white space", format!("{}{}", " \n".repeat(10 * million), with_model("1")), Passes),
        json_flood("too much white space", format!("{}{}", " \n".repeat(17 * million), with_model("1")), Refused(413)),
    ]
}

fn part(name: &str, value: &str) -> String {
    format!("--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
}

fn form_floods() -> Vec<Flood> {
    let (model, end) = (part("model", "m"), format!("--{BOUNDARY}--\r\n"));
    let headers = |header: &str, count: usize| {
        format!(
            "--{BOUNDARY}\r\n{}content-disposition: form-data; name=\"model\"\r\n\r\nm\r\n{end}",
            header.repeat(count)
        )
    };
    vec![
        form_flood("900 parts", format!("{}{model}{end}", part("x", "1").repeat(900)), Passes),
        form_flood("a hundred thousand parts", format!("{}{model}{end}", part("x", "1").repeat(100_000)), Refused(400)),
        form_flood("a thousand models", format!("{}{end}", model.repeat(1000)), Refused(400)),
        form_flood(
            "parts without a name",
            format!("{}{model}{end}", format!("--{BOUNDARY}\r\n\r\n\r\n").repeat(500_000)),
            Passes,
        ),
        form_flood("no boundary at all", "x".repeat(10_000_000), Refused(400)),
        form_flood("boundaries without an end", format!("--{BOUNDARY}\r\n").repeat(500_000), Refused(400)),
        form_flood("almost boundaries", format!("{model}{}", "\r\n--BOUNDAR".repeat(1_000_000)), Refused(400)),
        form_flood(
            "a part's header of ten megabytes",
            headers(&format!("x-odd: {}\r\n", "h".repeat(10_000_000)), 1),
            Passes,
        ),
        form_flood("a million headers of a part", headers("x-odd: 1\r\n", 1_000_000), Passes),
        form_flood(
            "headers of a part without an end",
            format!("--{BOUNDARY}\r\n{}", "x-odd: 1\r\n".repeat(1_000_000)),
            Refused(400),
        ),
        form_flood(
            "a model of a million letters, in a form",
            format!("{}{end}", part("model", &"m".repeat(1_000_000))),
            Refused(404),
        ),
    ]
}

/// A hundred million zeros, compressed by gzip to a hundred thousand bytes.
fn bombs() -> Vec<Flood> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(&vec![0; 100_000_000]).expect("memory");
    let gzip: Bytes = gzip.finish().expect("memory").into();
    let bomb = |name, codings: &[&str], status| {
        let mut headers = vec![("content-type", "application/json".to_owned())];
        headers.extend(codings.iter().map(|coding| ("content-encoding", (*coding).to_owned())));
        Flood { name, path: CHAT, headers, body: gzip.clone(), fate: Refused(status) }
    };
    vec![
        bomb("gzip", &["gzip"], 413),
        bomb("x-gzip", &["x-gzip"], 413),
        bomb("GZIP", &["GZIP"], 413),
        bomb("identity, then gzip", &["identity", "gzip"], 413),
        bomb("gzip labelled as zstd", &["zstd"], 400),
        bomb("deflate", &["deflate"], 415),
        bomb("br", &["br"], 415),
        bomb("a bomb in a bomb", &["gzip, gzip, gzip"], 415),
        bomb("an unknown coding", &["chunked"], 415),
        json_flood("gzip without a label", "\u{1f}\u{8}".repeat(5000), Refused(400)),
    ]
}

/// Responds to every request, and reports the size of each.
async fn take_all(mut worker: FakeWorker, taken: mpsc::UnboundedSender<usize>) {
    loop {
        let job = worker.expect_request().await;
        let _ = taken.send(job.body.len());
        worker.answer(&job, &json!({})).await;
    }
}

/// Sends requests until it is dropped; returns the duration of the slowest.
fn keep_requesting(mut neighbour: Neighbour) -> (JoinHandle<Duration>, mpsc::Sender<()>) {
    let (stop, mut stopped) = mpsc::channel(1);
    let asking = tokio::spawn(async move {
        let mut slowest = Duration::ZERO;
        while stopped.try_recv().is_err() {
            slowest = slowest.max(neighbour.send_request().await);
        }
        slowest
    });
    (asking, stop)
}

async fn send(relay: &Relay, flood: &Flood, taken: &mut mpsc::UnboundedReceiver<usize>) {
    let request = Request::new("POST", flood.path).body(flood.body.clone());
    let request = flood.headers.iter().fold(request, |request, (name, value)| request.header(name, value));
    let start = Instant::now();
    let reply = relay.fetch(request).await;
    eprintln!("{}: {} bytes, {} after {:?}", flood.name, flood.body.len(), reply.status, start.elapsed());
    let fate = if reply.status == 200 { Passes } else { Refused(reply.status) };
    assert_eq!(fate, flood.fate, "{}: {}", flood.name, reply.text());
    match fate {
        Passes => assert_eq!(taken.try_recv().ok(), Some(flood.body.len()), "{}", flood.name),
        Refused(_) => assert!(taken.try_recv().is_err(), "{} reached a worker", flood.name),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_bodies_does_not_delay_neighbour() {
    // Declared, so that another model is known to have no provider.
    let relay = Relay::builder().config(config()).start().await;
    let (sender, mut taken) = mpsc::unbounded_channel();
    let worker = tokio::spawn(take_all(relay.core1_worker(&["m"], 4).await, sender));
    let (asking, stop) = keep_requesting(Neighbour::of(&relay).await);
    for flood in json_floods().into_iter().chain(form_floods()).chain(bombs()) {
        send(&relay, &flood, &mut taken).await;
    }
    let _ = stop.send(()).await;
    let slowest = asking.await.expect("the neighbour always receives a response");
    eprintln!("the neighbour's slowest response took {slowest:?}");
    assert!(slowest < AT_ONCE, "a neighbour waited {slowest:?}");
    relay.eventually("no byte is held", || async { relay.metric("modelrelay_buffered_bytes ").await == 0.0 }).await;
    worker.abort();
}

fn config() -> String {
    let secret = modelrelay_harness::relay::WORKER_SECRET;
    format!(
        "providers:\n- name: local\n  workerSecrets: [{{value: {secret}}}]\n  models: [{{id: m}}, {{id: neighbour}}]\n"
    )
}

/// Returns the response to a request with these header lines.
async fn answer_to(relay: &Relay, lines: &str) -> String {
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write(format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}\r\n")).await;
    raw.read_to_end().await
}

#[tokio::test]
async fn more_than_128_headers_are_431() {
    let relay = Relay::start().await;
    let most = answer_to(&relay, &"x-odd: 1\r\n".repeat(126)).await;
    assert!(most.starts_with("HTTP/1.1 200"), "{most}");
    for count in [127, 1000, 6000] {
        let answer = answer_to(&relay, &"x-odd: 1\r\n".repeat(count)).await;
        assert!(answer.starts_with("HTTP/1.1 431"), "{count} more: {answer}");
    }
}

#[tokio::test]
async fn headers_of_more_than_64_kib_are_431() {
    let relay = Relay::start().await;
    let most = answer_to(&relay, &format!("x-odd: {}\r\n", "h".repeat(60 << 10))).await;
    assert!(most.starts_with("HTTP/1.1 200"), "{most}");
    for line in [format!("x-odd: {}\r\n", "h".repeat(256 << 10)), format!("{}: 1\r\n", "h".repeat(256 << 10))] {
        let answer = answer_to(&relay, &line).await;
        assert!(answer.starts_with("HTTP/1.1 431") || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
}

#[tokio::test]
async fn endless_headers_use_bounded_memory() {
    let relay = Relay::start().await;
    let before = relay.usage().resident_bytes;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write("GET /v1/models HTTP/1.1\r\nhost: x\r\nx-odd: ").await;
    let flood = vec![b'h'; 1 << 20];
    for _ in 0..64 {
        raw.write(&flood).await;
    }
    let answer = raw.read_to_end().await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    let cost = relay.usage().peak_bytes.saturating_sub(before);
    assert!(cost < 8 << 20, "headers without an end cost {cost} bytes");
}
