//! A Pod keeps all of its own fields.

use serde_json::{Value, json};

use super::setup::{POOL_LABEL, Setup, pod, worker};
use modelrelay_cluster::manifests::{WORKER_IMAGE, container_security};

/// A Pod that sets nearly every field that `restricted` allows, in ways that injectors are known to lose: other
/// injectors' sidecars, empty strings and lists, numbers as text, recent fields. A gate keeps it from running.
fn rich(name: &str) -> Value {
    let probe = json!({"grpc": {"port": 9000, "service": ""}, "periodSeconds": 7, "failureThreshold": 11, "terminationGracePeriodSeconds": 3});
    let metadata = json!({
        "name": name,
        "labels": {"app": "vllm", "example.com/empty": ""},
        "annotations": {
            "example.com/json": "{\"a\": [1, 2.50, \"ü\"]}", "example.com/lines": "one\ntwo\n", "prometheus.io/scrape": "false",
        },
        "finalizers": [],
    });
    let mut spec = json!({
        "activeDeadlineSeconds": 86400,
        "automountServiceAccountToken": false,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.96.0.10"], "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}], "searches": ["example.com"]},
        "enableServiceLinks": false,
        "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["a.example", "b.example"]}],
        "hostUsers": false,
        "hostname": "box",
        "subdomain": "boxes",
        "setHostnameAsFQDN": true,
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"example.com/gpu": "true"},
        "os": {"name": "linux"},
        "priority": 0,
        "readinessGates": [{"conditionType": "example.com/warm"}],
        "restartPolicy": "Always",
        "schedulerName": "somebody-elses",
        "schedulingGates": [{"name": "example.com/hold"}],
        "shareProcessNamespace": true,
        "terminationGracePeriodSeconds": 25,
        "resources": {"limits": {"cpu": "8", "memory": "2Gi"}, "requests": {"cpu": "2500m", "memory": "1500Mi"}},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 3, "preference": {"matchExpressions": [{"key": "example.com/disk", "operator": "Gt", "values": ["12"]}]}},
        ]}},
        "securityContext": {
            "fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch", "runAsGroup": 3000, "runAsNonRoot": true, "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"}, "supplementalGroups": [4000], "supplementalGroupsPolicy": "Strict",
            "sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}],
        },
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists", "tolerationSeconds": 30, "effect": "NoExecute"}],
        "topologySpreadConstraints": [{
            "maxSkew": 2, "minDomains": 3, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "vllm"}}, "matchLabelKeys": ["pod-template-hash"], "nodeTaintsPolicy": "Honor",
        }],
        "volumes": volumes(),
    });
    spec["initContainers"] = json!([
        {
            "name": "download", "image": "example/download:1", "securityContext": container_security(),
            "command": ["sh", "-c", "echo \"$A\" '${B}' > /models/x"],
            "volumeMounts": [{"name": "models", "mountPath": "/models", "subPathExpr": "$(A)"}],
            "env": [{"name": "A", "value": ""}],
        },
        {
            "name": "proxy", "image": "example/proxy:1", "restartPolicy": "Always", "securityContext": container_security(),
            "ports": [{"name": "proxy", "containerPort": 9090, "protocol": "UDP"}],
            "startupProbe": probe.clone(), "readinessProbe": {"tcpSocket": {"port": 9091}},
            "lifecycle": {"preStop": {"httpGet": {"path": "/bye", "port": 9090, "scheme": "HTTPS"}}},
        },
    ]);
    spec["containers"] = json!([serving_container(&probe), {
        "name": "logs", "image": "example/logs@sha256:0123456789012345678901234567890123456789012345678901234567890123",
        "imagePullPolicy": "Always", "securityContext": container_security(),
        "resources": {"limits": {"memory": "0.5Gi"}, "requests": {"cpu": "0.10", "memory": "131072k"}},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared", "mountPropagation": "HostToContainer"}],
    }]);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

fn volumes() -> Value {
    json!([
        {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": true}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "shared", "emptyDir": {}},
        {"name": "settings", "configMap": {"name": "settings", "optional": true, "defaultMode": 0o400, "items": [{"key": "a", "path": "b/c", "mode": 0o440}]}},
        {"name": "all", "projected": {"sources": [
            {"serviceAccountToken": {"path": "t", "audience": "vault", "expirationSeconds": 7200}},
            {"downwardAPI": {"items": [{"path": "cpu", "resourceFieldRef": {"containerName": "vllm", "resource": "limits.cpu", "divisor": "1m"}}]}},
        ]}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "resources": {"requests": {"storage": "100Gi"}},
        }}}},
    ])
}

fn serving_container(probe: &Value) -> Value {
    json!({
        "name": "vllm", "image": WORKER_IMAGE, "imagePullPolicy": "Never", "args": ["demo", "--listen", "0.0.0.0:8000"],
        "ports": [{"name": "http", "containerPort": 8000}, {"name": "grpc", "containerPort": 9000}],
        "env": [
            {"name": "EMPTY", "value": ""}, {"name": "NUMBER", "value": "010"}, {"name": "REFERS", "value": "$(NUMBER)-$$(NUMBER)"},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['example.com/json']"}}},
            {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k", "optional": true}}},
        ],
        "envFrom": [{"prefix": "X_", "configMapRef": {"name": "settings", "optional": true}}],
        "lifecycle": {"postStart": {"httpGet": {"path": "/warm", "port": "http", "httpHeaders": [{"name": "X-A", "value": ""}]}}},
        "livenessProbe": {"exec": {"command": ["true", ""]}, "timeoutSeconds": 9}, "startupProbe": probe,
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}, {"resourceName": "memory", "restartPolicy": "RestartContainer"}],
        "resources": {"limits": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"}, "requests": {"cpu": "2000m", "memory": "1024Mi", "nvidia.com/gpu": "1"}},
        "securityContext": container_security(), "stdin": true, "stdinOnce": true, "tty": true,
        "terminationMessagePath": "/dev/last-words", "terminationMessagePolicy": "File", "workingDir": "/models",
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"}, {"name": "models", "mountPath": "/models", "readOnly": true, "recursiveReadOnly": "Disabled"},
            {"name": "all", "mountPath": "/all", "readOnly": true}, {"name": "scratch", "mountPath": "/scratch", "subPath": "a"},
        ],
    })
}

/// Removes the fields that the API server writes into every Pod.
fn own(mut pod: Value) -> Value {
    let metadata = pod["metadata"].as_object_mut().expect("metadata");
    for key in ["name", "uid", "resourceVersion", "creationTimestamp", "managedFields", "generation"] {
        metadata.remove(key);
    }
    pod.as_object_mut().expect("a Pod").remove("status");
    pod
}

/// Removes the additions of injection, and checks that each is present and last.
fn without_worker(mut pod: Value) -> Value {
    assert_eq!(worker(&pod).map(|(list, _)| list), Some("initContainers"));
    pod["spec"]["initContainers"].as_array_mut().expect("a list").pop();
    let volumes = pod["spec"]["volumes"].as_array_mut().expect("a list");
    let added = volumes.split_off(volumes.len() - 3);
    let names: Vec<_> = added.iter().map(|volume| volume["name"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["modelrelay-config", "modelrelay-secret", "modelrelay-no-token"]);
    let lifecycle = pod["spec"]["containers"][0]["lifecycle"].as_object_mut().expect("the container has a lifecycle");
    assert!(lifecycle.remove("preStop").is_some_and(|hook| hook["httpGet"]["path"] == "/drain"));
    let grace = pod["spec"]["terminationGracePeriodSeconds"].take();
    assert_eq!(grace, 40, "the grace period must be raised from 25");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(25);
    let label = pod["metadata"]["labels"].as_object_mut().expect("the Pod has labels").remove(POOL_LABEL);
    assert_eq!(label, Some(json!("llama")));
    assert!(take_hash(&mut pod));
    pod
}

/// Removes the hash that identifies an outdated worker; returns true if it was present.
fn take_hash(pod: &mut Value) -> bool {
    let annotations = pod["metadata"]["annotations"].as_object_mut().expect("the Pod has annotations");
    annotations.remove("modelrelay.io/worker-hash").is_some()
}

#[tokio::test]
async fn foreign_pod_fields_are_kept_byte_for_byte() {
    let setup = Setup::pool(&json!({})).await;
    let plain = rich("plain");
    let mut labelled = rich("labelled");
    labelled["metadata"]["labels"][POOL_LABEL] = json!("llama");
    for pod in [&plain, &labelled] {
        setup.namespace.kubectl("create --filename -").input(pod.to_string()).await;
    }
    let created = async |name: &str| -> Value {
        let text = setup.namespace.kubectl(&format!("get pod {name} --output json")).await;
        own(serde_json::from_str(&text).expect("kubectl prints JSON"))
    };
    let (plain, injected) = (created("plain").await, without_worker(created("labelled").await));
    // The comparison proves little if the API server dropped these fields.
    for kept in [
        "/spec/resources/requests/cpu",
        "/spec/hostUsers",
        "/spec/containers/0/resizePolicy/1",
        "/spec/initContainers/1/startupProbe/grpc",
    ] {
        assert!(plain.pointer(kept).is_some(), "{kept} is not there even without injection");
    }
    assert_eq!(injected.to_string(), plain.to_string());
}

#[tokio::test]
async fn own_hook_is_kept_and_user_is_warned() {
    let setup = Setup::pool(&json!({})).await;
    let mut own = pod("vllm", "llama");
    let hook = json!({"preStop": {"sleep": {"seconds": 3}}});
    own["spec"]["containers"][0]["lifecycle"] = hook.clone();
    let command = setup.namespace.kubectl("create --dry-run=server --output json --filename -");
    let output = command.input(own.to_string()).output().await;
    assert!(output.success, "{output:?}");
    assert!(output.stderr.contains("Warning: container vllm has a preStop hook"), "{}", output.stderr);
    let given: Value = serde_json::from_str(&output.stdout).expect("kubectl prints JSON");
    assert!(worker(&given).is_some());
    assert_eq!(given["spec"]["containers"][0]["lifecycle"], hook);
}

#[tokio::test]
async fn own_scrape_annotations_are_kept() {
    let setup = Setup::pool(&json!({"sidecar": {"port": 18000}})).await;
    let mut scraped = setup.admitted(&pod("vllm", "llama")).await;
    assert!(take_hash(&mut scraped));
    let wanted =
        json!({"prometheus.io/scrape": "true", "prometheus.io/port": "18000", "prometheus.io/path": "/metrics"});
    assert_eq!(scraped["metadata"]["annotations"], wanted);
    let mut own = pod("vllm", "llama");
    let annotations = json!({"prometheus.io/port": "8000", "example.com/a": "b"});
    own["metadata"]["annotations"] = annotations.clone();
    let mut scraped = setup.admitted(&own).await;
    assert!(take_hash(&mut scraped));
    assert_eq!(scraped["metadata"]["annotations"], annotations);
}

#[tokio::test]
async fn pod_with_pod_level_resources_gets_worker() {
    let setup = Setup::pool(&json!({})).await;
    let mut whole = pod("vllm", "llama");
    whole["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1", "memory": "1Gi"}});
    // The API server fills in missing values from the containers before it calls any webhook.
    whole["spec"]["resources"] = json!({"limits": {"cpu": "2", "memory": "2Gi"}, "requests": {"cpu": "1"}});
    assert!(worker(&setup.admitted(&whole).await).is_some());
}
