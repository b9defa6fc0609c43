"""modelrelay.exe, modelrelay-relay.exe and modelrelay-worker.exe under Wine: their differences on Windows, tested as black boxes.

`scripts/windows` builds them, and sets WINEPREFIX and MODELRELAY_BIN_DIR. Every test waits for what it expects.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path
from unittest import mock

import second_try

PROGRAMS = Path(os.environ["MODELRELAY_BIN_DIR"])
RELAY, WORKER = PROGRAMS / "modelrelay-relay.exe", PROGRAMS / "modelrelay-worker.exe"
ALL_IN_ONE = PROGRAMS / "modelrelay.exe"
SECRET = "a-secret-of-some-length"
PATIENCE = 60
# The demo repeats the prompt, with this delay before each word. A response to LONG lasts a quarter of a minute: whatever
# a test does meanwhile happens before its end, and its end is well before that of a drain.
SLOWLY = "200ms"
SHORT = "one two three four five six seven"
LONG = " ".join(f"word{number}" for number in range(50))
DRAIN = "shutdownTimeout: 2m\n"
PATIENT_RELAY = ("--drain-timeout-secs", "120")


def wait_for(what, condition):
    """Returns the result of `condition` as soon as it is neither empty nor false."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {PATIENCE} s")


class Console:
    """A program with a log of its own, in the foreground without a console."""

    def __init__(self, test, *words):
        self.log = tempfile.TemporaryFile("w+b")
        self.process = subprocess.Popen(["wine", *words], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        test.addCleanup(self.kill)

    def output(self):
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


def address(output):
    """Returns the address where a program listens, once its log shows it. `output` returns the log."""
    pattern = re.compile(r"(?:listening on http://|address=)(127\.0\.0\.1:\d+)")
    return wait_for("a port", lambda: pattern.search(output())).group(1)


def run(*words, **variables):
    """Runs it to its end; returns the exit code and all output."""
    environment = {**os.environ, **variables}
    ended = subprocess.run(
        ["wine", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    return ended.returncode, ended.stdout + ended.stderr


def post_chat(relay, model="demo", text=SHORT, stream=False):
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"http://{relay}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=PATIENCE)


def is_served(relay, *models):
    with urllib.request.urlopen(f"http://{relay}/v1/models", timeout=PATIENCE) as listed:
        return {model["id"] for model in json.load(listed)["data"]} >= set(models)


def windows(path):
    return f"Z:{path}"


class Windows(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="with spaces ")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return windows(self.folder / name)

    def log(self, name):
        log = self.folder / name
        return log.read_text(errors="replace") if log.exists() else ""

    def relay_yaml(self):
        self.write("secret", SECRET)
        return self.write("relay.yaml", "providers:\n- name: local\n  workerSecrets: [{file: secret}]\n")

    def relay(self):
        relay = Console(self, RELAY, "--config", self.relay_yaml(), "--listen-addr", "127.0.0.1:0", *PATIENT_RELAY)
        return relay, address(relay.output)

    def demo(self):
        return address(Console(self, WORKER, "demo", "--listen", "127.0.0.1:0", "--delay", SLOWLY).output)

    def worker_yaml(self, relay, rest):
        self.write("secret", SECRET)
        return self.write(
            "worker.yaml",
            f"relay: http://{relay}\nworkerSecretFile: '{windows(self.folder / 'secret')}'\nprobeListen: 127.0.0.1:0\n{rest}",
        )

    def test_ctrl_c_drains_a_stream(self):
        relay, at = self.relay()
        config = self.worker_yaml(at, f"{DRAIN}backend: {{url: 'http://{self.demo()}'}}\n")
        worker = Console(self, WORKER, "--config", config)
        wait_for("a worker", lambda: is_served(at, "demo"))
        with post_chat(at) as answer:
            self.assertIn("seven", json.load(answer)["choices"][0]["message"]["content"])
        with post_chat(at, text=LONG, stream=True) as stream:
            self.assertTrue(stream.readline().startswith(b"data: {"))
            for program in worker, relay:
                program.process.send_signal(signal.SIGINT)
            wait_for("a drain", lambda: "graceful shutdown" in worker.output())
            self.assertTrue(stream.read().rstrip().endswith(b"data: [DONE]"))
        for program in worker, relay:
            self.assertEqual(program.process.wait(PATIENCE), 0, program.output())
        self.assertIn('signal="Ctrl-C"', worker.output())

    def test_up_finishes_running_responses_at_ctrl_c(self):
        up, at = self.up()
        with post_chat(at, text=LONG, stream=True) as stream:
            self.assertTrue(stream.readline().startswith(b"data: {"))
            up.process.send_signal(signal.SIGINT)
            wait_for("a drain", lambda: "graceful shutdown" in up.output())
            self.assertTrue(stream.read().rstrip().endswith(b"data: [DONE]"))
        self.assertEqual(up.process.wait(PATIENCE), 0, up.output())
        self.assertIn("modelrelay: stopped", up.output())
        self.assertFalse(processes(ALL_IN_ONE.name))

    def test_second_ctrl_c_stops_up_at_once(self):
        up, at = self.up()
        with post_chat(at, text=LONG, stream=True) as stream:
            self.assertTrue(stream.readline().startswith(b"data: {"))
            up.process.send_signal(signal.SIGINT)
            wait_for("a drain", lambda: "graceful shutdown" in up.output())
            up.process.send_signal(signal.SIGINT)
            self.assertEqual(up.process.wait(PATIENCE), 1, up.output())
        self.assertFalse(processes(ALL_IN_ONE.name))

    def test_killed_up_leaves_no_process(self):
        up, _ = self.up()
        self.assertGreaterEqual(len(processes(ALL_IN_ONE.name)), 4, "up, relay, worker and demo backend")
        up.kill()
        wait_for("the end of all parts", lambda: not processes(ALL_IN_ONE.name))

    def up(self):
        """Starts `modelrelay up` with a slow demo backend; returns it and the address from the line for PowerShell."""
        with mock.patch.dict(os.environ, DEMO_DELAY=SLOWLY):
            up = Console(self, ALL_IN_ONE, "up", "--backend-ports", "1", "--listen-addr", "127.0.0.1:0")
        wait_for("a greeting", lambda: "Stop with Ctrl-C" in up.output())
        self.assertIn('\'{"model":"demo"', up.output())
        return up, re.search(r"curl\.exe -N http://([^/]+)/", up.output()).group(1)

    def test_models_are_swapped_and_servers_stop_with_their_worker(self):
        relay, at = self.relay()
        mark = f"swapped-{os.getpid()}"
        command = ["demo", "--listen", "127.0.0.1:${PORT}", "--model"]
        program = windows(WORKER)
        models = [
            {"id": f"{mark}-a", "command": [program, *command, f"{mark}-a"]},
            # The processes that a server starts are part of it.
            {"id": f"{mark}-b", "command": ["cmd", "/c", program.replace("/", "\\"), *command, f"{mark}-b"]},
        ]
        slots = json.dumps({"slots": [{"id": "gpu0", "driver": "process", "models": models}]})
        worker = Console(self, WORKER, "--config", self.worker_yaml(at, f"multiplexer: {slots}\n"))
        wait_for("a worker", lambda: is_served(at, f"{mark}-a", f"{mark}-b"))
        for model in "aba":
            with post_chat(at, f"{mark}-{model}") as answer:
                self.assertEqual(json.load(answer)["model"], f"{mark}-{model}")
        self.assertTrue(processes(f"{mark}-a") and not processes(f"{mark}-b"))
        with post_chat(at, f"{mark}-b") as answer:
            self.assertEqual(answer.status, 200)
        self.assertGreaterEqual(len(processes(f"{mark}-b")), 3, "a supervisor, cmd and the server")
        worker.kill()
        wait_for("the servers' end", lambda: not processes(mark))

    def test_service_starts_and_stops_after_its_stream_has_ended(self):
        self.install(RELAY, "ModelRelayServer", self.relay_yaml(), "--", "--listen-addr", "127.0.0.1:0", *PATIENT_RELAY)
        self.start("ModelRelayServer")
        at = address(lambda: self.log("relay.log"))
        self.install(WORKER, "ModelRelayWorker", self.worker_yaml(at, f"{DRAIN}backend: {{url: 'http://{self.demo()}'}}\n"))
        self.start("ModelRelayWorker")
        wait_for("a worker", lambda: is_served(at, "demo"))
        with post_chat(at, text=LONG, stream=True) as stream:
            self.assertTrue(stream.readline().startswith(b"data: {"))
            run("net", "stop", "ModelRelayWorker")
            wait_for("a stop that waits", lambda: "STOP_PENDING" in run("sc", "query", "ModelRelayWorker")[1])
            self.assertTrue(stream.read().rstrip().endswith(b"data: [DONE]"))
        wait_for("the stop", lambda: "STOPPED" in run("sc", "query", "ModelRelayWorker")[1])
        self.assertIn("graceful shutdown complete", self.log("worker.log"))
        # The relay still runs, and this stops it.
        for program, service in (WORKER, "ModelRelayWorker"), (RELAY, "ModelRelayServer"):
            self.assertIn(f"removed the service {service}", run(program, "service", "uninstall")[1])
        self.assertIn("stopped", self.log("relay.log"))
        code, output = run(RELAY, "service", "uninstall")
        self.assertTrue(code == 1 and "ModelRelayServer cannot be removed: it does not exist" in output, (code, output))

    def test_service_with_an_invalid_configuration_is_not_installed(self):
        config = self.write("worker.yaml", "provder: local\n")
        code, output = run(WORKER, "service", "install", "--config", config)
        self.assertTrue(code == 1 and "the service was not installed" in output and "provder" in output, (code, output))
        # A variable that is set during the installation does not help: the service would not have it.
        config = self.write("worker.yaml", "provider: local\n")
        code, output = run(WORKER, "service", "install", "--config", config, WORKER_SECRET=SECRET)
        self.assertTrue(code == 1 and "the service was not installed" in output and "WORKER_SECRET: missing" in output, (code, output))
        self.assertNotEqual(run("net", "start", "ModelRelayWorker")[0], 0)

    def test_windows_shutdown_waits_for_a_drain(self):
        self.install(RELAY, "ModelRelayServer", self.relay_yaml())
        key = r"HKLM\System\CurrentControlSet\Services\ModelRelayServer"
        wait_for("630 s", lambda: f"{630_000:#x}" in run("reg", "query", key, "/v", "PreshutdownTimeout")[1])

    def test_service_run_in_a_console_reports_the_error_there(self):
        log = self.folder / "relay.log"
        code, output = run(RELAY, "service", "run", "--log", windows(log), "--folder", windows(self.folder))
        self.assertTrue(code == 1 and output.count("omit `service run`") == 1, (code, output))
        self.assertFalse(log.exists())

    def test_service_logs_why_it_ended(self):
        self.install(RELAY, "ModelRelayServer", self.relay_yaml(), "--", "--listen-addr", "127.0.0.1:0")
        self.write("relay.yaml", "nonsense: 1\n")
        run("net", "start", "ModelRelayServer")
        wait_for("an error", lambda: "unknown field `nonsense`" in self.log("relay.log"))
        wait_for("the stop", lambda: "STOPPED" in run("sc", "query", "ModelRelayServer")[1])

    def start(self, service):
        # Windows may already have started the services that start with it.
        output = run("net", "start", service)[1]
        self.assertRegex(output, "started successfully|already running")

    def install(self, program, service, config, *flags):
        code, output = run(program, "service", "install", "--config", config, *flags)
        self.assertTrue(code == 0 and f"installed the service {service}" in output, output)
        self.addCleanup(run, program, "service", "uninstall")


def processes(word):
    """Returns the ids of processes whose command line contains the word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            pass  # It has ended meanwhile.
    return found


if __name__ == "__main__":
    second_try.main()
