"""Alerts and dashboards: the metrics that they query exist, and their texts can be followed."""

import json
import re
import shutil
import subprocess

import chart
import pytest
import yaml

RULES = chart.CHART / "files/rules/modelrelay.yaml"
TESTS = chart.ROOT / "tests/chart/rules.test.yaml"
DASHBOARDS = sorted((chart.CHART / "files/dashboards").glob("*.json"))
PREFIXES = {
    # The relay's names are written without their prefix, so a worker's could match one of them: longest first.
    "modelrelay_operator_": ["operator/src"],
    "modelrelay_worker_": ["worker-sidecar/src/metrics.rs", "worker-sidecar/multiplexer/src/metrics.rs", "relay/src/telemetry/metrics"],
    "modelrelay_": ["relay/src/telemetry/metrics"],
    "process_": ["relay/src/telemetry/metrics"],
}


def promtool(*args, **more):
    return subprocess.run([chart.PROMTOOL, *args], capture_output=True, text=True, **more)


def rules(kind):
    """Returns the rules of a kind, `alert` or `record`."""
    every = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return [rule for rule in every if kind in rule]


def alerts():
    return rules("alert")


def panels(dashboard):
    return json.loads(dashboard.read_text())["panels"]


def queries(dashboard):
    """Returns the PromQL of a dashboard, with Grafana's own variables filled in."""
    board = json.loads(dashboard.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    for variable in board["templating"]["list"]:
        if labels := re.fullmatch(r"label_values\((.+), \w+\)", variable.get("definition", "")):
            found.append(labels[1])
    return [query.replace("$__rate_interval", "1m") for query in found]


def metrics(query):
    """Returns the names of series, without the suffixes of histograms, and without the series that rules record."""
    without_strings = re.sub(r'"[^"]*"', '""', query)
    names = re.findall(r"(?<![\w:])(?:modelrelay|process)_[a-z_]+", without_strings)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def sources(paths):
    for path in map(chart.ROOT.joinpath, paths):
        for file in [path] if path.is_file() else path.rglob("*.rs"):
            yield file.read_text()


def is_defined(name):
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    written = [f'"{name}"', f'"{name.removeprefix(prefix)}"', f'"{name.removeprefix("modelrelay_")}"']
    return any(literal in source for source in sources(PREFIXES[prefix]) for literal in written)


def test_rules_and_their_unit_tests_pass_promtool(tmp_path):
    shutil.copy(RULES, tmp_path)
    shutil.copy(TESTS, tmp_path)
    for command in [["check", "rules", RULES.name], ["test", "rules", TESTS.name]]:
        done = promtool(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_in_which_it_fires():
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test.get("alert_rule_test", [])]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in alerts()}


def test_every_alert_links_to_an_existing_heading():
    headings = re.findall(r"^## (\w+)$", (chart.CHART / "RUNBOOKS.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook_url"].endswith(f"#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_rule_resource_equals_the_file_except_its_links():
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookUrl": "https://wiki.example/llm/"}}}
    spec = chart.one(chart.render(values), "PrometheusRule")["spec"]
    text = RULES.read_text().replace("https://modelrelay.io/runbooks", "https://wiki.example/llm")
    assert spec == yaml.safe_load(text)


@pytest.mark.parametrize("name", sorted({name for rule in alerts() + rules("record") for name in metrics(rule["expr"])}))
def test_a_metric_of_the_rules_exists(name):
    assert is_defined(name)


def test_every_recorded_series_has_a_unit_test_with_a_value():
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test.get("promql_expr_test", [])]
    tested = {case["expr"] for case in cases if case["exp_samples"]}
    assert {rule["record"] for rule in rules("record")} <= tested


def test_recorded_series_are_named_by_labels_and_defined_before_use():
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        known = set()
        for rule in group["rules"]:
            queried = set(re.findall(r"\w+:\w+:\w+", rule["expr"]))
            assert queried <= known, f"{rule.get('alert') or rule['record']} queries a series that its group records later or not at all"
            if "record" in rule:
                labels = rule["record"].split(":")[0].split("_")
                assert re.search(rf"by \({', '.join(labels)}\)", rule["expr"]), rule["record"]
                known.add(rule["record"])


def test_histograms_of_per_model_quantiles_are_recorded():
    recorded = {name for rule in rules("record") for name in metrics(rule["expr"])}
    [board] = [dashboard for dashboard in DASHBOARDS if dashboard.stem == "relay"]
    queried = {name for query in queries(board) if "histogram_quantile" in query and "$model" in query for name in metrics(query)}
    assert len(queried) > 3 and queried <= recorded, queried - recorded


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_metric_of_a_dashboard_exists(dashboard):
    missing = {name for query in queries(dashboard) for name in metrics(query) if not is_defined(name)}
    assert not missing


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_prometheus_parses_every_dashboard_query(dashboard, tmp_path):
    queried = [re.sub(r"\$\w+", ".*", query) for query in queries(dashboard)]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queried)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_unique_ids_and_do_not_overlap(dashboard):
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in panels(dashboard):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_dashboards_query_the_selected_data_source():
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel.get("targets", []):
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS) == 5


def test_dashboard_config_map_contains_the_files():
    config_map = chart.one(chart.render({"metrics": chart.MONITORING}), "ConfigMap", "-dashboards")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert {name: json.loads(text) for name, text in config_map["data"].items()} == {
        f"modelrelay-{path.name}": json.loads(path.read_text()) for path in DASHBOARDS
    }


def test_files_for_use_without_helm_equal_those_of_the_chart():
    # A link that was checked in as a file would contain a path and no dashboard.
    for path in DASHBOARDS:
        assert json.loads((chart.ROOT / "deploy/grafana" / path.name).read_text()) == json.loads(path.read_text())
    assert (chart.ROOT / "deploy/prometheus/modelrelay.rules.yaml").read_text() == RULES.read_text()


def test_monitors_name_the_jobs_that_alerts_query():
    queried = set(re.findall(r'job="([^"]+)"', RULES.read_text()))
    objects = chart.render({"metrics": chart.MONITORING})
    named = set()
    for monitor in chart.of_kind(objects, "PodMonitor", "ServiceMonitor"):
        for endpoint in monitor["spec"].get("podMetricsEndpoints", []) + monitor["spec"].get("endpoints", []):
            named |= {rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"}
    scraped = {job["job_name"] for job in scrape_config()["scrape_configs"]}
    assert named == queried == scraped


def test_relays_are_scraped_with_the_scheme_of_their_pods():
    objects = chart.render({"metrics": chart.MONITORING})
    [relays] = [m for m in chart.of_kind(objects, "PodMonitor") if m["metadata"]["name"].endswith("-relays")]
    [endpoint] = relays["spec"]["podMetricsEndpoints"]
    [job] = [job for job in scrape_config()["scrape_configs"] if job["job_name"] == "modelrelay-relay"]
    [rule] = [rule for rule in endpoint["relabelings"] if rule["targetLabel"] == "__scheme__"]
    [same] = [rule for rule in job["relabel_configs"] if rule.get("target_label") == "__scheme__"]
    # The annotation that the operator sets on relays with a certificate, as Prometheus names it.
    manifest = chart.ROOT / "operator/src/manifests/snapshots/provider-tls.yaml"
    assert "prometheus.io/scheme: https" in manifest.read_text()
    wanted = (["__meta_kubernetes_pod_annotation_prometheus_io_scheme"], "(https)")
    assert (rule["sourceLabels"], rule["regex"]) == wanted == (same["source_labels"], same["regex"])
    # Without the annotation, nothing matches and the scheme stays.
    assert re.fullmatch(rule["regex"], "") is None
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True} and job["tls_config"] == {"insecure_skip_verify": True}


def test_the_monitor_of_the_operator_selects_one_service():
    objects = chart.render({"metrics": chart.MONITORING})
    selector = chart.one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [
        thing for thing in chart.of_kind(objects, "Service") if selector.items() <= thing["metadata"]["labels"].items()
    ]
    assert [thing["metadata"]["name"] for thing in services] == ["modelrelay-operator-metrics"]


def scrape_config():
    return yaml.safe_load((chart.ROOT / "deploy/prometheus/scrape.yaml").read_text())


def test_prometheus_accepts_the_scrape_configuration(tmp_path):
    # Debian's Prometheus is built without Kubernetes' service discovery; it can read everything else.
    config = scrape_config()
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(RULES, tmp_path / config["rule_files"][0])
    done = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
