"""The operator may do what it needs, and no more."""

import chart
import pytest

cases = pytest.mark.parametrize("values", chart.CASES.values(), ids=chart.CASES.keys())


def rules(objects, name):
    [role] = [
        thing for thing in chart.of_kind(objects, "ClusterRole", "Role") if thing["metadata"]["name"] == name
    ]
    return role["rules"] or []


@cases
def test_no_role_grants_a_wildcard(values):
    for role in chart.of_kind(chart.render(values), "ClusterRole", "Role"):
        for rule in role["rules"]:
            granted = rule["apiGroups"] + rule["resources"] + rule["verbs"]
            assert "*" not in granted, role["metadata"]["name"]
            assert not {"escalate", "impersonate"} & set(rule["verbs"])
            if "bind" in rule["verbs"]:
                # Only for that role; the next test checks what it grants.
                assert rule["resources"] == ["clusterroles"] and rule["verbs"] == ["bind"]
                [name] = rule["resourceNames"]
                assert name.endswith("-token-reviews")


REVIEWS = "modelrelay-operator.mr-system-token-reviews"


def test_one_existing_binding_grants_relays_token_reviews_only():
    objects = chart.render()
    assert rules(objects, REVIEWS) == [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    ]
    [binding] = [thing for thing in chart.of_kind(objects, "ClusterRoleBinding") if thing["metadata"]["name"] == REVIEWS]
    assert binding["roleRef"]["name"] == REVIEWS and "subjects" not in binding
    [rule] = [rule for rule in rules(objects, "modelrelay-operator.mr-system") if "clusterrolebindings" in rule["resources"]]
    assert rule["resourceNames"] == [REVIEWS] and rule["verbs"] == ["get", "patch", "watch"]
    assert REVIEWS in chart.one(objects, "ConfigMap")["data"]["defaults.yaml"]


@pytest.mark.parametrize(
    "values",
    [{"rbac": {"workerTokens": False}}, {"watchNamespaces": ["a"], "webhook": {"enabled": False}}],
    ids=["switched off", "nothing cluster-wide"],
)
def test_token_reviews_are_not_granted_without_worker_tokens(values):
    objects = chart.render(values)
    assert REVIEWS not in [thing["metadata"]["name"] for thing in objects]
    assert "bind" not in [verb for role in chart.of_kind(objects, "ClusterRole", "Role") for rule in role["rules"] for verb in rule["verbs"]]
    assert REVIEWS not in chart.one(objects, "ConfigMap")["data"]["defaults.yaml"]


@cases
def test_every_binding_refers_to_an_existing_role_and_account(values):
    objects = chart.render(values)
    names = set(map(chart.identity, objects))
    for binding in chart.of_kind(objects, "ClusterRoleBinding", "RoleBinding"):
        ref = binding["roleRef"]
        namespace = "" if ref["kind"] == "ClusterRole" else binding["metadata"]["namespace"]
        assert (ref["kind"], namespace, ref["name"]) in names
        for subject in binding.get("subjects", []):
            assert ("ServiceAccount", subject["namespace"], subject["name"]) in names


@pytest.mark.parametrize("webhook", [True, False])
def test_watched_namespaces_limit_cluster_wide_rights_to_the_webhook(webhook):
    rbac = {"aggregate": False, "workerTokens": False}
    values = {"watchNamespaces": ["a", "b"], "webhook": {"enabled": webhook}, "rbac": rbac}
    objects = chart.render(values)
    cluster_roles = chart.of_kind(objects, "ClusterRole")
    if not webhook:
        assert cluster_roles == []
        return
    configuration = chart.one(objects, "MutatingWebhookConfiguration")["metadata"]["name"]
    [role] = cluster_roles
    [rule] = role["rules"]
    assert rule["resourceNames"] == [configuration]
    assert rule["verbs"] == ["get", "patch", "watch"]


def test_namespaced_roles_grant_the_rights_of_the_cluster_role():
    values = {"webhook": {"enabled": False}, "rbac": {"workerTokens": False}}
    everywhere = rules(chart.render(values), "modelrelay-operator.mr-system")
    objects = chart.render({"webhook": {"enabled": False}, "watchNamespaces": ["a", "b"]})
    for namespace in ["a", "b"]:
        [role] = [
            thing for thing in chart.of_kind(objects, "Role") if thing["metadata"]["namespace"] == namespace
        ]
        assert role["rules"] == everywhere


def test_operator_reads_namespaces_and_changes_none():
    for values in [{}, {"watchNamespaces": ["a"]}]:
        roles = chart.of_kind(chart.render(values), "ClusterRole", "Role")
        verbs = [rule["verbs"] for role in roles for rule in role["rules"] if "namespaces" in rule["resources"]]
        assert verbs == [["get"]]


def test_operator_holds_the_rights_that_it_grants_relays():
    granted = {"get", "update", "patch"}
    secrets = [rule for rule in rules(chart.render(), "modelrelay-operator.mr-system") if "secrets" in rule["resources"]]
    assert any(granted <= set(rule["verbs"]) and "resourceNames" not in rule for rule in secrets)


# The rights of a worker with the driver kubernetes, for names that are not known beforehand.
SCALING = [("apps", "deployments/scale", {"get", "patch"}), ("", "pods", {"list", "watch"})]


@pytest.mark.parametrize("namespaces", [[], ["a"]])
def test_operator_holds_the_rights_that_it_grants_scaling_workers(namespaces):
    values = {"webhook": {"enabled": False}, "watchNamespaces": namespaces}
    granted = rules(chart.render(values), "modelrelay-operator.mr-system")
    for group, resource, verbs in SCALING:
        held = [rule for rule in granted if group in rule["apiGroups"] and resource in rule["resources"]]
        assert any(verbs <= set(rule["verbs"]) and "resourceNames" not in rule for rule in held), resource


def test_operator_holds_no_scaling_rights_without_scaling_workers():
    values = {"webhook": {"enabled": False}, "rbac": {"scaleDeployments": False}}
    granted = rules(chart.render(values), "modelrelay-operator.mr-system")
    assert not [rule for rule in granted if {"deployments/scale", "statefulsets/scale"} & set(rule["resources"])]
    assert deletable({"rbac": {"scaleDeployments": False}}) == DELETED


def test_operator_only_scales_workloads_of_others():
    granted = rules(chart.render({"webhook": {"enabled": False}}), "modelrelay-operator.mr-system")
    stateful = [rule for rule in granted if any(one.startswith("statefulsets") for one in rule["resources"])]
    assert [(rule["resources"], rule["verbs"]) for rule in stateful] == [
        (["deployments/scale", "statefulsets/scale"], ["get", "patch"])
    ]


def deletable(values):
    granted = rules(chart.render({"webhook": {"enabled": False}} | values), "modelrelay-operator.mr-system")
    return {resource for rule in granted if "delete" in rule["verbs"] for resource in rule["resources"]}


# Gated Pods, a NetworkPolicy that is not wanted any more, and the rights of a relay that reads no keys or of a worker
# that scales no Deployments.
DELETED = {"pods", "networkpolicies", "roles", "rolebindings"}


def test_operator_may_delete_only_the_kinds_that_it_deletes():
    assert deletable({}) == DELETED
    assert deletable({"rbac": {"ownerReferences": False}}) == DELETED


def test_operator_may_delete_owned_kinds_if_owner_references_require_it():
    owned = {"secrets", "configmaps", "services", "serviceaccounts", "deployments", "daemonsets", "poddisruptionbudgets"}
    assert deletable({"rbac": {"ownerReferences": True}}) == DELETED | owned


def test_operator_only_reads_an_external_certificate():
    for values in [chart.CASES["cert-manager"], chart.CASES["own-certificate"]]:
        own = rules(chart.render(values), "modelrelay-operator")
        [secrets] = [rule for rule in own if "secrets" in rule["resources"]]
        assert secrets["verbs"] == ["get", "watch"]
        assert len(secrets["resourceNames"]) == 1


def test_editors_may_write_both_kinds_and_scale_pools():
    objects = chart.render()
    edit, view = (
        chart.one(objects, "ClusterRole", f"-{role}.mr-system") for role in ["edit", "view"]
    )
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    writes = {(resource, verb) for rule in edit["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {("providers", "create"), ("workerpools", "delete"), ("workerpools/scale", "patch")} <= writes
    reads = {verb for rule in view["rules"] for verb in rule["verbs"]}
    assert reads == {"get", "list", "watch"}
