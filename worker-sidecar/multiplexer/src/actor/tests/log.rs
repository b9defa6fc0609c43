//! A slot's log of a swap: one sequence of lines, with the numbers of waiting and running requests.

use modelrelay_harness::own_log::{listen, logged};
use serde_json::json;

use super::harness::{LOAD, Play, Stage, pass};

#[tokio::test(start_paused = true)]
async fn swap_is_logged_from_start_to_end() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    listen();
    let (running, second) = (stage.send_request("a").await.unwrap(), stage.send_request("a").await.unwrap());
    pass(20.0).await;
    let others = [stage.send_request("b"), stage.send_request("b"), stage.send_request("b")];
    pass(1.0).await;
    drop((running, second));
    for other in others {
        other.await.unwrap().release(true).await;
    }
    let told = [
        json!({"level": "INFO", "message": "swap started", "slot": "gpu0", "from": "a", "to": "b", "reason": "quantum",
            "waiting": 3, "running": 2}),
        json!({"level": "INFO", "message": "unloading", "slot": "gpu0", "model": "a"}),
        json!({"level": "INFO", "message": "loading", "slot": "gpu0", "model": "b", "kind": "Cold"}),
        json!({"level": "INFO", "message": "swap finished", "slot": "gpu0", "from": "a", "to": "b", "reason": "quantum",
            "drain_ms": 1000, "evict_ms": 1000, "load_ms": 2000, "severed": 0, "result": "done"}),
    ];
    assert_eq!(logged(), told);
}

#[tokio::test(start_paused = true)]
async fn forced_unload_is_logged_before_it_begins() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    listen();
    stage.driver().play("evict a", Play::Fail(LOAD));
    drop(stage.send_request("b").await.unwrap());
    let lines = logged();
    let messages: Vec<_> =
        lines.iter().map(|line| (line["message"].as_str().unwrap(), line["model"].as_str())).collect();
    assert_eq!(
        messages,
        [
            ("swap started", None),
            ("unloading", Some("a")),
            ("model could not be unloaded", Some("a")),
            ("forcing the unload", Some("a")),
            ("loading", Some("b")),
            ("swap finished", None),
        ]
    );
}
