"""Deployments on machines without Kubernetes: files for Compose and launchd, and the relay's page that generates such files."""

import functools
import json
import os
import plistlib
import re
import subprocess
from pathlib import Path

import chart
import jsonschema
import pytest
import yaml

PROGRAMS = Path(os.environ.get("MODELRELAY_BIN_DIR") or chart.ROOT / "target/debug")
COMPOSE = chart.ROOT / "deploy/compose/compose.yaml"
LAUNCHD = chart.ROOT / "deploy/launchd"
PAGE = (chart.ROOT / "relay/web/commands.js").read_text()
# The time for which either program lets requests finish after SIGTERM, with a margin for the rest of the shutdown.
LEAST_PATIENCE = 30 + 10


@functools.cache
def help_of(program):
    path = PROGRAMS / f"modelrelay-{program}"
    if not path.exists():
        missing = f"{path} is missing: run `scripts/test chart`, or `cargo build --workspace --bins` before"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    return " ".join(shown.split())  # joins lines, which wrap at any width


def known_to(program, names):
    """Returns the names that are variables of the program; values of secrets are not shown."""
    return {name for name in names if re.search(rf"\[env: {name}[=\]]", help_of(program))}


def compose():
    # As Compose substitutes unset variables.
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text()))


def seconds(duration):
    return int(re.fullmatch(r"(\d+)s", duration)[1])


def plist(program):
    return plistlib.loads((LAUNCHD / f"io.modelrelay.{program}.plist").read_bytes())


def checked(env, folder, secrets):
    """Checks whether a relay would start with these settings; its files are read from a folder of ours."""
    (folder / "relay.yaml").write_text(secrets)
    own = {name: str(folder / Path(value).name) if value.startswith("/") else value for name, value in env.items()}
    for file in ["worker-secret", "admin-token"]:
        (folder / file).write_text("0123456789abcdef0123456789abcdef")
    program = PROGRAMS / "modelrelay-relay"
    return subprocess.run([program, "check"], env=own, cwd=folder, capture_output=True, text=True)


def in_folder(text, folder):
    return re.sub(r"file: [\w/-]*/([\w-]+)", rf"file: {folder}/\1", text)


def test_compose_accepts_the_file_and_rejects_an_invalid_one():
    schema = json.loads(Path(os.environ["COMPOSE_SCHEMA"]).read_text())
    schema = jsonschema.validators.validator_for(schema)(schema)
    assert not [error.message for error in schema.iter_errors(compose())]
    wrong = compose()
    wrong["services"]["relay"]["stop_grace"] = "45s"
    assert list(schema.iter_errors(wrong))


def test_compose_references_are_defined():
    file = compose()
    for service in file["services"].values():
        assert set(service.get("secrets", [])) <= set(file["secrets"])
        assert {config["source"] for config in service.get("configs", [])} <= set(file["configs"])
        # Compose cannot write content from its own file into a container with a read-only root.
        written = [config["source"] for config in service.get("configs", []) if "content" in file["configs"][config["source"]]]
        assert not (service.get("read_only") and written)
        named = {volume.split(":")[0] for volume in service.get("volumes", [])}
        assert {name for name in named if not name.startswith(".")} <= set(file["volumes"])
        for name in service["environment"] if "environment" in service else []:
            if name.endswith("_FILE") and service["environment"][name].startswith("/run/secrets/"):
                assert service["environment"][name].removeprefix("/run/secrets/") in service["secrets"]


@pytest.mark.parametrize("program", ["relay", "worker"])
def test_compose_stop_drains_and_its_variables_exist(program):
    service = compose()["services"][program]
    assert service["image"] == f"modelrelay-{program}"
    assert seconds(service["stop_grace_period"]) >= LEAST_PATIENCE
    assert known_to(program, service["environment"]) == set(service["environment"])
    # Either would stop the worker before the relay has emptied its queue.
    assert "depends_on" not in service


def test_relay_accepts_the_settings_of_compose(tmp_path):
    help_of("relay")
    file = compose()
    settings = in_folder((COMPOSE.parent / file["configs"]["relay"]["file"]).read_text(), tmp_path)
    done = checked(file["services"]["relay"]["environment"], tmp_path, settings)
    assert done.returncode == 0, done.stderr
    assert checked(file["services"]["relay"]["environment"], tmp_path, "providers: [{nome: x}]").returncode != 0


def test_compose_healthcheck_fails_while_the_relay_is_down(tmp_path):
    help_of("relay")
    [kind, program, command, option, file] = compose()["services"]["relay"]["healthcheck"]["test"]
    assert (kind, program, command) == ("CMD", "/modelrelay-relay", "status")
    assert file == compose()["services"]["relay"]["environment"]["MODELRELAY_ADMIN_TOKEN_FILE"]
    (tmp_path / "token").write_text("any")
    words = [PROGRAMS / "modelrelay-relay", command, option, tmp_path / "token", "--url"]
    down = subprocess.run([*words, "http://127.0.0.1:1"], capture_output=True, text=True)
    assert down.returncode != 0 and "cannot reach the relay" in down.stderr
    env = {"LISTEN_ADDR": "127.0.0.1:0", "WORKER_SECRET": "0123456789abcdef", "MODELRELAY_ADMIN_TOKEN": "any"}
    relay = subprocess.Popen([PROGRAMS / "modelrelay-relay"], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = next(found[1] for line in relay.stdout if (found := re.search(r"(127\.0\.0\.1:[1-9]\d*)", line)))
        up = subprocess.run([*words, f"http://{address}"], capture_output=True, text=True)
        assert up.returncode == 0, up.stderr
    finally:
        relay.kill()
        relay.communicate()


@pytest.mark.parametrize("program", ["relay", "worker"])
def test_launchd_stop_drains_and_its_variables_exist(program):
    service = plist(program)
    assert service["Label"] == f"io.modelrelay.{program}"
    assert service["ProgramArguments"] == [f"/usr/local/bin/modelrelay-{program}"]
    assert service["ExitTimeOut"] >= LEAST_PATIENCE  # without it launchd kills after 20 s
    assert service["RunAtLoad"] is True and service["KeepAlive"] == {"SuccessfulExit": False}
    assert service["UserName"] != "root"
    assert all(isinstance(value, str) for value in service["EnvironmentVariables"].values())
    assert known_to(program, service["EnvironmentVariables"]) == set(service["EnvironmentVariables"])


def test_relay_accepts_the_settings_of_launchd(tmp_path):
    help_of("relay")
    settings = in_folder((LAUNCHD / "relay.yaml").read_text(), tmp_path)
    done = checked(plist("relay")["EnvironmentVariables"], tmp_path, settings)
    assert done.returncode == 0, done.stderr


def template(begin, end):
    """Returns a template of the page, without the lines that are filled in."""
    text = PAGE[PAGE.index(begin):]
    text = text[:text.index(end) + len(end)]
    return "\n".join(line for line in text.splitlines() if "${" not in line)


def test_launchd_service_of_the_page_differs_only_in_its_user():
    page = plistlib.loads(template("<?xml", "</plist>").encode())
    file = plist("worker")
    for key in ["Label", "ProgramArguments", "RunAtLoad", "ExitTimeOut"]:
        assert page[key] == file[key], key
    # It starts at login, as that user; both are stopped by hand with `launchctl bootout`.
    assert page["KeepAlive"] is True and "UserName" not in page
    assert set(page["EnvironmentVariables"]) == {"WORKER_SECRET_FILE"} <= set(file["EnvironmentVariables"])


def test_compose_service_of_the_page_equals_the_file():
    page = yaml.safe_load(template("services:\n  modelrelay-worker", "environment:"))["services"]["modelrelay-worker"]
    file = compose()["services"]["worker"]
    for key in ["image", "restart", "stop_grace_period"]:
        assert page[key] == file[key], key


def test_systemd_unit_of_the_page_outlasts_a_drain():
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", PAGE, re.MULTILINE)[1]) >= LEAST_PATIENCE


def test_variables_of_the_page_exist_in_the_worker():
    listed = PAGE[PAGE.index("function variables("):PAGE.index("const withoutSecret")]
    names = set(re.findall(r"'([A-Z_]+)'", listed))
    assert len(names) > 5 and known_to("worker", names) == names
