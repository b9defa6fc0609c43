//! Aliases of models: a request that uses an alias is converted to the id on arrival.

use modelrelay_protocol::message::{Demand, ModelDemand};

use super::harness::{Stage, config, pass};
use crate::config::SlotConfig;
use crate::error::SlotError;

/// One slot for a, with the aliases x and y, and b.
fn named() -> SlotConfig {
    let mut config = config(&["a", "b"]);
    config.models[0].aliases = vec!["y".into(), "x".into()];
    config
}

async fn stage() -> Stage {
    Stage::with(vec![named()], false).await
}

#[tokio::test(start_paused = true)]
async fn request_by_alias_leases_its_model() {
    let stage = stage().await;
    assert_eq!(stage.mux.models(), ["a", "b", "x", "y"]);
    let lease = stage.send_request("x").await.unwrap();
    assert_eq!((&**lease.model(), lease.slot()), ("a", 0));
    let others = [
        stage.send_request("a").await.unwrap(),
        stage.send_request("y").await.unwrap(),
        stage.send_request("x").await.unwrap(),
    ];
    assert_eq!(stage.driver().log(), ["load a"], "loaded once");
    assert!(matches!(stage.send("x").await, Err(SlotError::AtCapacity)), "one count for all names");
    drop((lease, others));
    pass(1.0).await;
    assert_eq!((stage.told.granted("a"), stage.told.granted("x")), (Some(4), None));
    assert_eq!(stage.told.slots_now().slots[0].models[0].aliases, ["y", "x"]);
}

#[tokio::test(start_paused = true)]
async fn demand_under_all_names_is_summed() {
    let stage = stage().await;
    let of = |id: &str, waiting| ModelDemand {
        id: id.to_owned(),
        waiting,
        oldest_ms: 10,
        sum_ms: 20,
        ..ModelDemand::default()
    };
    let models = vec![of("a", 1), of("nobody's", 9), of("x", 2)];
    stage.mux.handle_demand(stage.new, &Demand { models });
    pass(2.5).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    let report = stage.report().await;
    let waiting: Vec<_> = report.requests.iter().map(|(model, of)| (&**model, of.waiting)).collect();
    assert_eq!(waiting, [("a", 3), ("b", 0)]);
    drop(stage.send("x").await.unwrap());
    assert_eq!(stage.report().await.requests[0].1.waiting, 2, "it was one of them");
}

#[tokio::test(start_paused = true)]
async fn demand_under_alias_loads_its_model() {
    let stage = stage().await;
    stage.demand("x", 3);
    pass(2.5).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    assert_eq!(stage.report().await.requests[0].1.waiting, 3);
    // A request that has arrived is no longer in the demand, whichever name it uses.
    drop(stage.send("a").await.unwrap());
    assert_eq!(stage.report().await.requests[0].1.waiting, 2);
}

#[tokio::test(start_paused = true)]
async fn orders_accept_any_name() {
    let stage = stage().await;
    stage.command("1", "load", "x");
    pass(3.0).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    stage.command("2", "pin", "y");
    pass(0.1).await;
    assert!(stage.told.slots_now().slots[0].models[0].pinned);
    stage.command("3", "load", "z");
    let error = stage.told.results().pop().and_then(|result| result.error);
    assert_eq!(error.as_deref(), Some("no slot has model z"));
}

#[tokio::test(start_paused = true)]
async fn aliases_change_while_slot_runs() {
    let stage = stage().await;
    let mut config = named();
    config.models[0].aliases.clear();
    config.models[1].aliases = vec!["x".into()];
    assert!(stage.mux.reconfigure(config, &[]));
    pass(0.1).await;
    assert_eq!(stage.mux.models(), ["a", "b", "x"]);
    assert_eq!(&**stage.send_request("x").await.unwrap().model(), "b");
    assert!(matches!(stage.send_request("y").await, Err(SlotError::UnknownModel { .. })));
}
