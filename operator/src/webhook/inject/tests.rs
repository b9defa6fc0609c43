use std::sync::Mutex;

use axum::body::{Body, Bytes};
use http::{Method, Request, Response as HttpResponse};
use serde_json::{Value, json};
use tower_service::Service;

use super::decide::tests::{controlled, labelled, pool, review_of};
use super::*;

/// The webhook in front of an API server that responds to every request with `status` and `body`, and the recorded
/// requests.
struct Scene {
    router: Router,
    asked: Arc<Mutex<Vec<String>>>,
    results: Arc<Mutex<Vec<&'static str>>>,
}

fn scene(status: u16, body: Value) -> Scene {
    let (service, mut handle) =
        tower_test::mock::pair::<Request<kube::client::Body>, HttpResponse<kube::client::Body>>();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let asking = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Some((request, answer)) = handle.next_request().await {
            asking.lock().unwrap().push(request.uri().to_string());
            // A status of 0 stands for a server that never responds.
            if status == 0 {
                std::future::pending::<()>().await;
            }
            let body = kube::client::Body::from(body.to_string().into_bytes());
            answer.send_response(HttpResponse::builder().status(status).body(body).unwrap());
        }
    });
    let results = Arc::new(Mutex::new(Vec::new()));
    let observed = Arc::clone(&results);
    let client = Client::new(service, "default");
    let router = router(Webhook {
        namespaces: Arc::new(Namespaces::new(client.clone())),
        client,
        defaults: Arc::new(WorkerDefaults { image: "worker:1".to_owned(), ..WorkerDefaults::default() }),
        observe: Arc::new(move |result| observed.lock().unwrap().push(result)),
    });
    Scene { router, asked, results }
}

fn not_found() -> Value {
    json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found"})
}

impl Scene {
    async fn send(&mut self, method: Method, body: String) -> (StatusCode, String) {
        let request = Request::builder().method(method).uri(PATH).header("content-type", "application/json");
        let response = self.router.call(request.body(Body::from(body)).unwrap()).await.unwrap();
        let status = response.status();
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// Returns the response to the creation of `pod`.
    async fn create(&mut self, pod: &Value) -> Value {
        let (status, body) = self.send(Method::POST, review_of(pod).to_string()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let review: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&review["apiVersion"], &review["kind"]),
            (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
        );
        assert_eq!(review["response"]["uid"], "u-1");
        review["response"].clone()
    }

    fn results(&self) -> Vec<&'static str> {
        self.results.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn labelled_pod_receives_patch() {
    let mut scene = scene(200, pool(&json!({})));
    let response = scene.create(&labelled("llama")).await;
    assert_eq!((&response["allowed"], &response["patchType"]), (&json!(true), &json!("JSONPatch")));
    assert!(response["patch"].is_string());
    assert_eq!(response.get("warnings"), None);
    let mut asked = scene.asked.lock().unwrap().clone();
    asked.sort();
    assert_eq!(asked, ["/api/v1/namespaces/llm", "/apis/modelrelay.io/v1alpha1/namespaces/llm/workerpools/llama"]);
    assert_eq!(scene.results(), ["injected"]);
}

#[tokio::test]
async fn each_pod_receives_unique_token() {
    let mut scene = scene(200, pool(&json!({})));
    let one = scene.create(&labelled("llama")).await;
    let other = scene.create(&labelled("llama")).await;
    assert_ne!(one["patch"], other["patch"]);
}

#[tokio::test]
async fn pod_without_pool_is_refused_or_gated() {
    let mut scene = scene(404, not_found());
    let refused = scene.create(&labelled("llama")).await;
    assert_eq!((&refused["allowed"], refused.get("patch")), (&json!(false), None));
    assert!(refused["status"]["message"].as_str().unwrap().contains("namespace llm has no WorkerPool llama"));
    let gated = scene.create(&controlled("llama")).await;
    assert_eq!(gated["allowed"], true);
    assert!(gated["warnings"][0].as_str().unwrap().ends_with("until then this Pod is not scheduled"));
    assert_eq!(scene.results(), ["refused", "gated"]);
}

#[tokio::test]
async fn unlabelled_pod_is_compared_with_readable_pools() {
    let selecting = pool(&json!({"selector": {"matchLabels": {"app": "vllm"}}}));
    let unreadable = pool(&json!({"provider": 7}));
    let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": [unreadable, selecting]});
    let mut scene = scene(200, list);
    let mut pod = labelled("any");
    pod["metadata"]["labels"] = json!({"app": "vllm"});
    let response = scene.create(&pod).await;
    assert_eq!((&response["allowed"], &response["patchType"]), (&json!(true), &json!("JSONPatch")));
    pod["metadata"]["labels"] = json!({"app": "other"});
    assert_eq!(scene.create(&pod).await, json!({"uid": "u-1", "allowed": true}));
    assert_eq!(scene.results(), ["injected", "skipped"]);
    let asked = scene.asked.lock().unwrap().join(" ");
    assert!(asked.contains("/apis/modelrelay.io/v1alpha1/namespaces/llm/workerpools"), "{asked}");
}

#[tokio::test]
async fn invalid_label_is_never_used_in_path() {
    let mut scene = scene(200, pool(&json!({})));
    assert_eq!(scene.create(&labelled("../../secrets/x")).await["allowed"], false);
    assert_eq!(scene.asked.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn skipped_pod_causes_no_api_request() {
    let mut scene = scene(500, json!({}));
    assert_eq!(scene.create(&labelled("none")).await, json!({"uid": "u-1", "allowed": true}));
    assert_eq!((scene.asked.lock().unwrap().len(), scene.results()), (0, vec!["skipped"]));
}

#[tokio::test]
async fn unreadable_pool_leaves_decision_to_failure_policy() {
    let forbidden = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no"});
    let mut scene = scene(403, forbidden);
    let (status, body) = scene.send(Method::POST, review_of(&labelled("llama")).to_string()).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(body.starts_with("failed to read WorkerPool llm/llama: "), "{body}");
    assert_eq!(scene.results(), ["error"]);
}

#[tokio::test(start_paused = true)]
async fn silent_api_server_times_out() {
    let mut scene = scene(0, json!({}));
    let began = tokio::time::Instant::now();
    let (status, body) = scene.send(Method::POST, review_of(&labelled("llama")).to_string()).await;
    assert_eq!((status, began.elapsed()), (StatusCode::INTERNAL_SERVER_ERROR, LOOKUP_TIMEOUT));
    assert_eq!(body, "failed to read WorkerPool llm/llama: no response within 3 s");
}

#[tokio::test(start_paused = true)]
async fn unfinished_body_times_out() {
    let mut scene = scene(200, json!({}));
    let endless = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
    let request = Request::builder().method(Method::POST).uri(PATH).body(endless).unwrap();
    let response = scene.router.call(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
}

#[tokio::test]
async fn invalid_review_is_rejected_with_reason() {
    let mut scene = scene(200, json!({}));
    for (body, why) in [
        ("{", "body is not valid JSON"),
        ("{}", "body is not an AdmissionReview"),
        (r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#, "AdmissionReview has no request"),
    ] {
        let (status, answer) = scene.send(Method::POST, body.to_owned()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(answer.starts_with(why), "{answer}");
    }
    assert_eq!(scene.send(Method::GET, String::new()).await.0, StatusCode::METHOD_NOT_ALLOWED);
    let huge = "x".repeat(MAX_BODY_BYTES + 1);
    assert_eq!(scene.send(Method::POST, huge).await.0, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn body_with_too_many_values_is_rejected_unparsed() {
    let mut scene = scene(200, pool(&json!({})));
    for value in ["[0],", r#"{"":0},"#] {
        let bomb = format!("[{}0]", value.repeat(60_000));
        assert_eq!(scene.send(Method::POST, bomb).await.0, StatusCode::PAYLOAD_TOO_LARGE, "{value}");
    }
    // Equally large and valid: the content of a string is only text.
    let mut long = labelled("llama");
    long["metadata"]["annotations"] = json!({"a": "[\"{,\\".repeat(60_000)});
    assert_eq!(scene.create(&long).await["allowed"], true);
    assert_eq!(scene.results(), ["error", "error", "injected"]);
}

#[test]
fn tokens_are_long_and_unique() {
    let (one, other) = (token(), token());
    assert_eq!(one.len(), 32);
    assert!(one.bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert_ne!(one, other);
}
