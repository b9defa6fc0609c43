//! The test's own Prometheus: Debian's package, with the shipped scrape jobs and rules.
//!
//! Debian builds it without Kubernetes' service discovery. The test therefore lists the Pods and passes to Prometheus
//! what that discovery would: a target for each port of each container, with the same `__meta_kubernetes_` labels. The
//! shipped `relabel_configs` then decide, in Prometheus itself, which of them are scraped, as which job and with which
//! labels.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::Stdio,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use modelrelay_cluster::{Command, TEST_TIMEOUT, http, poll_for, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Child;

/// Root of the repository.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

const TARGETS: &str = "pods.json";

/// A running Prometheus, which ends and removes its data when dropped.
pub(crate) struct Prometheus {
    address: SocketAddr,
    dir: TempDir,
    _child: Child,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes every second and has no targets yet.
    pub(crate) async fn start() -> Self {
        install().await;
        let dir = tempfile::tempdir().expect("a folder for its data");
        fs::write(dir.path().join("prometheus.yml"), configuration(dir.path())).expect("its configuration is written");
        fs::write(dir.path().join(TARGETS), "[]").expect("its targets are written");
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = port.expect("a free port");
        let log = fs::File::create(dir.path().join("log")).expect("its log can be written");
        let child = tokio::process::Command::new("prometheus")
            .current_dir(dir.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"])
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("prometheus starts");
        let prometheus = Self { address, dir, _child: child };
        let ready = async || {
            let answer = http::fetch(address, "GET /-/ready", &[], &Value::Null).await;
            answer.ok().filter(|answer| answer.status == 200)
        };
        if poll_for(TEST_TIMEOUT, ready).await.is_none() {
            panic!(
                "prometheus does not start: {}",
                fs::read_to_string(prometheus.dir.path().join("log")).unwrap_or_default()
            );
        }
        prometheus
    }

    /// Sets the Pods to discover.
    pub(crate) fn discover(&self, pods: &[Pod]) {
        let targets: Vec<Value> = pods.iter().flat_map(targets).collect();
        // It reloads the file on every change, so the file must never be partial.
        let new = self.dir.path().join("new");
        fs::write(&new, json!(targets).to_string()).expect("its targets are written");
        fs::rename(&new, self.dir.path().join(TARGETS)).expect("its targets are replaced");
    }

    /// Returns `data` of the API's response for this path.
    pub(crate) async fn api(&self, path: &str) -> Value {
        let response = http::fetch(self.address, &format!("GET /api/v1/{path}"), &[], &Value::Null).await;
        let mut response = response.unwrap_or_else(|error| panic!("{path}: {error}")).json();
        assert_eq!(response["status"], "success", "{path}: {response}");
        response["data"].take()
    }

    /// Returns the current samples of a query: labels and value.
    pub(crate) async fn query(&self, query: &str) -> Vec<(Value, f64)> {
        let mut data = self.api(&format!("query?query={}", percent_encoded(query))).await;
        assert_eq!(data["resultType"], "vector", "{query}");
        let samples = data["result"].as_array_mut().expect("samples").iter_mut();
        let number = |value: &Value| value.as_str().and_then(|text| text.parse().ok()).expect("a number");
        samples.map(|sample| (sample["metric"].take(), number(&sample["value"][1]))).collect()
    }

    /// Waits until a query returns this single number.
    pub(crate) async fn wait_for_number(&self, query: &str, number: f64) {
        let is = async || matches!(self.query(query).await.as_slice(), [(_, value)] if (*value - number).abs() < 1e-9);
        wait_until(&format!("{query} to return {number}"), TEST_TIMEOUT, is).await;
    }

    /// Returns job and URL of all targets, sorted, and whether all of them responded last time.
    pub(crate) async fn scraped(&self) -> (Vec<(String, String)>, bool) {
        let data = self.api("targets?state=active").await;
        let targets = data["activeTargets"].as_array().expect("targets");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut scraped: Vec<_> =
            targets.iter().map(|target| (text(&target["labels"]["job"]), text(&target["scrapeUrl"]))).collect();
        scraped.sort();
        (scraped, targets.iter().all(|target| target["health"] == "up"))
    }
}

/// Returns the shipped scrape jobs and rules with a short interval, and the targets from a file.
fn configuration(dir: &Path) -> String {
    let text = fs::read_to_string(format!("{ROOT}/deploy/prometheus/scrape.yaml")).expect("the scrape jobs exist");
    let mut config: Value = serde_yaml::from_str(&text).expect("the scrape jobs are YAML");
    config["global"] = json!({"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"});
    for job in config["scrape_configs"].as_array_mut().expect("jobs") {
        let job = job.as_object_mut().expect("a job");
        assert_eq!(job.remove("kubernetes_sd_configs"), Some(json!([{"role": "pod"}])), "another way to find targets");
        job.insert("file_sd_configs".to_owned(), json!([{"files": [TARGETS], "refresh_interval": "1s"}]));
    }
    let rules = format!("{ROOT}/charts/modelrelay/files/rules/modelrelay.yaml");
    for name in config["rule_files"].as_array().expect("rule files") {
        fs::copy(&rules, dir.join(name.as_str().expect("a file name"))).expect("the rules exist");
    }
    serde_yaml::to_string(&config).expect("YAML")
}

/// Returns what Kubernetes' service discovery would produce for a Pod, as far as the shipped jobs use it.
fn targets(pod: &Pod) -> Vec<Value> {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else { return Vec::new() };
    let Some(ip) = &status.pod_ip else { return Vec::new() };
    let mut labels = json!({
        "__meta_kubernetes_namespace": pod.namespace(),
        "__meta_kubernetes_pod_name": pod.name_any(),
        "__meta_kubernetes_pod_phase": status.phase,
    });
    for (label, value) in pod.labels() {
        let label: String = label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        labels[format!("__meta_kubernetes_pod_label_{label}")] = json!(value);
        labels[format!("__meta_kubernetes_pod_labelpresent_{label}")] = json!("true");
    }
    let mut targets = Vec::new();
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        for port in container.ports.iter().flatten() {
            let mut labels = labels.clone();
            labels["__meta_kubernetes_pod_container_name"] = json!(container.name);
            labels["__meta_kubernetes_pod_container_port_name"] = json!(port.name.as_deref().unwrap_or_default());
            targets.push(json!({"targets": [format!("{ip}:{}", port.container_port)], "labels": labels}));
        }
    }
    targets
}

/// Installs Prometheus if it is missing and the package can be installed without interaction.
async fn install() {
    let is_there = async || Command::new("/bin/sh").args(["-c", "command -v prometheus"]).output().await.success;
    if is_there().await {
        return;
    }
    let install = "apt-get install -qq -y --no-install-recommends prometheus";
    let script = format!("{install} || {{ apt-get update -qq && {install}; }}");
    let output = Command::new("/bin/sh").args(["-c", &script]).env("DEBIAN_FRONTEND", "noninteractive").output().await;
    wait_until("prometheus, of Debian's package", Duration::from_secs(5), is_there).await;
    assert!(output.success, "{}", output.stderr);
}

fn percent_encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
