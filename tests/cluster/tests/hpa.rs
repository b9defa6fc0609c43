//! An HPA on a pool, with a metric: the test's own metrics API replaces that of prometheus-adapter. It is registered
//! for the whole cluster while it runs, so `.config/nextest.toml` runs this test alone.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use kube::api::DynamicObject;
use modelrelay_cluster::{
    Cluster, Namespace,
    manifests::{demo_pool, provider, worker_pool},
};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

/// The node's address, at which Pods and the API server reach this machine.
const NODE: &str = "{.items[0].status.addresses[?(@.type==\"InternalIP\")].address}";

/// The group and version of the metrics API.
const METRICS_API: &str = "v1beta1.external.metrics.k8s.io";

/// The metric that the example uses.
const METRIC: &str = "modelrelay_requests_qwen";

/// The HPA polls every 15 s, and first has to discover the kinds.
const LOOKS: Duration = Duration::from_secs(120);

/// A metrics API with one metric. Dropping it removes its registration.
struct Metrics {
    cluster: Cluster,
    requests: Arc<AtomicUsize>,
    server: JoinHandle<()>,
}

impl Metrics {
    /// Serves it at the node's address and registers it.
    async fn register(namespace: &Namespace) -> Self {
        let node = namespace.kubectl("get nodes --output").arg(format!("jsonpath={NODE}")).await;
        let node: Ipv4Addr = node.parse().expect("the node has an address");
        let listener = TcpListener::bind((node, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::new(AtomicUsize::new(0));
        let server = tokio::spawn(serve(listener, acceptor(), requests.clone()));
        let metrics = Self { cluster: namespace.cluster.clone(), requests, server };
        namespace.apply(&registration(&namespace.name, address)).await;
        namespace.kubectl(&format!("wait --for condition=Available --timeout 60s apiservice {METRICS_API}")).await;
        metrics
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.server.abort();
        // A leftover registration would keep every namespace from ending.
        let _ = self.cluster.blocking("kubectl", &format!("delete apiservice {METRICS_API} --ignore-not-found"));
    }
}

/// A Service without Pods that leads to this process, and the registration of its API.
fn registration(namespace: &str, address: SocketAddr) -> [Value; 3] {
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics"},
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": address.port()}]},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "metrics", "labels": {"kubernetes.io/service-name": "metrics"}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": address.port()}],
            "endpoints": [{"addresses": [address.ip()], "conditions": {"ready": true}}],
        }),
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": METRICS_API},
            "spec": {
                "group": "external.metrics.k8s.io", "version": "v1beta1",
                "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": true,
                "service": {"name": "metrics", "namespace": namespace},
            },
        }),
    ]
}

fn acceptor() -> TlsAcceptor {
    let made = rcgen::generate_simple_self_signed(["metrics".to_owned()]).expect("a certificate");
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key);
    TlsAcceptor::from(Arc::new(config.expect("key and certificate belong together")))
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, requests: Arc<AtomicUsize>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve_one(stream, acceptor.clone(), requests.clone()));
    }
}

async fn serve_one(stream: TcpStream, acceptor: TlsAcceptor, requests: Arc<AtomicUsize>) {
    // A probe that only connects, or disconnects early, is no failure here.
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let service = service_fn(move |request| {
        let answer = answer(&request, requests.load(Ordering::SeqCst));
        async move { Ok::<_, std::convert::Infallible>(answer) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

fn answer(request: &Request<Incoming>, requests: usize) -> Response<Full<Bytes>> {
    let group = "/apis/external.metrics.k8s.io/v1beta1";
    let body = match request.uri().path().strip_prefix(group) {
        Some("" | "/") => json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": [],
        }),
        Some(path) if path.rsplit('/').next() == Some(METRIC) => json!({
            "kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": {},
            "items": [{
                "metricName": METRIC, "metricLabels": {},
                "timestamp": "2026-01-01T00:00:00Z", "value": requests.to_string(),
            }],
        }),
        Some(_) | None => {
            let mut answer = Response::new(Full::default());
            *answer.status_mut() = StatusCode::NOT_FOUND;
            return answer;
        }
    };
    let mut answer = Response::new(Full::from(body.to_string()));
    answer.headers_mut().insert("content-type", "application/json".parse().expect("a header's value"));
    answer
}

/// The shipped example, adapted to this test's pool and without its stabilization window.
fn example(pool: &str) -> Value {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/examples/hpa.yaml"));
    let mut hpa: Value = serde_yaml::from_str(&text.expect("the example exists")).expect("the example is YAML");
    assert_eq!(hpa["spec"]["scaleTargetRef"]["kind"], "WorkerPool");
    hpa["metadata"]["name"] = json!(pool);
    hpa["spec"]["scaleTargetRef"]["name"] = json!(pool);
    hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = json!(0);
    hpa
}

#[tokio::test]
async fn hpa_scales_pool_by_relay_requests() {
    let namespace = Cluster::connect().await.namespace("hpa").await;
    namespace.apply(&[provider("local", &json!({})), worker_pool("qwen", &demo_pool("local"))]).await;
    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    namespace.wait_for_condition(&pools, "qwen", "Ready", "True").await;
    let metrics = Metrics::register(&namespace).await;
    metrics.requests.store(60, Ordering::SeqCst);
    namespace.apply(&[example("qwen")]).await;

    // 24 requests per replica, as in the example.
    let settled_at = async |number: u64| {
        let holds = |pool: &DynamicObject| {
            let (spec, status) = (&pool.data["spec"], &pool.data["status"]);
            spec["replicas"] == number && status["replicas"] == number && status["connected"] == number
        };
        let what = format!("{number} replicas");
        namespace.wait_at_most(LOOKS, &pools, "qwen", &what, holds).await
    };
    settled_at(3).await;
    metrics.requests.store(20, Ordering::SeqCst);
    let pool = settled_at(1).await;

    let conditions = pool.data["status"]["conditions"].as_array().expect("conditions");
    let stalled = conditions.iter().find(|condition| condition["type"] == "Stalled").expect("a condition");
    assert_eq!(stalled["status"], "False", "an HPA on a pool without scaling is no conflict");
}
