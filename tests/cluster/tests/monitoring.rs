//! A real Prometheus with live relays, workers and the operator: the targets of the shipped scrape jobs, the presence
//! of all series that alerts and dashboards query, the results of the autoscaling queries, and the validity of the
//! examples.

mod prometheus;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use modelrelay_cluster::{
    Cluster, Namespace, SYSTEM_NAMESPACE, TEST_TIMEOUT, http,
    manifests::{DEMO_MODEL, demo_backend, demo_pool, provider, worker_pool},
    poll_for,
    process::kill_process,
    traffic::Traffic,
    wait_until,
};
use prometheus::{Prometheus, ROOT};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Kinds among the examples whose definitions a cluster lacks by default.
const FOREIGN_KINDS: [&str; 6] = [
    "ClientSettingsPolicy",
    "HTTPRoute",
    "PeerAuthentication",
    "ProxySettingsPolicy",
    "ReferenceGrant",
    "ScaledObject",
];

/// A ready Provider `local`, and pools.
async fn serving(prefix: &str, pools: &[Value]) -> Namespace {
    let namespace = Cluster::connect().await.namespace(prefix).await;
    namespace.apply(&[&[provider("local", &json!({}))], pools].concat()).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    namespace
}

async fn wait_for_pool(namespace: &Namespace, name: &str) {
    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    namespace.wait_for_condition(&pools, name, "Ready", "True").await;
}

/// The Pods that Prometheus should scrape: those of the test, and the operator's.
async fn pods(namespace: &Namespace) -> Vec<Pod> {
    let system = Api::<Pod>::namespaced(namespace.cluster.client.clone(), SYSTEM_NAMESPACE);
    let operator =
        ListParams::default().labels("app.kubernetes.io/name=modelrelay,app.kubernetes.io/component=operator");
    let mut pods = system.list(&operator).await.expect("the operator's Pods can be listed").items;
    pods.extend(namespace.pods("").await);
    pods.retain(|pod| pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Running")));
    pods
}

async fn relay_address(namespace: &Namespace, port: u16) -> SocketAddr {
    let relays = namespace.pods("modelrelay.io/provider=local,app.kubernetes.io/component=relay").await;
    let ip = relays.first().and_then(|pod| pod.status.clone()?.pod_ip).expect("a relay runs");
    SocketAddr::new(ip.parse().expect("an address"), port)
}

/// Returns the addresses in the Pods' own annotations, as `http://ADDRESS/PATH`.
fn annotated(pods: &[Pod]) -> BTreeSet<String> {
    let url = |pod: &Pod| {
        let annotation = |name: &str| pod.annotations().get(&format!("prometheus.io/{name}")).cloned();
        let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
        (annotation("scrape")? == "true").then_some(())?;
        Some(format!("http://{ip}:{}{}", annotation("port")?, annotation("path")?))
    };
    pods.iter().filter_map(url).collect()
}

/// Returns the targets that a PodMonitor of the chart selects, by job.
async fn monitored(namespace: &Namespace, pods: &[Pod]) -> BTreeMap<String, BTreeSet<String>> {
    let rendered = namespace
        .cluster
        .helm(4, &format!("template modelrelay {ROOT}/charts/modelrelay --set metrics.podMonitor.enabled=true"))
        .await;
    let mut found = BTreeMap::new();
    for monitor in documents(&rendered).into_iter().filter(|object| object["kind"] == "PodMonitor") {
        let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
        let label = monitor["spec"]["selector"]["matchExpressions"][0]["key"].as_str().expect("a label");
        let job = endpoint["relabelings"][0]["replacement"].as_str().expect("a job").to_owned();
        let urls = pods.iter().filter(|pod| pod.labels().contains_key(label)).filter_map(|pod| {
            let spec = pod.spec.as_ref()?;
            let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            let port = ports.find(|port| port.name.as_deref() == endpoint["port"].as_str())?.container_port;
            Some(format!("http://{}:{port}/metrics", pod.status.as_ref()?.pod_ip.as_deref()?))
        });
        found.insert(job, urls.collect());
    }
    found
}

fn documents(yaml: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(yaml).map(Value::deserialize);
    documents.map(|document| document.expect("YAML")).filter(|document| !document.is_null()).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(format!("{ROOT}/{path}")).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the queries of rules of a kind, `alert` or `record`, by name.
fn rules(kind: &str) -> BTreeMap<String, String> {
    let rules: Value = serde_yaml::from_str(&read("charts/modelrelay/files/rules/modelrelay.yaml")).expect("YAML");
    let rules = rules["groups"].as_array().expect("groups").iter().flat_map(|group| group["rules"].as_array().unwrap());
    let named = rules.filter_map(|rule| Some((rule[kind].as_str()?, rule["expr"].as_str()?)));
    named.map(|(name, query)| (name.to_owned(), query.to_owned())).collect()
}

/// Returns the metrics that only workers with slots export, which are absent here; the contract tests check them on a
/// real one.
fn metrics_of_slots() -> BTreeSet<String> {
    let rules: Value = serde_yaml::from_str(&read("charts/modelrelay/files/rules/modelrelay.yaml")).expect("YAML");
    let groups = rules["groups"].as_array().expect("groups").iter().filter(|group| group["name"] == "modelrelay-slots");
    let rules = groups.flat_map(|group| group["rules"].as_array().expect("rules"));
    rules.flat_map(|rule| metrics(rule["expr"].as_str().expect("text"))).collect()
}

/// Returns every query of the dashboards, those of their variables included, with `variables` filled in, and its
/// source.
fn dashboard_queries(variables: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for dashboard in ["operator", "relay", "workers"] {
        let board: Value = serde_json::from_str(&read(&format!("charts/modelrelay/files/dashboards/{dashboard}.json")))
            .expect("a dashboard is JSON");
        for panel in board["panels"].as_array().expect("panels") {
            let targets =
                panel["targets"].as_array().into_iter().flatten().filter_map(|target| target["expr"].as_str());
            queries.extend(targets.map(|query| (format!("{dashboard}: {}", panel["title"]), query.to_owned())));
        }
        for variable in board["templating"]["list"].as_array().expect("variables") {
            let label_query =
                variable["definition"].as_str().and_then(|it| it.strip_prefix("label_values(")?.strip_suffix(')'));
            if let Some((query, label)) = label_query.and_then(|it| it.rsplit_once(", ")) {
                queries.push((format!("{dashboard}: ${label}"), format!("group by ({label}) ({query})")));
            }
        }
    }
    for (_, query) in &mut queries {
        *query = query.replace("$__rate_interval", "2m");
        for (name, value) in variables {
            *query = query.replace(&format!("${name}"), value);
        }
        assert!(!query.contains('$'), "a variable without a value: {query}");
    }
    queries
}

/// Returns the names of series in a query, except those that a rule records, which contain colons.
fn metrics(query: &str) -> BTreeSet<String> {
    // Quoted parts are label values.
    let outside: String = query.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let words = outside.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let is_scraped =
        |word: &&str| ["modelrelay_", "process_"].iter().any(|prefix| word.starts_with(prefix)) || *word == "up";
    words.filter(is_scraped).map(str::to_owned).collect()
}

/// Triggers every event that a metric counts: counters exist only after their first event.
async fn use_everything(namespace: &Namespace) {
    let client = namespace.service_address("local").await;
    let traffic = Traffic::to(client).streams(4).words(10).start();
    traffic.wait_for_answers(8).await;
    traffic.finish().await.expect_all_answered();
    let chat = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "one two three"}]});
    let retried = [("x-stainless-retry-count", "1"), ("user-agent", "OpenAI/Python 2.0.0")];
    let answer =
        http::fetch(client, "POST /v1/chat/completions", &retried, &chat(DEMO_MODEL)).await.expect("a response");
    assert_eq!(answer.status, 200, "{answer:?}");

    // A client that disconnects.
    let leaving = Traffic::to(client).streams(1).words(80).start();
    leaving.wait_for_underway(1).await;
    drop(leaving);
    // An unauthorized request.
    let stranger = [("authorization", "Bearer wrong")];
    let refused = http::fetch(relay_address(namespace, 8082).await, "GET /admin/state", &stranger, &Value::Null).await;
    assert_eq!(refused.expect("a response").status, 403);

    // A worker that is killed before it has responded to anything: its requests return to the queue and go to the
    // others. They run for 8 s, and the worker ends at once. Deleting its Pod, even with `--force`, would give it time
    // to finish them.
    let slow = json!({"model": DEMO_MODEL, "messages": [{"role": "user", "content": "word ".repeat(200)}]});
    let mut answers = JoinSet::new();
    for _ in 0..12 {
        let body = slow.clone();
        answers.spawn(async move { http::fetch(client, "POST /v1/chat/completions", &[], &body).await });
    }
    let relay = relay_address(namespace, 8082).await;
    let shared_out = async || {
        let metrics = http::fetch(relay, "GET /metrics", &[], &Value::Null).await.map(|reply| reply.body);
        metrics.is_ok_and(|text| text.contains("modelrelay_worker_slots{provider=\"local\",state=\"used\"} 12"))
    };
    wait_until("all requests to be dispatched", TEST_TIMEOUT, shared_out).await;
    let injected = namespace.pods("app=vllm").await.pop().expect("the injected Pod runs");
    kill_process(&injected, |command| command.starts_with("/modelrelay-worker") && !command.contains("\0demo\0"));
    while let Some(answer) = answers.join_next().await {
        let answer = answer.expect("a client does not panic").expect("a response");
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    // A worker that leaves.
    namespace.kubectl("delete wp elsewhere").await;
}

/// The demo's backend reports no cached tokens, and its requests are no conversations that could move.
const PANELS_WITHOUT_DATA: [&str; 2] = ["relay: \"Cache hit rate\"", "relay: \"Moves by reason\""];

#[tokio::test]
async fn metrics_used_by_alerts_and_dashboards_are_scraped() {
    // One pool of each mode.
    let elsewhere = json!({"provider": "local", "backend": {"url": "http://vllm"}, "standalone": {}});
    let pools = [
        worker_pool("templated", &demo_pool("local")),
        worker_pool("injected", &json!({"provider": "local", "backend": {"port": 8000}})),
        worker_pool("elsewhere", &elsewhere),
    ];
    let namespace = serving("monitoring", &pools).await;
    let mut labelled = demo_backend("vllm", 1);
    labelled[0]["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] = json!("injected");
    namespace.apply(&labelled).await;
    for pool in ["templated", "injected", "elsewhere"] {
        wait_for_pool(&namespace, pool).await;
    }
    // A sidecar registers before its Pod is ready, and is scraped only once its Pod runs.
    for deployment in ["templated-backend", "vllm", "elsewhere-worker"] {
        namespace.rolled_out(&format!("deployment/{deployment}")).await;
    }

    let prometheus = Prometheus::start().await;
    let all = pods(&namespace).await;
    prometheus.discover(&all);
    let healthy = async || {
        let (scraped, up) = prometheus.scraped().await;
        up && scraped.len() == annotated(&all).len()
    };
    wait_until("every target to respond", TEST_TIMEOUT, healthy).await;
    expect_the_same_targets(&namespace, &prometheus, &all).await;

    use_everything(&namespace).await;
    let names = async || -> BTreeSet<String> {
        serde_json::from_value(prometheus.api("label/__name__/values").await).expect("names")
    };
    let scope = format!("{}|{SYSTEM_NAMESPACE}", namespace.name);
    let variables =
        [("namespace", scope.as_str()), ("provider", ".*"), ("model", ".*"), ("workerpool", ".*"), ("pod", ".*")];
    let queries = dashboard_queries(&variables);
    let queried: BTreeSet<String> = rules("alert")
        .values()
        .chain(rules("record").values())
        .chain(queries.iter().map(|(_, query)| query))
        .flat_map(|it| metrics(it))
        .collect();
    // Metrics that only relays with a certificate export are absent here; the contract tests check them.
    let of_tls = queried.iter().filter(|name| name.starts_with("modelrelay_tls_")).cloned().collect();
    let queried = &(&queried - &metrics_of_slots()) - &of_tls;
    assert!(queried.len() > 40, "found too few queries: {queried:?}");
    let complete = async || names().await.is_superset(&queried).then_some(());
    if poll_for(TEST_TIMEOUT, complete).await.is_none() {
        let names = names().await;
        panic!("used by alerts or dashboards but not scraped: {:?}", queried.difference(&names).collect::<Vec<_>>());
    }

    // Beyond the names: with its labels, every query of every other panel returns something.
    let mut silent = Vec::new();
    for (whose, query) in queries {
        if !PANELS_WITHOUT_DATA.contains(&whose.as_str()) && prometheus.query(&query).await.is_empty() {
            silent.push(format!("{whose}: {query}"));
        }
    }
    assert!(silent.is_empty(), "queries without results:\n{}", silent.join("\n"));
}

/// Checks that the scrape jobs, the Pods' annotations and the chart's monitors agree.
async fn expect_the_same_targets(namespace: &Namespace, prometheus: &Prometheus, pods: &[Pod]) {
    let (scraped, _) = prometheus.scraped().await;
    let mut by_job: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (job, url) in scraped {
        by_job.entry(job).or_default().insert(url);
    }
    let urls: BTreeSet<String> = by_job.values().flatten().cloned().collect();
    assert_eq!(urls, annotated(pods), "the scrape jobs and the annotations disagree");
    let jobs: Vec<&str> = by_job.keys().map(String::as_str).collect();
    assert_eq!(jobs, ["modelrelay-operator", "modelrelay-relay", "modelrelay-worker"]);
    assert_eq!(by_job["modelrelay-relay"].len(), 1);
    assert_eq!(by_job["modelrelay-worker"].len(), 3, "templated, injected and standalone");
    by_job.remove("modelrelay-operator");
    assert_eq!(monitored(namespace, pods).await, by_job, "the scrape jobs and the PodMonitors disagree");
}

#[tokio::test]
async fn healthy_installation_raises_no_critical_alert() {
    let namespace = serving("alerts", &[worker_pool("llm", &demo_pool("local"))]).await;
    wait_for_pool(&namespace, "llm").await;
    namespace.rolled_out("deployment/llm-backend").await;
    let prometheus = Prometheus::start().await;
    prometheus.discover(&pods(&namespace).await);
    prometheus.wait_for_number("sum(modelrelay_worker_connected)", 1.0).await;

    let mut loaded = BTreeMap::new();
    let all_evaluated = async || {
        let data = prometheus.api("rules?type=alert").await;
        let groups = data["groups"].as_array().expect("groups").clone();
        let all = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules"));
        loaded = all.map(|rule| (rule["name"].as_str().expect("a name").to_owned(), rule.clone())).collect();
        loaded.values().all(|rule| rule["health"] == "ok")
    };
    wait_until("every alert to be evaluated without an error", TEST_TIMEOUT, all_evaluated).await;
    assert_eq!(loaded.keys().collect::<Vec<_>>(), rules("alert").keys().collect::<Vec<_>>());

    // Pending would be enough: a rule with a wrong label holds from the first scrape on.
    let quiet = async || {
        let data = prometheus.api("alerts").await;
        let raised = data["alerts"].as_array().expect("alerts").iter();
        !raised.into_iter().any(|alert| {
            let labels = &alert["labels"];
            labels["severity"] == "critical" || labels["namespace"] == namespace.name.as_str()
        })
    };
    wait_until("no alert, pending or firing, for a healthy system", TEST_TIMEOUT, quiet).await;
}

/// Returns the query of the KEDA example, for this namespace's Provider and model.
fn keda_query(namespace: &str) -> String {
    let object = documents(&read("deploy/examples/keda-scaledobject.yaml")).remove(0);
    let query = object["spec"]["triggers"][0]["metadata"]["query"].as_str().expect("a query").to_owned();
    let adapted =
        query.replace("namespace=\"llm\"", &format!("namespace=\"{namespace}\"")).replace("Qwen/Qwen3-8B", DEMO_MODEL);
    assert!(adapted.contains(namespace) && adapted.contains(&format!("model=\"{DEMO_MODEL}\"")), "{adapted}");
    adapted
}

/// Returns the query that the HPA example configures in prometheus-adapter, as the adapter would send it.
fn adapter_query(namespace: &str) -> String {
    let text = read("deploy/examples/hpa.yaml");
    let query = text.lines().find_map(|line| line.split_once("metricsQuery: '")?.1.strip_suffix('\''));
    let matchers = format!("namespace=\"{namespace}\",provider=\"local\"");
    let query = query.expect("a query").replace("<<.LabelMatchers>>", &matchers).replace("<<.GroupBy>>", "namespace");
    assert!(query.contains("model=\"Qwen/Qwen3-8B\""), "{query}");
    query.replace("Qwen/Qwen3-8B", DEMO_MODEL)
}

#[tokio::test]
async fn autoscaling_queries_return_requests_from_zero() {
    let mut pool = demo_pool("local");
    pool["models"] = json!([DEMO_MODEL]);
    pool["replicas"] = json!(0);
    let namespace = serving("keda", &[worker_pool("llm", &pool)]).await;
    wait_for_pool(&namespace, "llm").await;
    let prometheus = Prometheus::start().await;
    prometheus.discover(&pods(&namespace).await);
    let queries = [keda_query(&namespace.name), adapter_query(&namespace.name)];

    // At zero the result must be a number: KEDA treats an empty result as an error.
    expect_number(&prometheus, &queries, 0.0).await;
    let traffic = Traffic::to(namespace.service_address("local").await).streams(3).words(80).start();
    expect_number(&prometheus, &queries, 3.0).await;
    prometheus.wait_for_number("sum(modelrelay_requests_in_flight)", 0.0).await;

    namespace.kubectl("scale wp llm --replicas 1").await;
    traffic.wait_for_underway(3).await;
    prometheus.wait_for_number("sum(modelrelay_requests_in_flight)", 3.0).await;
    expect_number(&prometheus, &queries, 3.0).await;
    traffic.finish().await.expect_all_answered();
    expect_number(&prometheus, &queries, 0.0).await;
}

async fn expect_number(prometheus: &Prometheus, queries: &[String], number: f64) {
    for query in queries {
        prometheus.wait_for_number(query, number).await;
    }
}

#[tokio::test]
async fn api_server_accepts_every_example_of_known_kinds() {
    let namespace = Cluster::connect().await.namespace_with("examples", "privileged").await;
    let mut unknown = BTreeSet::new();
    let mut taken = BTreeSet::new();
    for entry in fs::read_dir(format!("{ROOT}/deploy/examples")).expect("the examples exist") {
        let path = entry.expect("a file").path();
        let text = fs::read_to_string(&path).expect("a text");
        for object in documents(&text) {
            let kind = object["kind"].as_str().expect("a kind").to_owned();
            let dry = namespace
                .kubectl("apply --server-side --validate=strict --dry-run=server --filename -")
                .input(object.to_string());
            let output = dry.output().await;
            if output.success {
                taken.insert(kind);
            } else {
                assert!(output.stderr.contains("no matches for kind"), "{}: {kind}: {}", path.display(), output.stderr);
                unknown.insert(kind);
            }
        }
    }
    assert_eq!(
        unknown.iter().map(String::as_str).collect::<Vec<_>>(),
        FOREIGN_KINDS,
        "kinds that the cluster does not define"
    );
    for kind in ["Deployment", "HorizontalPodAutoscaler", "Ingress", "Provider", "WorkerPool"] {
        assert!(taken.contains(kind), "no {kind} among the examples: {taken:?}");
    }
}
