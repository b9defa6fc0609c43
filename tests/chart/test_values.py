"""values.yaml and its schema agree."""

import json

import chart
import pytest
import values_table
import yaml

VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text())
SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
# Not a value of this chart: Helm passes it to every part of a parent chart.
GLOBAL = "global"


def objects(schema, path=()):
    """Yields every object of the schema whose keys are named."""
    if "properties" in schema:
        yield path, schema
        for key, value in schema["properties"].items():
            yield from objects(resolved(value), (*path, key))


def resolved(schema):
    return SCHEMA["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema


def at(values, path):
    for key in path:
        values = values[key]
    return values


def nested(path, value):
    for key in reversed(path):
        value = {key: value}
    return value


OBJECTS = [(path, schema) for path, schema in objects(SCHEMA) if path[-1:] != ("resources",)]


@pytest.mark.parametrize("path,schema", OBJECTS, ids=[".".join(path) or "(top)" for path, _ in OBJECTS])
def test_schema_lists_exactly_the_values(path, schema):
    named = set(schema["properties"]) - ({GLOBAL} if not path else set())
    assert named == set(at(VALUES, path))
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", [path for path, _ in OBJECTS], ids=[".".join(path) or "(top)" for path, _ in OBJECTS])
def test_unknown_value_is_rejected_by_name(path):
    assert "nosuchvalue" in chart.refusal(nested((*path, "nosuchvalue"), 1))


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"pullPolicy": "Sometimes"}},
        {"image": {"digests": {"relay": "abc"}}},
        {"image": {"digests": {"relays": "sha256:" + "a" * 64}}},
        {"operator": {"replicas": "two"}},
        {"operator": {"resources": {"request": {"cpu": "1"}}}},
        {"webhook": {"failurePolicy": "fail"}},
        {"webhook": {"port": 443}},
        {"watchNamespaces": "llm"},
        {"watchNamespaces": ["Llm"]},
        {"watchNamespaces": ["llm", "llm"]},
        {"imagePullSecrets": ["name"]},
        {"relay": {"logFormat": "xml"}},
        {"metrics": {"podMonitor": {"interval": "often"}}},
    ],
)
def test_invalid_value_is_rejected(values):
    chart.refusal(values)


def test_global_values_of_a_parent_chart_are_accepted():
    assert chart.render({GLOBAL: {"anything": 1}}) == chart.render()


def leaves(values, path=()):
    for key, value in values.items():
        named = {at for at, _ in OBJECTS}
        if (*path, key) in named:
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def test_every_value_has_a_comment():
    assert [row.name for row in values_table.rows()] == list(leaves(VALUES))


def test_readme_table_is_generated_from_the_values():
    assert values_table.table() in (chart.CHART / "README.md").read_text(), "run scripts/chart generate"
