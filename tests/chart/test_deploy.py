"""Deployments without Helm: the kustomize base equals the chart, and the API server accepts the examples."""

import copy
import re
import subprocess

import chart
import jsonschema
import pytest
import yaml

BASE = chart.ROOT / "deploy/kustomize/base"
EXAMPLES = sorted((chart.ROOT / "deploy/examples").glob("*.yaml"))
HELMS_OWN = {"helm.sh/chart", "app.kubernetes.io/managed-by"}


def kustomized(folder):
    done = subprocess.run([chart.KUBECTL, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {chart.identity(thing): thing for thing in chart.load_all(done.stdout) if thing["kind"] != "Namespace"}


def from_chart(values):
    """Returns the chart's objects without the parts that only Helm can use."""
    objects = {}
    for thing in copy.deepcopy(chart.render(values, namespace="modelrelay-system")):
        annotations = thing["metadata"].get("annotations", {})
        if "helm.sh/hook" in annotations:
            continue
        for label in HELMS_OWN:
            thing["metadata"]["labels"].pop(label, None)
        # Only the chart's own upgrades read it.
        if annotations.pop("modelrelay.io/definitions", None) and not annotations:
            del thing["metadata"]["annotations"]
        objects[chart.identity(thing)] = thing
    return objects


def test_base_equals_the_chart():
    assert kustomized(BASE) == from_chart({"crds": {"keep": False}}), "run scripts/chart generate"


def test_local_overlay_equals_the_chart_with_local_images():
    values = {"crds": {"keep": False}, "image": {"tag": "dev", "pullPolicy": "Never"}}
    overlay, wanted = kustomized(chart.ROOT / "deploy/kustomize/local"), from_chart(values)
    for objects in [overlay, wanted]:
        # Leaves out of the defaults what Helm computes and kustomize does not.
        template = objects["Deployment", "modelrelay-system", "modelrelay-operator"]["spec"]["template"]
        del template["metadata"]["annotations"]["modelrelay.io/defaults-checksum"]
        data = objects["ConfigMap", "modelrelay-system", "modelrelay-operator-defaults"]["data"]
        data["defaults.yaml"] = yaml.safe_load(data["defaults.yaml"])
    assert overlay == wanted


def schemas():
    """Returns, by kind, the definition's schema, made as strict as the API server."""
    found = {}
    for path in (chart.ROOT / "crds").glob("*.yaml"):
        [definition] = chart.load_all(path.read_text())
        [version] = definition["spec"]["versions"]
        found[definition["spec"]["names"]["kind"]] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema):
    """Makes a schema as strict as kubectl's validation: an unknown key is an error; null is valid where it is allowed."""
    schema = dict(schema)
    if "properties" in schema:
        schema["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        schema["items"] = strict(schema["items"])
    if schema.pop("nullable", False) and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
    return schema


def validate(thing):
    # The fields that every object has are not in the definition's schema.
    body = {key: value for key, value in thing.items() if key not in ("apiVersion", "kind", "metadata")}
    schema = schemas()[thing["kind"]]
    schema["properties"] = {
        key: value for key, value in schema["properties"].items() if key not in ("apiVersion", "kind", "metadata")
    }
    jsonschema.validate(body, schema)


def test_the_demo_is_valid():
    for thing in chart.demo_resources(chart.render(chart.CASES["everything"])):
        validate(thing)


def test_misspelt_key_is_rejected():
    [provider, pool] = chart.demo_resources(chart.render({"demo": {"enabled": True}}))
    pool["spec"]["backend"]["prot"] = pool["spec"]["backend"].pop("port")
    provider["spec"]["secretPolicy"] = provider["spec"].pop("secretsPolicy")
    for thing in [provider, pool]:
        with pytest.raises(jsonschema.ValidationError, match="prot|secretPolicy"):
            validate(thing)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_states_its_purpose_and_how_to_apply_it(path):
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header and f"kubectl apply -n llm -f {path.name}" in header[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path):
    documents = chart.load_all(path.read_text())
    assert documents
    for thing in documents:
        assert thing["metadata"]["name"] and "namespace" not in thing["metadata"]
        if thing["apiVersion"].startswith("modelrelay.io/"):
            validate(thing)


def examples(kind):
    return {
        thing["metadata"]["name"]: thing
        for path in EXAMPLES
        for thing in chart.load_all(path.read_text())
        if thing["kind"] == kind
    }


def test_references_between_examples_resolve():
    providers, pools = examples("Provider"), examples("WorkerPool")
    assert {pool["spec"]["provider"] for pool in pools.values()} <= providers.keys()
    for scaler in [*examples("ScaledObject").values(), *examples("HorizontalPodAutoscaler").values()]:
        pool = pools[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "template" in pool["spec"] and "scaling" not in pool["spec"]
    scaled = set(deployments_of(pools.values()))
    tenants = [tenant for provider in providers.values() for tenant in provider["spec"].get("relay", {}).get("tenants", [])]
    accounts = {tenant["serviceAccount"] for tenant in tenants if "serviceAccount" in tenant}
    for name, deployment in examples("Deployment").items():
        template = deployment["spec"]["template"]
        if is_client(template["spec"]):
            assert template["spec"]["serviceAccountName"] in accounts & examples("ServiceAccount").keys()
        else:
            assert name in scaled or template["metadata"]["labels"]["modelrelay.io/pool"] in pools
    assert scaled <= set(examples("Deployment"))


def test_targets_of_pools_have_their_label():
    for name, pool in examples("WorkerPool").items():
        if target := pool["spec"].get("scaling", {}).get("targetRef"):
            workload = examples(target["kind"])[target["name"]]
            assert workload["apiVersion"] == target["apiVersion"]
            assert workload["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] == name
            assert "replicas" not in workload["spec"]


def is_client(spec):
    """True if a Pod has a token that relays accept in place of an API key."""
    sources = [source for volume in spec.get("volumes", []) for source in volume.get("projected", {}).get("sources", [])]
    return any(source.get("serviceAccountToken", {}).get("audience") == "modelrelay-clients" for source in sources)


def deployments_of(pools):
    """Returns the Deployments that workers scale."""
    for pool in pools:
        for slot in pool["spec"].get("multiplexer", {}).get("slots", []):
            yield from (model["deployment"] for model in slot["models"] if "deployment" in model)


def test_routes_name_services_of_providers():
    services = examples("Provider")
    [route] = examples("HTTPRoute").values()
    for name, ingress in examples("Ingress").items():
        service = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        takes_workers = services[service["name"]]["spec"]["relay"].get("service", {}).get("workers", False)
        assert service["port"]["number"] in ([80, 8081] if takes_workers else [80]), name
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] in services
