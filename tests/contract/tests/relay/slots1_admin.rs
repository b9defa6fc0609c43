//! `slots1`: the admin's view of multiplexers, and commands to them.

use modelrelay_harness::{
    client::Request,
    relay::{ADMIN_TOKEN, Relay},
    worker::{failed, new_instance_id, slot, slots1_registration},
};
use serde_json::{Value, json};

use crate::support::{chat, check_retry_after};

fn target(worker_id: &str) -> String {
    format!("/admin/workers/{worker_id}/command")
}

/// Sends a command that is accepted, and returns its id.
async fn order(relay: &Relay, worker_id: &str, body: &Value) -> String {
    let reply = relay.admin_post(&target(worker_id), body).await.with_status(202);
    reply.json()["op_id"].as_str().expect("an op_id").to_owned()
}

async fn operation(relay: &Relay, id: &str) -> Value {
    relay.admin_json(&format!("/admin/ops/{id}")).await
}

#[tokio::test]
async fn slots_are_listed_as_reported() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let reported = failed(slot("gpu0", "empty", &["a", "b"]), "b", "insufficient_memory", "needs 24 GiB", 4_000);
    worker.register_slots1(&["a", "b"], std::slice::from_ref(&reported)).await;
    let _plain = relay.worker(&["a"], 1).await;
    let workers = relay.workers().await;
    let listed = &workers[0]["slots"][0];
    for name in ["id", "state", "resident", "target", "generation", "wanted"] {
        assert_eq!(listed[name], reported[name], "{name} in {listed}");
    }
    assert_eq!((&listed["models"][0]["id"], &listed["models"][0]["capacity"]), (&json!("a"), &json!(4)));
    for (name, value) in [("status", "failed"), ("code", "insufficient_memory"), ("message", "needs 24 GiB")] {
        assert_eq!(listed["models"][1][name], value, "{listed}");
    }
    assert!(listed["models"][1]["retry_ms"].as_u64().is_some_and(|left| left <= 4_000), "{listed}");
    assert_eq!(workers[1]["slots"], json!(null), "a worker without a multiplexer has no slots");
    worker.send_slots(&[slot("gpu7", "loading", &["a"])]).await;
    worker.expect_quiet().await;
    assert_eq!(relay.workers().await[0]["slots"][0]["id"], "gpu7");
}

#[tokio::test]
async fn state_lists_location_of_each_model() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut ready = slot("gpu0", "ready", &["a", "b"]);
    ready["resident"] = json!("a");
    ready["models"][0]["status"] = json!("resident");
    ready["models"][1]["status"] = json!("sleeping");
    worker.register_slots1(&["a", "b"], &[ready]).await;
    worker.open_gates(&[("a", 3)]).await;
    worker.expect_quiet().await;
    let _waiting = relay.begin(chat("b"));
    worker.expect_demand("b", 1).await;
    let state = relay.admin_json("/admin/state?residency=true").await;
    let models = &state["providers"][0]["models"];
    let here = |status: &str, open: bool| json!([{"worker_id": worker.worker_id, "slot": "gpu0", "slot_state": "ready", "status": status, "open": open}]);
    let picked =
        |model: &Value| json!([model["workers"], model["open_workers"], model["asked_worker"], model["residency"]]);
    assert_eq!(picked(&models[0]), json!([1, 1, null, here("resident", true)]), "{models}");
    assert_eq!(picked(&models[1]), json!([1, 0, worker.worker_id, here("sleeping", false)]), "{models}");
    let entry = &state["providers"][0]["workers"][0];
    assert_eq!(entry["gates"], json!([{"id": "a", "slots": 3, "others": 0, "capacity": 4}]), "{entry}");
    assert_eq!(entry["slots"][0]["id"], "gpu0");
}

/// Programs with a bounded buffer read it every few seconds.
#[tokio::test]
async fn state_omits_messages_and_residency_by_default() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let reported = failed(slot("gpu0", "empty", &["a"]), "a", "insufficient_memory", &"x".repeat(900), 4_000);
    worker.register_slots1(&["a"], &[reported]).await;
    let state = relay.admin_json("/admin/state").await;
    let provider = &state["providers"][0];
    let model = &provider["workers"][0]["slots"][0]["models"][0];
    assert_eq!((&model["code"], &model["message"]), (&json!("insufficient_memory"), &json!(null)), "{model}");
    assert_eq!((&provider["models"][0]["workers"], &provider["models"][0]["residency"]), (&json!(1), &json!(null)));
    let reply = relay.fetch(Request::get("/admin/state?residency=perhaps").bearer(ADMIN_TOKEN)).await;
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("residency")));
}

/// A back-off of two seconds is over before the next read.
#[tokio::test]
async fn last_failure_of_slot_outlives_its_back_off() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let instance = new_instance_id();
    let empty = slot("gpu0", "empty", &["a", "b"]);
    worker.register_with(slots1_registration(&["a", "b"], std::slice::from_ref(&empty), &instance)).await;
    let last_failure = async |path: &str| {
        let state = relay.admin_json(path).await;
        let workers = if path == "/admin/state" { &state["providers"][0]["workers"] } else { &state["workers"] };
        workers.as_array().and_then(|all| all.last()).expect("a worker")["slots"][0]["last_failure"].clone()
    };
    assert_eq!(last_failure("/admin/state").await, json!(null));
    let words = "x".repeat(900);
    let backoff = failed(slot("gpu0", "backoff", &["a", "b"]), "b", "insufficient_memory", &words, 2_000);
    worker.send_slots(&[backoff]).await;
    worker.send_slots(std::slice::from_ref(&empty)).await;
    worker.expect_quiet().await;
    let failure = last_failure("/admin/state").await;
    assert_eq!((&failure["model"], &failure["code"]), (&json!("b"), &json!("insufficient_memory")), "{failure}");
    assert_eq!(failure["message"], json!("x".repeat(256)), "one for each slot, and bounded");
    assert!(failure["age_ms"].is_u64(), "{failure}");
    assert_eq!(last_failure("/admin/workers").await["message"], json!(words), "admins must receive the whole message");

    // Another link of the same worker knows it too.
    let mut newer = relay.dial().open().await;
    newer.register_with(slots1_registration(&["a", "b"], std::slice::from_ref(&empty), &instance)).await;
    newer.expect_quiet().await;
    assert_eq!(last_failure("/admin/state").await["model"], "b");
    let mut ready = empty.clone();
    (ready["state"], ready["resident"]) = (json!("ready"), json!("a"));
    newer.send_slots(std::slice::from_ref(&ready)).await;
    newer.expect_quiet().await;
    assert_eq!(last_failure("/admin/state").await["model"], "b", "another model is resident");
    ready["resident"] = json!("b");
    newer.send_slots(&[ready]).await;
    newer.expect_quiet().await;
    assert_eq!(last_failure("/admin/state").await, json!(null));
}

#[tokio::test]
async fn orders_over_limit_are_429_with_retry_after() {
    let relay = Relay::start().await;
    let worker = relay.slots1_worker(&["a"]).await;
    let load = json!({"command": "load", "model": "a"});
    let mut accepted = 0;
    let refused = loop {
        let reply = relay.admin_post(&target(&worker.worker_id), &load).await;
        if reply.status != 202 {
            break reply;
        }
        accepted += 1;
        assert!(accepted <= 1_024);
    };
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("too_many_operations")));
    check_retry_after(&refused);
}

#[tokio::test]
async fn order_reaches_worker_and_result_reaches_admin() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a", "b"]).await;
    let id = worker.worker_id.clone();
    let orders = [
        (json!({"command": "load", "model": "a"}), json!(null), "drain"),
        (json!({"command": "unload", "model": "a", "mode": "now"}), json!(null), "now"),
        (json!({"command": "pin", "model": "b", "slot": "gpu0"}), json!("gpu0"), "drain"),
        (json!({"command": "unpin", "model": "b", "slot": null, "mode": "drain"}), json!(null), "drain"),
    ];
    for (body, slot, mode) in orders {
        let op = order(&relay, &id, &body).await;
        let command = worker.expect("command").await;
        assert_eq!(
            (&command["op_id"], &command["command"], &command["model"]),
            (&json!(op), &body["command"], &body["model"])
        );
        assert_eq!((&command["slot"], &command["mode"]), (&slot, &json!(mode)), "{command}");
        assert_eq!(operation(&relay, &op).await, json!({"done": false, "ok": false}));
        worker.send_command_result(&op, None).await;
        worker.expect_quiet().await;
        assert_eq!(operation(&relay, &op).await, json!({"done": true, "ok": true}));
    }
    let op = order(&relay, &id, &json!({"command": "load", "model": "a"})).await;
    worker.expect("command").await;
    worker.send_command_result(&op, Some("others wait for b")).await;
    worker.expect_quiet().await;
    assert_eq!(operation(&relay, &op).await, json!({"done": true, "ok": false, "error": "others wait for b"}));
    worker.send_command_result(&op, None).await;
    worker.expect_quiet().await;
    assert_eq!(operation(&relay, &op).await["ok"], false, "the first word counts");
}

#[tokio::test]
async fn order_outlives_link_that_carried_it() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut older = relay.dial().open().await;
    let ack = older.register_with(slots1_registration(&["a"], &[], &instance)).await;
    let id = ack["worker_id"].as_str().expect("an id");
    let load = json!({"command": "load", "model": "a"});
    let (reported_early, reported_late) = (order(&relay, id, &load).await, order(&relay, id, &load).await);
    older.expect("command").await;
    older.expect("command").await;
    let mut newer = relay.dial().open().await;
    let mut registration = slots1_registration(&["a"], &[], &instance);
    registration["succeeds"] = json!([ack["relay_id"]]);
    newer.register_with(registration).await;
    newer.expect_quiet().await;
    older.send_command_result(&reported_early, None).await;
    older.expect_quiet().await;
    newer.open_gates(&[("a", 1)]).await;
    older.vanish();
    newer.send_command_result(&reported_late, None).await;
    newer.expect_quiet().await;
    for op in [reported_late, reported_early] {
        assert_eq!(operation(&relay, &op).await, json!({"done": true, "ok": true}));
    }
}

#[tokio::test]
async fn disconnect_of_worker_ends_its_orders() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let op = order(&relay, &worker.worker_id, &json!({"command": "load", "model": "a"})).await;
    worker.expect("command").await;
    worker.vanish();
    relay.eventually("the operation is done", || async { operation(&relay, &op).await["done"] == true }).await;
    let ended = operation(&relay, &op).await;
    assert_eq!(ended["ok"], false);
    assert!(ended["error"].as_str().is_some_and(|error| error.contains("disconnected")), "{ended}");
}

#[tokio::test]
async fn other_workers_cannot_end_order() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let mut other = relay.slots1_worker(&["a"]).await;
    let op = order(&relay, &worker.worker_id, &json!({"command": "load", "model": "a"})).await;
    worker.expect("command").await;
    other.send_command_result(&op, None).await;
    other.send_command_result("op-made-up", None).await;
    other.expect_quiet().await;
    assert_eq!(operation(&relay, &op).await["done"], false);
}

#[tokio::test]
async fn order_for_worker_without_multiplexer_is_409() {
    let relay = Relay::start().await;
    let seeds = relay.worker(&["a"], 1).await;
    let core1 = relay.core1_worker(&["a"], 1).await;
    for worker in [seeds, core1] {
        let reply = relay.admin_post(&target(&worker.worker_id), &json!({"command": "load", "model": "a"})).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (409, &json!("no_multiplexer")));
    }
    let reply = relay.admin_post(&target("nobody"), &json!({"command": "load", "model": "a"})).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("worker_not_found")));
}

#[tokio::test]
async fn invalid_order_is_400_naming_its_field() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let cases = [
        (json!({"model": "a"}), "command"),
        (json!({"command": "explode", "model": "a"}), "command"),
        (json!({"command": 7, "model": "a"}), "command"),
        (json!({"command": "load"}), "model"),
        (json!({"command": "load", "model": ""}), "model"),
        (json!({"command": "load", "model": ["a"]}), "model"),
        (json!({"command": "load", "model": "not-here"}), "model"),
        (json!({"command": "load", "model": "a", "slot": "gpu9"}), "slot"),
        (json!({"command": "load", "model": "a", "slot": 0}), "slot"),
        (json!({"command": "unload", "model": "a", "mode": "gently"}), "mode"),
    ];
    for (body, field) in cases {
        let reply = relay.admin_post(&target(&worker.worker_id), &body).await;
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"]), (400, &json!(field)), "{body}: {error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(field)), "{body}: {error}");
    }
    for body in ["", "{", "[]", "\"load\""] {
        let request = Request::new("POST", &target(&worker.worker_id)).bearer(ADMIN_TOKEN).body(body);
        let reply = relay.fetch(request).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!("invalid_json")), "{body}");
    }
    worker.expect_quiet().await;
}

#[tokio::test]
async fn orders_need_admin_token() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    let here = target(&worker.worker_id);
    let unknown = target("nobody");
    let load = r#"{"command":"load","model":"a"}"#;
    // An unauthorized client learns neither which workers exist nor the format of a command.
    for (to, body) in [(&here, load), (&here, "{"), (&here, r#"{"command":"explode"}"#), (&unknown, load)] {
        let reply = relay.fetch(Request::new("POST", to).bearer("wrong").body(body)).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (403, &json!("forbidden")), "{to} {body}");
    }
    let op = order(&relay, &worker.worker_id, &json!({"command": "load", "model": "a"})).await;
    worker.expect("command").await;
    for op in [&*op, "x"] {
        assert_eq!(relay.fetch(Request::get(&format!("/admin/ops/{op}")).bearer("wrong")).await.status, 403);
    }
    worker.expect_quiet().await;
}
