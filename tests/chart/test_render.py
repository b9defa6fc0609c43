"""The chart's output for many sets of values, with both Helms."""

import re

import chart
import pytest
import yaml

helms = pytest.mark.parametrize("program", chart.HELMS, ids=["helm3", "helm4"])
cases = pytest.mark.parametrize("values", chart.CASES.values(), ids=chart.CASES.keys())

IDS = {"runAsUser", "runAsGroup", "fsGroup"}


@helms
def test_lint_passes(program):
    done = chart.helm(program, "lint", str(chart.CHART), "--strict", "--kube-version", chart.KUBE_VERSION)
    assert done.returncode == 0, done.stdout + done.stderr


@cases
def test_both_helm_versions_render_the_same_objects(values):
    by_helm = [{chart.identity(thing): thing for thing in chart.render(values, program=p)} for p in chart.HELMS]
    assert by_helm[0] == by_helm[1]


@cases
def test_no_object_is_rendered_twice(values):
    names = [chart.identity(thing) for thing in chart.render(values)]
    assert len(names) == len(set(names))


@cases
def test_every_container_is_restricted(values):
    for name, spec in chart.pod_specs(chart.render(values)):
        pod = spec["securityContext"]
        ids = {} if values.get("openshift") else dict.fromkeys(IDS, 65532)
        assert pod["runAsNonRoot"] and {key: pod[key] for key in IDS & pod.keys()} == ids, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is (spec.get("serviceAccountName") is not None), name
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }, f"{name}/{container['name']}"


@helms
@pytest.mark.parametrize(
    "enabled,apis,is_openshift",
    [
        ("auto", [], False),
        ("auto", ["security.openshift.io/v1"], True),
        (True, [], True),
        ("true", [], True),
        (False, ["security.openshift.io/v1"], False),
    ],
)
def test_openshift_assigns_ids_and_requires_delete_rights(program, enabled, apis, is_openshift):
    flags = [flag for api in apis for flag in ["--api-versions", api]]
    values = {"openshift": {"enabled": enabled}}
    done = chart.helm(program, "template", "modelrelay", str(chart.CHART), "--kube-version", chart.KUBE_VERSION, *flags, values=values)
    assert done.returncode == 0, done.stderr
    objects = chart.load_all(done.stdout)
    [pod] = [spec for name, spec in chart.pod_specs(objects) if name == "modelrelay-operator"]
    assert not IDS & pod["securityContext"].keys() if is_openshift else IDS <= pod["securityContext"].keys()
    defaults = yaml.safe_load(chart.one(objects, "ConfigMap", "-defaults")["data"]["defaults.yaml"])
    assert {part.get("omitIds") for part in defaults.values()} == {True if is_openshift else None}
    rules = [rule for role in chart.of_kind(objects, "ClusterRole") for rule in role["rules"]]
    assert any("deployments" in rule["resources"] and "delete" in rule["verbs"] for rule in rules) == is_openshift


@cases
def test_no_object_contains_the_webhook_ca(values):
    assert "caBundle" not in yaml.safe_dump(chart.render(values))


@cases
def test_webhook_service_and_operator_agree(values):
    objects = chart.render(values)
    deployment = chart.one(objects, "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["OPERATOR_DEFAULTS"] == "/etc/modelrelay-operator/defaults.yaml"
    chart.one(objects, "ConfigMap", "-defaults")
    # GitOps tools would compare the holder with a Lease of the chart for ever, so the operator creates it.
    assert not chart.of_kind(objects, "Lease")
    leases = [rule for rule in chart.one(objects, "Role", "-operator")["rules"] if rule["resources"] == ["leases"]]
    assert [rule.get("resourceNames") for rule in leases] == [None, [env["LEASE_NAME"]]]
    assert leases[0]["verbs"] == ["create"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert env["LISTEN_ADDR"] == f"[::]:{ports['metrics']}"
    if not values.get("webhook", {}).get("enabled", True):
        assert not chart.of_kind(objects, "MutatingWebhookConfiguration")
        assert not [name for name in env if name.startswith(("WEBHOOK", "CERTIFICATE", "EXTERNAL"))]
        return
    configuration = chart.one(objects, "MutatingWebhookConfiguration")
    service = configuration["webhooks"][0]["clientConfig"]["service"]
    assert configuration["metadata"]["name"] == env["WEBHOOK_CONFIGURATION"]
    assert service["name"] == env["WEBHOOK_SERVICE"]
    assert env["WEBHOOK_LISTEN_ADDR"] == f"[::]:{ports['webhook']}"
    [port] = chart.one(objects, "Service", service["name"])["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (service["port"], "webhook")
    for certificate in chart.of_kind(objects, "Certificate"):
        assert certificate["spec"]["secretName"] == env["CERTIFICATE_SECRET"]
        assert f"{service['name']}.{service['namespace']}.svc" in certificate["spec"]["dnsNames"]
    external = {"existingSecret", "certManager"} & values.get("webhook", {}).keys()
    assert env.get("EXTERNAL_CERTIFICATES") == ("true" if external else None)


def test_services_have_ip_families_only_if_given():
    families = {"ipFamilyPolicy", "ipFamilies"}
    assert not any(families & thing["spec"].keys() for thing in chart.of_kind(chart.render(), "Service"))
    given = chart.CASES["everything"]
    services = chart.of_kind(chart.render(given), "Service")
    assert len(services) == 2 and all(given["service"].items() <= thing["spec"].items() for thing in services)


@cases
def test_selectors_select_only_the_operator(values):
    objects = chart.render(values)
    deployment = chart.one(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert labels["modelrelay.io/pool"] == "none", "webhooks must not block the Pods that serve them"
    assert not {"app.kubernetes.io/version", "helm.sh/chart"} & labels.keys(), "an upgrade would restart the operator"
    selected = [thing["spec"]["selector"] for thing in chart.of_kind(objects, "Service")]
    selected += [thing["spec"]["selector"]["matchLabels"] for thing in chart.of_kind(objects, "PodDisruptionBudget")]
    selected += [thing["spec"]["podSelector"]["matchLabels"] for thing in chart.of_kind(objects, "NetworkPolicy")]
    assert all(these == selector for these in selected)
    others = [thing["spec"]["template"]["metadata"]["labels"] for thing in chart.of_kind(objects, "Job")]
    others += [thing["metadata"]["labels"] for thing in chart.of_kind(objects, "Pod")]
    assert not any(selector.items() <= these.items() for these in others)


@pytest.mark.parametrize("release", ["modelrelay", "my-modelrelay", "llm", "a" * 53])
def test_any_release_name_and_namespace_is_valid(release):
    values = {"demo": {"enabled": True}, "metrics": chart.MONITORING, "watchNamespaces": ["elsewhere"]}
    objects = chart.render(values, release=release, namespace="elsewhere")
    for kind, namespace, name in map(chart.identity, objects):
        cluster_wide = kind in (
            "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "MutatingWebhookConfiguration"
        )
        assert namespace == ("" if cluster_wide else "elsewhere"), (kind, name)
        assert len(name) <= (253 if "." in name else 63), (kind, name)
    service = {chart.identity(thing)[2] for thing in chart.of_kind(objects, "Service")}
    assert all(len(name) <= 63 for name in service)


def test_releases_in_separate_namespaces_share_only_the_definitions():
    first = chart.render({"watchNamespaces": ["a"]}, release="modelrelay", namespace="one")
    for release, namespace in [("modelrelay", "two"), ("other", "one")]:
        second = chart.render({"watchNamespaces": ["b"]}, release=release, namespace=namespace)
        shared = set(map(chart.identity, first)) & set(map(chart.identity, second))
        assert {kind for kind, _, _ in shared} <= {"CustomResourceDefinition"}


def test_every_definition_of_the_chart_has_a_link_in_the_repository():
    definitions = sorted((chart.CHART / "files/crds").glob("*.yaml"))
    assert sorted(path.resolve() for path in (chart.ROOT / "crds").iterdir()) == definitions
    names = {thing["metadata"]["name"] for thing in chart.of_kind(chart.render(), "CustomResourceDefinition")}
    assert names == {"providers.modelrelay.io", "workerpools.modelrelay.io"}


def test_defaults_contain_only_the_given_values():
    defaults = yaml.safe_load(chart.one(chart.render(), "ConfigMap", "-defaults")["data"]["defaults.yaml"])
    assert defaults["relay"].keys() == {"image", "imagePullPolicy", "resources", "logLevel", "logFormat", "tokenReviewBinding"}
    assert defaults["worker"].keys() == {"image", "imagePullPolicy", "resources", "logLevel", "logFormat"}
    given = chart.CASES["everything"]
    defaults = yaml.safe_load(chart.one(chart.render(given), "ConfigMap", "-defaults")["data"]["defaults.yaml"])
    assert given["relay"].items() <= defaults["relay"].items()
    assert defaults["worker"]["image"] == "registry.example:5000/llm/modelrelay-worker:1.2.3"
    assert all(part["imagePullSecrets"] == [{"name": "pull-secret"}] for part in defaults.values())


def test_digests_pin_images_without_a_tag():
    digest = "sha256:" + "a" * 64
    image = {"registry": "registry.example", "digests": {"operator": digest, "worker": digest}}
    rendered = chart.render({"image": image})
    defaults = yaml.safe_load(chart.one(rendered, "ConfigMap", "-defaults")["data"]["defaults.yaml"])
    assert re.fullmatch(r"registry\.example/modelrelay-worker:[\d.]+@" + digest, defaults["worker"]["image"])
    assert "@" not in defaults["relay"]["image"]
    assert all(container["image"].endswith(f"@{digest}") for _, spec in chart.pod_specs(rendered) for container in spec["containers"])
    defaults = chart.one(chart.render({"image": {**image, "tag": "dev"}}), "ConfigMap", "-defaults")["data"]["defaults.yaml"]
    assert "@" not in defaults


def operator_source(file):
    return (chart.ROOT / "operator/src" / file).read_text()


def test_operator_supports_every_variable_and_subcommand_of_the_chart():
    variables = set(re.findall(r'env = "(\w+)"', operator_source("settings/cli.rs")))
    subcommands = {name.lower() for name in re.findall(r"^    (\w+)(?:\(| \{)", operator_source("settings/cli.rs"), re.MULTILINE)}
    for values in chart.CASES.values():
        objects = chart.render(values)
        [container] = chart.one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        given = {entry["name"] for entry in container["env"]}
        users_own = {entry["name"] for entry in values.get("operator", {}).get("env", [])}
        assert given - users_own <= variables
        for name, spec in chart.pod_specs(chart.of_kind(objects, "Job", "Pod")):
            assert all(container["args"][0] in subcommands for container in spec["containers"]), name


def test_operator_supports_every_default_of_the_chart():
    text = operator_source("settings/defaults.rs")
    config_map = chart.one(chart.render(chart.CASES["everything"]), "ConfigMap", "-defaults")
    for program, given in yaml.safe_load(config_map["data"]["defaults.yaml"]).items():
        body = text.split(f"pub struct {program.capitalize()}Defaults")[1].split("\n}")[0]
        fields = {re.sub(r"_(\w)", lambda at: at[1].upper(), name) for name in re.findall(r"pub (\w+):", body)}
        assert given.keys() <= fields


@cases
def test_operator_pods_match_relays_network_policies(values):
    named = operator_source("resources/names.rs").split("pub const OPERATOR_LABELS")[1].split(";\n")[0]
    wanted = dict(re.findall(r'\("([^"]+)", "([^"]+)"\)', named))
    assert len(wanted) == 2
    assert wanted.items() <= chart.one(chart.render(values), "Deployment")["spec"]["template"]["metadata"]["labels"].items()


def test_operator_restarts_for_new_defaults_but_not_for_chart_versions():
    def annotations(values):
        return chart.one(chart.render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]

    assert annotations({}) == annotations({"operator": {"replicas": 5}})
    assert annotations({}) != annotations({"relay": {"logLevel": "debug"}})


def test_the_webhook_sees_labelled_pods_of_watched_namespaces():
    objects = chart.render({"watchNamespaces": ["team-a"]})
    [webhook, _] = chart.one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert webhook["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]},
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]},
    ]
    assert webhook["objectSelector"]["matchExpressions"] == [
        {"key": "modelrelay.io/pool", "operator": "Exists"},
        {"key": "modelrelay.io/pool", "operator": "NotIn", "values": ["none"]},
    ]


def test_the_webhook_sees_unlabelled_pods_only_of_namespaces_that_opted_in():
    [labelled, selected] = chart.one(chart.render({"watchNamespaces": ["team-a"]}), "MutatingWebhookConfiguration")["webhooks"]
    assert selected["namespaceSelector"] == {
        "matchLabels": {"modelrelay.io/select-pods": "enabled"},
        "matchExpressions": [
            # The operator's own Pods must start while no operator runs.
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "mr-system"]},
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]},
        ],
    }
    assert selected["objectSelector"]["matchExpressions"] == [
        {"key": "modelrelay.io/pool", "operator": "DoesNotExist"},
        {"key": "modelrelay.io/provider", "operator": "DoesNotExist"},
    ]
    differing = {"name", "objectSelector", "namespaceSelector"}
    assert {key for key in labelled | selected if labelled.get(key) != selected.get(key)} == differing


def test_replicas_on_the_host_network_do_not_overlap():
    spec = chart.one(chart.render(chart.CASES["host-network"]), "Deployment")["spec"]
    assert spec["template"]["spec"]["hostNetwork"] is True
    env = spec["template"]["spec"]["containers"][0]["env"]
    assert {"name": "HOST_NETWORK", "value": "true"} in env
    assert spec["template"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_demo_jobs_use_their_own_role():
    objects = chart.render({"demo": {"enabled": True}})
    jobs = {thing["metadata"]["annotations"]["helm.sh/hook"]: thing for thing in chart.of_kind(objects, "Job")}
    assert jobs.keys() == {"post-install,post-upgrade,post-rollback", "pre-delete"}
    account = chart.one(objects, "ServiceAccount", "-demo")["metadata"]["name"]
    for job in jobs.values():
        spec = job["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] == account
        assert spec["volumes"][0]["configMap"]["name"] == chart.one(objects, "ConfigMap", "-demo")["metadata"]["name"]
    resources = chart.demo_resources(objects)
    assert [(thing["kind"], thing["metadata"]["name"]) for thing in resources] == [
        ("Provider", "demo"),
        ("WorkerPool", "demo"),
    ]
    assert resources[0]["spec"]["secretsPolicy"] == "Delete"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"demo": {"enabled": True}, "watchNamespaces": ["b"]}, "add it to watchNamespaces"),
        ({"webhook": {"existingSecret": "s", "certManager": {"enabled": True}}}, "exclude each other"),
        ({"webhook": {"port": 8080}}, "are both 8080"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}, "set httpRoute.provider"),
        ({"httpRoute": {"enabled": True, "provider": "local"}}, "set httpRoute.parentRefs"),
    ],
)
def test_conflicting_values_are_rejected_with_a_reason(values, reason):
    assert reason in chart.refusal(values)


def test_no_route_exists_by_default():
    assert not chart.of_kind(chart.render(), "HTTPRoute")


def test_route_equals_the_example_without_timeouts():
    values = {"provider": "local", "hostnames": ["llm.example.com"], "parentRefs": [{"name": "public", "namespace": "gateways"}]}
    route = chart.one(chart.render({"httpRoute": {"enabled": True} | values}), "HTTPRoute")
    [example] = chart.load_all((chart.ROOT / "deploy/examples/gateway-httproute.yaml").read_text())
    assert (route["apiVersion"], route["spec"]) == (example["apiVersion"], example["spec"])


def test_route_has_the_given_values():
    route = chart.one(chart.render(chart.CASES["everything"]), "HTTPRoute")
    [rule] = route["spec"]["rules"]
    assert route["metadata"]["namespace"] == "llm" and route["metadata"]["labels"]["team"] == "a"
    assert rule["backendRefs"] == [{"name": "demo", "port": 443}]
    assert rule["timeouts"] == {"request": "1h30m", "backendRequest": "1h"}


def test_parent_chart_may_enable_the_dependency():
    assert chart.render({"enabled": True, "global": {}}) == chart.render()


def test_names_follow_the_overrides():
    def operator(values, release):
        return chart.one(chart.render(values, release=release), "Deployment")["metadata"]["name"]

    assert operator({"nameOverride": "relays"}, "llm") == "llm-relays-operator"
    assert operator({"nameOverride": "relays"}, "relays") == "relays-operator"
    assert operator({"nameOverride": "relays", "fullnameOverride": "mr"}, "llm") == "mr-operator"


def test_common_labels_are_on_every_object_of_the_release():
    values = {"commonLabels": {"team": "llm", "app.kubernetes.io/name": "mine"}, "demo": {"enabled": True}}
    values |= {"metrics": chart.MONITORING, "watchNamespaces": ["mr-system"], "operator": {"podLabels": {"team": "own"}}}
    objects = [thing for thing in chart.render(values) if thing["kind"] != "CustomResourceDefinition"]
    for thing in objects:
        labels = thing["metadata"]["labels"]
        assert (labels["team"], labels["app.kubernetes.io/name"]) == ("llm", "modelrelay"), chart.identity(thing)
    template = chart.one(objects, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "own"
    assert "team" not in chart.one(objects, "Deployment")["spec"]["selector"]["matchLabels"]


def test_operator_takes_contexts_volumes_and_annotations():
    volume, mount = {"name": "ca", "configMap": {"name": "ca"}}, {"name": "ca", "mountPath": "/etc/ssl/own"}
    own = {
        "podSecurityContext": {"runAsUser": 1000}, "securityContext": {"runAsNonRoot": True, "procMount": "Default"},
        "volumes": [volume], "volumeMounts": [mount], "serviceAccount": {"annotations": {"a": "1"}},
    }
    objects = chart.render({"operator": own})
    spec = chart.one(objects, "Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsUser"] == 1000 and spec["securityContext"]["runAsGroup"] == 65532
    assert container["securityContext"]["procMount"] == "Default" and container["securityContext"]["readOnlyRootFilesystem"]
    assert spec["volumes"][-1] == volume and container["volumeMounts"][-1] == mount
    account = chart.one(objects, "ServiceAccount", "-operator")
    assert account["metadata"]["annotations"] == {"a": "1"}
