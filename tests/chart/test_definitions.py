"""The custom resource definitions of a cluster: no upgrade may delete them, and with them every object."""

import copy
import os
import subprocess

import chart
import fake_cluster
import pytest

NAMES = ["providers.modelrelay.io", "workerpools.modelrelay.io"]
KEEP = {"helm.sh/resource-policy": "keep"}
RECORD = {"modelrelay.io/definitions": ",".join(NAMES)}
OTHER = {"meta.helm.sh/release-name": "other", "meta.helm.sh/release-namespace": "mr-system"}
OWN = {"meta.helm.sh/release-name": "modelrelay", "meta.helm.sh/release-namespace": "mr-system"}

helms = pytest.mark.parametrize("program", chart.HELMS, ids=["helm3", "helm4"])


def rendered(program, folder, annotations, *arguments, recorded=True):
    """Renders the chart in a cluster whose definitions have these annotations. Returns Helm's result.

    `recorded`: the release's present revision records that it contains them."""
    existing = copy.deepcopy(chart.of_kind(chart.render(), "CustomResourceDefinition"))
    for thing in existing:
        thing["metadata"]["annotations"] = annotations
    operator = copy.deepcopy(chart.one(chart.render(), "Deployment"))
    assert operator["metadata"].pop("annotations") == RECORD
    if "--is-upgrade" in arguments:
        existing.append(operator | {"metadata": operator["metadata"] | ({"annotations": RECORD} if recorded else {})})
    with fake_cluster.cluster(chart.render(), existing, folder) as kubeconfig:
        return subprocess.run(
            [
                program, "template", "modelrelay", str(chart.CHART), "--namespace", "mr-system", "--dry-run=server",
                "--kube-version", chart.KUBE_VERSION, "--disable-openapi-validation", *arguments,
            ],
            capture_output=True, text=True, cwd=chart.ROOT, env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        )


def definitions(done):
    assert done.returncode == 0, done.stderr
    return [thing["metadata"]["name"] for thing in chart.of_kind(chart.load_all(done.stdout), "CustomResourceDefinition")]


@helms
def test_upgrade_contains_own_definitions(program, tmp_path):
    for annotations in [KEEP | OWN, OWN]:
        assert definitions(rendered(program, tmp_path, annotations, "--is-upgrade")) == NAMES


@helms
def test_upgrade_takes_back_replaced_definitions(program, tmp_path):
    """`kubectl replace` removes Helm's ownership, and with files of earlier versions the annotation."""
    for annotations in [KEEP, {}, None]:
        assert definitions(rendered(program, tmp_path, annotations, "--is-upgrade")) == NAMES


@helms
def test_upgrade_leaves_out_only_kept_definitions(program, tmp_path):
    upgrade, without = ["--is-upgrade"], ["--is-upgrade", "--set", "crds.install=false"]
    for annotations, arguments, recorded in [(OTHER, upgrade, True), ({}, upgrade, False), (OWN, without, True)]:
        kept = rendered(program, tmp_path, annotations | KEEP, *arguments, recorded=recorded)
        assert definitions(kept) == []
        refused = rendered(program, tmp_path, annotations, *arguments, recorded=recorded)
        assert refused.returncode != 0, (annotations, arguments)
        assert f"kubectl annotate crd {' '.join(NAMES)} helm.sh/resource-policy=keep" in refused.stderr


@helms
def test_installation_leaves_out_foreign_definitions(program, tmp_path):
    assert definitions(rendered(program, tmp_path, {})) == []


def test_every_file_keeps_definitions():
    for folder in ["crds", "deploy/kustomize/base"]:
        files = [thing for path in (chart.ROOT / folder).glob("*.yaml") for thing in chart.load_all(path.read_text())]
        found = chart.of_kind(files, "CustomResourceDefinition")
        assert sorted(thing["metadata"]["name"] for thing in found) == NAMES, folder
        assert all(thing["metadata"]["annotations"] == KEEP for thing in found), folder


def test_definitions_are_kept_on_uninstall():
    for values in [{}, {"crds": {"keep": False}}]:
        found = chart.of_kind(chart.render(values), "CustomResourceDefinition")
        assert [thing["metadata"]["annotations"] for thing in found] == [KEEP, KEEP]
    assert chart.of_kind(chart.render({"crds": {"install": False}}), "CustomResourceDefinition") == []
