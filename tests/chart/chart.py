"""Shared by the tests of the chart: renders it and reads the result."""

import functools
import json
import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/modelrelay"
HELMS = [os.environ["HELM3"], os.environ["HELM4"]]
KUBECTL = os.environ["KUBECTL"]
PROMTOOL = os.environ["PROMTOOL"]
KUBE_VERSION = os.environ["KUBE_VERSION"]

MONITORING = {
    kind: {"enabled": True, "additionalLabels": {"release": "kube-prometheus-stack"}}
    for kind in ["serviceMonitor", "podMonitor", "prometheusRule", "dashboards"]
}

# Sets of values that differ in which objects exist, or in their shape.
CASES = {
    "defaults": {},
    "watch-namespaces": {"watchNamespaces": ["mr-system", "team-a"]},
    "cert-manager": {"webhook": {"certManager": {"enabled": True}}},
    "cert-manager-issuer": {
        "webhook": {"certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "internal"}}}
    },
    "own-certificate": {"webhook": {"existingSecret": "my-certificate"}},
    "no-webhook": {"webhook": {"enabled": False}},
    "no-webhook-watch-namespaces": {"webhook": {"enabled": False}, "watchNamespaces": ["team-a"]},
    "host-network": {"webhook": {"hostNetwork": True, "port": 10250 + 9}},
    "monitoring": {"metrics": MONITORING},
    "monitoring-watch-namespaces": {"metrics": MONITORING, "watchNamespaces": ["team-a"]},
    "demo": {"demo": {"enabled": True}},
    "openshift": {"openshift": {"enabled": True}, "demo": {"enabled": True}},
    "http-route": {"httpRoute": {"enabled": True, "provider": "local", "parentRefs": [{"name": "public"}]}},
    "no-crds": {"crds": {"install": False}},
    "bare": {
        "rbac": {"aggregate": False},
        "networkPolicy": {"enabled": False},
        "operator": {"podDisruptionBudget": {"enabled": False}, "resources": {}},
        "relay": {"resources": {}},
    },
    "everything": {
        "fullnameOverride": "mr",
        "image": {"registry": "registry.example:5000/llm/", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull-secret"}],
        "operator": {
            "replicas": 3,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "control", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"a": "1"},
            "podLabels": {"l": "1"},
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        },
        "service": {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]},
        "relay": {
            "image": "registry.example/relay:2",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
            "priorityClassName": "high",
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
        "metrics": MONITORING,
        "demo": {"enabled": True},
        "httpRoute": {
            "enabled": True,
            "namespace": "llm",
            "port": 443,
            "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
            "hostnames": ["llm.example.com"],
            "additionalLabels": {"team": "a"},
            "annotations": {"example.com/a": "1"},
            "timeouts": {"request": "1h30m", "backendRequest": "1h"},
        },
    },
}


class UniqueKeys(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):
    """Rejects duplicate keys, which YAML parsers accept and API servers do not."""


def unique_mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"duplicate key among {keys} {node.start_mark}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, unique_mapping)


def load_all(text):
    return [document for document in yaml.load_all(text, Loader=UniqueKeys) if document]


def helm(program, *args, values=None):
    """Runs Helm with these values."""
    return subprocess.run(
        [program, *args, "--values", "-"], input=json.dumps(values or {}), capture_output=True, text=True, cwd=ROOT
    )


@functools.cache
def rendered(program, values, release, namespace):
    done = helm(
        program, "template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBE_VERSION,
        values=json.loads(values),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values=None, release="modelrelay", namespace="mr-system", program=HELMS[0]):
    """Returns the objects of a release."""
    return load_all(rendered(program, json.dumps(values or {}, sort_keys=True), release, namespace))


def refusal(values):
    """Returns Helm's error for values that it rejects."""
    done = helm(HELMS[0], "template", "modelrelay", str(CHART), "--kube-version", KUBE_VERSION, values=values)
    assert done.returncode != 0, f"{values} were taken"
    return done.stderr


def identity(thing):
    return (thing["kind"], thing["metadata"].get("namespace", ""), thing["metadata"]["name"])


def of_kind(objects, *kinds):
    return [thing for thing in objects if thing["kind"] in kinds]


def one(objects, kind, suffix=""):
    found = [thing for thing in of_kind(objects, kind) if thing["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} of kind {kind} named …{suffix}"
    return found[0]


def demo_resources(objects):
    return load_all(one(objects, "ConfigMap", "-demo")["data"]["resources.yaml"])


def pod_specs(objects):
    """Returns every Pod's spec, including the demo's."""
    for thing in objects:
        if thing["kind"] == "Pod":
            yield thing["metadata"]["name"], thing["spec"]
        elif thing["kind"] in ("Deployment", "DaemonSet", "Job", "WorkerPool") and "template" in thing["spec"]:
            yield thing["metadata"]["name"], thing["spec"]["template"]["spec"]
        elif thing["kind"] == "ConfigMap" and "resources.yaml" in thing["data"]:
            yield from pod_specs(load_all(thing["data"]["resources.yaml"]))
