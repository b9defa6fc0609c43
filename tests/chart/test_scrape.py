"""Scrapes a relay and workers after various events: every series that dashboards and rules query exists.

For slots, the contract tests check a real worker (`multiplexer/metrics.rs`); for the operator, the tests on a cluster
(`monitoring`), which also run all these queries on a real Prometheus.
"""

import http.client
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack

import yaml
from test_machines import PROGRAMS, help_of
from test_monitoring import DASHBOARDS, RULES, metrics, queries

ADMIN, SECRET = "0123456789abcdef-admin", "0123456789abcdef-worker"
PATIENCE = 20  # seconds
LEAVING = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "word " * 80}]}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "one two three"}]}


class Site:
    """A relay with a certificate, and the processes started next to it; all of them end with the test."""

    def __init__(self, folder, stack):
        self.folder, self.stack, self.number = folder, stack, 0
        command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=relay"
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
        subprocess.run(["openssl", *command.split(), *names], check=True, capture_output=True)
        self.port, self.tls = free_port(), ssl._create_unverified_context()
        self.run("relay", LISTEN_ADDR=f"127.0.0.1:{self.port}", MODELRELAY_ADMIN_TOKEN=ADMIN, HEARTBEAT_INTERVAL="1",
                 TLS_CERT_FILE=str(folder / "cert.pem"), TLS_KEY_FILE=str(folder / "key.pem"))

    def run(self, program, *args, **env):
        self.number += 1
        with open(self.folder / f"{self.number}.log", "wb") as log:
            own = {"WORKER_SECRET": SECRET} | env
            process = subprocess.Popen([PROGRAMS / f"modelrelay-{program}", *args], env=own, cwd=self.folder, stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def worker(self, backend, relay=None):
        """Starts a worker; returns it and a function that scrapes it."""
        probe = free_port()
        process = self.run("worker", PROXY_URL=f"https://127.0.0.1:{relay or self.port}", RELAY_CA_FILE=str(self.folder / "cert.pem"),
                           BACKEND_URL=f"http://127.0.0.1:{backend}", MAX_CONCURRENCY="4", PROBE_ADDR=f"127.0.0.1:{probe}")
        return process, lambda: fetch(http.client.HTTPConnection("127.0.0.1", probe, timeout=5), "GET", "/metrics")[1]

    def chat(self, body, **headers):
        headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return fetch(self.connection(), "POST", "/v1/chat/completions", json.dumps(body), headers)

    def get(self, path, **headers):
        return fetch(self.connection(), "GET", path, headers=headers)

    def connection(self):
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self.tls)

    def wait_for(self, pattern, scrape=None):
        scrape = scrape or (lambda: self.get("/metrics")[1])
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, page := scrape(), re.MULTILINE):
            assert time.monotonic() < deadline, f"no {pattern} in\n{page}"


def fetch(connection, *request, **more):
    """Returns status and text; nothing while no server responds."""
    try:
        connection.request(*request, **more)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return None, ""
    finally:
        connection.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def use_everything(site):
    """Causes every event that changes a metric once; returns all pages."""
    backend = free_port()
    demo = site.run("worker", "demo", "--listen", f"127.0.0.1:{backend}")
    _, of_lost = site.worker(backend, relay=free_port())  # finds no relay
    site.wait_for(r"^modelrelay_worker_reconnects_total", of_lost)
    first, _ = site.worker(backend)
    site.wait_for(r"^modelrelay_model_workers\{.*\} 1$")

    assert site.chat(CHAT, x_stainless_retry_count="1", user_agent="OpenAI/Python 3.0.0")[0] == 200
    assert site.chat(CHAT | {"stream": True, "stream_options": {"include_usage": True}})[0] == 200
    assert site.get("/admin/state", authorization="Bearer wrong")[0] == 403

    # A client that disconnects.
    leaving = site.connection()
    leaving.request("POST", "/v1/chat/completions", json.dumps(LEAVING), {"content-type": "application/json"})
    leaving.getresponse().read(1)
    leaving.close()
    site.wait_for(r"^modelrelay_cancellations_total\{.*in_flight.*\} 1$")

    # A worker that is lost before its first byte: the request returns to the queue, and goes to another worker.
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(site.chat(LEAVING | {"stream": False})))
    waiting.start()
    site.wait_for(r'^modelrelay_worker_slots\{.*state="used"\} 1$')
    first.kill()
    _, of_second = site.worker(backend)
    waiting.join()
    assert answers[0][0] == 200, answers
    site.wait_for(r"^modelrelay_worker_heartbeat_rtt_seconds_count\{.*\} [1-9]")

    # A backend that is lost with a request: the request returns to the queue, and no worker serves it.
    pages = site.get("/metrics")[1]
    stranded = site.connection()
    stranded.request("POST", "/v1/chat/completions", json.dumps(LEAVING | {"stream": False}), {"content-type": "application/json"})
    site.wait_for(r'^modelrelay_worker_slots\{.*state="used"\} 1$')
    demo.kill()
    site.wait_for(r"^modelrelay_worker_backend_errors_total", of_second)
    stranded.close()
    return pages + of_second() + of_lost()


def queried():
    """Returns the names that dashboards and rules query of relays and of workers without slots."""
    boards = {path.stem: {name for query in queries(path) for name in metrics(query)} for path in DASHBOARDS}
    groups = {group["name"].removeprefix("modelrelay-"): {name for rule in group["rules"] for name in metrics(rule["expr"])}
              for group in yaml.safe_load(RULES.read_text())["groups"]}
    return boards["relay"] | boards["workers"] | groups["relay"] | groups["worker"]


def test_scrapes_contain_every_series_of_dashboards_and_rules(tmp_path):
    help_of("relay")
    with ExitStack() as stack:
        page = use_everything(Site(tmp_path, stack))
    series = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"^([a-z_]+)[{ ]", page, re.MULTILINE)}
    assert len(queried()) > 40
    assert queried() <= series, sorted(queried() - series)
