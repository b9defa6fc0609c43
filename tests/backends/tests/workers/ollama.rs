//! One Ollama, started externally.

use modelrelay_backends::engines;
use modelrelay_backends::server::get;
use modelrelay_harness::client::Request;
use modelrelay_harness::process::Log;
use serde_json::{Value, json};
use url::Url;

use crate::rig::{Stack, Weights, eventually};
use crate::stream::{answer, stream, text};

/// Returns the models that Ollama has loaded, from `/api/ps`.
async fn loaded(ollama: &Url) -> Vec<String> {
    let (_, answer) = get(ollama, "/api/ps").await.expect("Ollama answers");
    let from = answer.find('{').expect("a JSON object");
    let to = answer.rfind('}').expect("its end");
    let list: Value = serde_json::from_str(&answer[from..=to]).expect("JSON");
    let models = list["models"].as_array().expect("a list of models").iter();
    models.filter_map(|model| model["name"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn ollama_holds_one_model_and_streams_arrive_whole() {
    let Some(folder) = Weights::new() else { return };
    let Some(mut ollama) = engines::ollama(folder.folder(), &["tiny-a", "tiny-b"]).await else { return };
    let model = |id: &str| json!({"id": id, "maxConcurrency": 2});
    let models = [model("tiny-a"), model("tiny-b")];
    let slot = json!({"id": "gpu0", "driver": "ollama", "url": ollama.url.as_str(), "models": models});
    let stack = Stack::start(&json!({"minResidency": "1ms", "linger": "off"}), &slot).await;
    assert_eq!(loaded(&ollama.url).await, Vec::<String>::new());
    let client = async |number: usize| {
        let mut replies = Vec::new();
        for turn in 0..4 {
            let model = ["tiny-a", "tiny-b"][(number + turn) % 2];
            replies.push((model, text(&stack.relay.fetch(stream(model, 150)).await)));
            assert!(loaded(&ollama.url).await.len() <= 1);
        }
        replies
    };
    let (one, two, three) = tokio::join!(client(0), client(1), client(2));
    // A direct request returns the same.
    let address = ollama.url.socket_addrs(|| None).expect("the URL has an address")[0];
    let direct = async |request: Request| text(&request.fetch(address, &Log::new("ollama")).await);
    let expected = [direct(stream("tiny-a", 150)).await, direct(stream("tiny-b", 150)).await];
    assert_ne!(expected[0], expected[1]);
    for (model, received) in [one, two, three].concat() {
        assert_eq!(received, expected[usize::from(model == "tiny-b")], "{model}");
    }
    // Another client has had a model loaded; the worker's clients still get the models that they request.
    for model in ["tiny-a", "tiny-b"] {
        let reply = stack.relay.fetch(answer(model, 5)).await.with_status(200);
        assert_eq!(
            (&reply.json()["model"], loaded(&ollama.url).await),
            (&json!(model), vec![format!("{model}:latest")])
        );
    }
    // There is no way around an Ollama that is gone, and the next request after its return needs none.
    let port = ollama.url.port().expect("the URL has a port");
    ollama.kill().await;
    let refused = stack.relay.fetch(answer("tiny-a", 5)).await.with_status(503);
    assert_eq!(refused.json()["error"]["code"], "backend_unavailable");
    let _ollama = engines::ollama_on(folder.folder(), port).await;
    let after: u64 =
        refused.header("retry-after").and_then(|after| after.parse().ok()).expect("retry-after is a number");
    assert!(after <= 4, "{after}");
    eventually("it is served again", async || stack.relay.fetch(answer("tiny-a", 5)).await.status == 200).await;
}
