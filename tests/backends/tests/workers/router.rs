//! One llama-server in router mode, started externally.

use modelrelay_backends::engines;
use modelrelay_backends::server::get;
use serde_json::{Value, json};
use url::Url;

use crate::rig::{Stack, Weights, eventually};
use crate::stream::{answer, events, expected, stream};

/// Returns the models that the router has loaded.
async fn loaded(router: &Url) -> Vec<String> {
    let (_, answer) = get(router, "/models").await.expect("the router answers");
    let list = body(&answer);
    let models = list["data"].as_array().expect("a list of models").iter();
    let models = models.filter(|model| model["status"]["value"] == "loaded");
    models.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect()
}

fn body(answer: &str) -> Value {
    let from = answer.find("\r\n\r\n").map_or(0, |at| at + 4);
    serde_json::from_str(&answer[from..]).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[tokio::test]
async fn router_holds_one_model_and_streams_match_servers() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[60, 300]).await) else { return };
    let section = |id: &str, file: &str| {
        let file = weights.folder().join(file);
        format!("[{id}]\nmodel = {}\nctx-size = 65536\nparallel = 2\nthreads = 1\n", file.display())
    };
    let preset = ["tiny-a", "tiny-b", "missing"].map(|id| section(id, &format!("{id}.gguf"))).concat();
    let Some(router) = engines::llama_router(weights.folder(), &preset).await else { return };
    let model = |id: &str| json!({"id": id, "maxConcurrency": 2});
    let models = [model("tiny-a"), model("tiny-b"), model("missing")];
    let slot = json!({"id": "gpu0", "driver": "llama-server", "url": router.url.as_str(), "models": models});
    let stack = Stack::start(&json!({"minResidency": "1ms", "linger": "off"}), &slot).await;
    assert_eq!(loaded(&router.url).await, Vec::<String>::new());
    let client = async |number: usize| {
        for turn in 0..4 {
            let (model, tokens) = (["tiny-a", "tiny-b"][(number + turn) % 2], [60, 300][turn / 2]);
            let reply = stack.relay.fetch(stream(model, tokens)).await;
            assert_eq!(events(&reply), expected[&(model, tokens)], "{model}, {tokens} tokens");
            assert!(loaded(&router.url).await.len() <= 1);
        }
    };
    tokio::join!(client(0), client(1), client(2));
    let refused = stack.relay.fetch(answer("missing", 5)).await.with_status(503).json();
    assert_eq!(refused["error"]["code"], "backend_unavailable", "{refused}");
    let reply = stack.relay.fetch(stream("tiny-b", 60)).await;
    assert_eq!(
        (events(&reply), loaded(&router.url).await),
        (expected[&("tiny-b", 60)].clone(), vec!["tiny-b".to_owned()])
    );
    eventually("no request is queued", async || stack.slot().await["wanted"] == 0).await;
}
