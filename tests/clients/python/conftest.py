"""Stacks for the Python suites, through `control.py`."""

import glob
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid

import pytest

CONTROL = json.loads(os.environ["CLIENTS_CONTROL"])
MODEL, TEXT = CONTROL["model"], CONTROL["text"]


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(CONTROL["control"] + path, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        pytest.fail(json.load(error)["error"])


class Stack:
    """A relay with workers, and a tag that identifies this test's requests to the backend."""

    def __init__(self, relay=None, workers=None):
        made = call("POST", "/stacks", {"relay": relay or {}, "workers": [{}] if workers is None else workers})
        self.id, self.url = made["id"], made["url"]
        self.tag = uuid.uuid4().hex

    def prompt(self, deed, tag=None):
        return f"tag={tag or self.tag} do={deed}"

    def request(self, deed="echo", tag=None, **more):
        return {"model": MODEL, "messages": [{"role": "user", "content": self.prompt(deed, tag)}]} | more

    def seen(self, state=None, count=1, tag=None):
        """Returns the backend's requests of this test, once there are `count` in `state`."""
        state = f"&state={state}" if state else ""
        requests = call("GET", f"/seen?tag={tag or self.tag}&count={count}{state}")
        assert len(requests) >= count, f"the backend saw {requests}"
        return requests

    def release(self, tag=None):
        call("POST", f"/release?tag={tag or self.tag}")

    def kill_worker(self, number=0):
        call("POST", f"/stacks/{self.id}/workers/{number}/kill")

    def new_key(self):
        return self.admin("POST", "/admin/keys", b'{"name": "suite"}')["secret"]

    def wait_for_queue(self, length):
        deadline = time.monotonic() + 20
        while self.admin("GET", "/admin/stats")["queue_depth"].get("local", 0) < length:
            assert time.monotonic() < deadline, "no request is queued"

    def admin(self, method, path, body=None):
        request = urllib.request.Request(self.url + path, body, method=method)
        request.add_header("authorization", "Bearer stack-admin")
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def occupy(self, create):
        """Occupies a worker's only slot through `create`, an SDK's call; returns a function that frees it."""
        tag = f"occupy-{self.tag}"
        thread = in_background(create, **self.request("hold", tag))
        self.seen("running", tag=tag)

        def leave():
            self.release(tag)
            thread.join()

        return leave


def llama():
    """Returns a worker's settings for a real llama-server."""
    url = call("GET", "/llama")["url"]
    if url is None:
        missing = "no llama-server is in the cache: run scripts/backends/wheel"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return {"BACKEND_URL": url}


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# The tool that the backend calls, in either dialect.
OPENAI_TOOL = {"type": "function", "function": {"name": "weather", "description": "Of today", "parameters": WEATHER}}
ANTHROPIC_TOOL = {"name": "weather", "description": "Of today", "input_schema": WEATHER}


def in_background(function, **arguments):
    thread = threading.Thread(target=function, kwargs=arguments)
    thread.start()
    return thread


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Attempts:
    """Counts the HTTP requests of one SDK client, including its own retries."""

    def __init__(self):
        import httpx2  # a dependency of openai and anthropic; other users of this file may lack it

        self.count = 0
        self.last = None
        self.on_answer = None
        self.client = httpx2.Client(
            trust_env=False, event_hooks={"request": [self.add], "response": [self.answered]}
        )

    def add(self, _request):
        self.count += 1

    def answered(self, response):
        self.last = response
        if self.on_answer:
            self.on_answer(response)


@pytest.fixture
def stack():
    made = []

    def make(**wishes):
        made.append(Stack(**wishes))
        return made[-1]

    yield make
    for one in made:
        call("DELETE", f"/stacks/{one.id}")


@pytest.fixture
def headless(tmp_path):
    """Starts a program in an empty folder, with an empty home and only these environment variables."""
    started = []
    (tmp_path / "work").mkdir()

    def start(*command, **env):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | env
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=env, cwd=tmp_path / "work", text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def installed(pattern):
    """Returns the file of an npm package; of several builds of a program, the one for the oldest processors."""
    return sorted(glob.glob(os.path.join(os.environ["CLIENTS_NODE_MODULES"], "node_modules", pattern)))[-1]


@pytest.fixture
def attempts():
    counted = Attempts()
    yield counted
    counted.client.close()


def pytest_runtest_logreport(report):
    """Prints the failure of a first try, and lists a test that passes on its second one as flaky, for scripts/suites.py."""
    if report.outcome == "rerun":
        print(f"\nfirst try of {report.nodeid}:\n{report.longreprtext}")
    listed = os.environ.get("MODELRELAY_FLAKY")
    if listed and report.when == "call" and report.passed and getattr(report, "rerun", 0):
        with open(listed, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
