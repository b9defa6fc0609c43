"""The real /metrics of relay and worker, after some requests: a plain worker, and one with slots."""

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

PATIENCE = 30
CHAT = "/v1/chat/completions"


def scraped(programs):
    """Returns name → type, labels (None without a sample) and help."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name, *arguments, pattern, **environment):
            log = folder / f"{len(list(folder.iterdir()))}.log"
            process = subprocess.Popen(
                [programs / f"modelrelay-{name}", *arguments], cwd=folder, stdout=log.open("w"), stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], "WORKER_SECRET": "a-secret-of-this-test", **environment})
            stack.callback(process.wait)
            stack.callback(process.kill)
            return wait_for(lambda: re.search(pattern, re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())), log)[1]

        relay = start("relay", pattern=r"listening on (http://\S+)", LISTEN_ADDR="127.0.0.1:0", MODELRELAY_ADMIN_TOKEN="t" * 20)
        backends = [start("worker", "demo", "--listen", "127.0.0.1:0", "--delay", "1ms", "--model", model, pattern=r"address=(\S+)")
                    for model in ("plain", "first", "second")]
        slots = folder / "worker.yaml"
        models = ", ".join(f'{{id: {model}, url: "http://{address}"}}' for model, address in zip(("first", "second"), backends[1:]))
        slots.write_text(f"multiplexer: {{slots: [{{id: gpu0, driver: static, models: [{models}]}}]}}\n")
        plain = start("worker", pattern=r"probe server listening on (\S+)", PROXY_URL=relay, BACKEND_URL=f"http://{backends[0]}", PROBE_ADDR="127.0.0.1:0")
        slotted = start("worker", "--config", str(slots), pattern=r"probe server listening on (\S+)", PROXY_URL=relay, PROBE_ADDR="127.0.0.1:0")
        wait_for(lambda: all(f'"{model}"' in fetch(relay + "/v1/models") for model in ("plain", "first", "second")))
        for model in ("plain", "first", "second"):
            fetch(relay + CHAT, {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]})
        found = {}
        for address in (relay, plain, slotted):
            found.update(parsed(fetch(address + "/metrics")))
        return found


def wait_for(condition, log=None):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)  # No event reports a new line in the log of another process.
    raise SystemExit(f"docs: the programs did not start: {log.read_text() if log else ''}")


def fetch(url, body=None):
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
        return answer.read().decode()


def parsed(text):
    found = {}
    for name, help_ in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        kind = re.search(rf"^# TYPE {name} (\w+)$", text, re.M)[1]
        sample = re.search(rf"^{name}(?:_bucket)?(?:\{{(.*)\}})? ", text, re.M)
        labels = sample and [label for label in re.findall(r'(\w+)="', sample[1] or "") if label != "le"]
        found[name] = (kind, labels, help_)
    return found
