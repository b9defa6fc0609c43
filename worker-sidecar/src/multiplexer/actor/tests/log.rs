//! What a slot's log says of a swap: one story, with who waits and who runs.

use std::cell::RefCell;
use std::io;
use std::sync::Once;

use serde_json::{Value, json};

use super::harness::{LOAD, Play, Stage, pass};

thread_local! {
    /// What was logged on this thread, as JSON, once a test wants to know it.
    static LOGGED: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

struct Writer;

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOGGED.with_borrow_mut(|logged| logged.as_mut().map_or(Ok(bytes.len()), |logged| logged.write(bytes)))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One subscriber for all threads: with one of its own, a thread loses lines that others without any came by first.
fn listen() {
    static SUBSCRIBE: Once = Once::new();
    SUBSCRIBE.call_once(|| {
        tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_target(false)
            .without_time()
            .with_writer(|| Writer)
            .init();
    });
    LOGGED.set(Some(Vec::new()));
}

fn logged() -> Vec<Value> {
    let bytes = LOGGED.take().unwrap();
    bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_swap_is_one_story() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    listen();
    let (running, second) = (stage.ask("a").await.unwrap(), stage.ask("a").await.unwrap());
    pass(20.0).await;
    let others = [stage.ask("b"), stage.ask("b"), stage.ask("b")];
    pass(1.0).await;
    drop((running, second));
    for other in others {
        other.await.unwrap().release(true).await;
    }
    let told = [
        json!({"level": "INFO", "message": "swap begun", "slot": "gpu0", "from": "a", "to": "b", "reason": "quantum",
            "waiting": 3, "running": 2}),
        json!({"level": "INFO", "message": "unloading", "slot": "gpu0", "model": "a"}),
        json!({"level": "INFO", "message": "loading", "slot": "gpu0", "model": "b", "kind": "Cold"}),
        json!({"level": "INFO", "message": "swap ended", "slot": "gpu0", "from": "a", "to": "b", "reason": "quantum",
            "drain_ms": 1000, "evict_ms": 1000, "load_ms": 2000, "severed": 0, "result": "done"}),
    ];
    assert_eq!(logged(), told);
}

#[tokio::test(start_paused = true)]
async fn what_is_ended_by_force_is_told_before_it_begins() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    listen();
    stage.driver().play("evict a", Play::Fail(LOAD));
    drop(stage.ask("b").await.unwrap());
    let lines = logged();
    let said: Vec<_> = lines.iter().map(|line| (line["message"].as_str().unwrap(), line["model"].as_str())).collect();
    assert_eq!(
        said,
        [
            ("swap begun", None),
            ("unloading", Some("a")),
            ("model could not be unloaded", Some("a")),
            ("unloading by force", Some("a")),
            ("loading", Some("b")),
            ("swap ended", None),
        ]
    );
}
