#!/usr/bin/env python3
"""Runs suites in parallel: each starts when the suites it needs have passed and enough processors are free.

    scripts/test unit contract       these suites, and those that they need
    scripts/test --list              all of them

The body of a suite is the function `suite_NAME` of scripts/suites.bash. A body that cannot run on this machine exits with 77
and prints one line with the reason: it is skipped, or fails when CI=true. Each suite writes target/suites/NAME.log, printed when
it ends. At MODELRELAY_TEST_DEADLINE, in seconds since 1970, suites that still run are interrupted.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import libraries

CANNOT_RUN = 77
ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
LOGS = TARGET / "suites"
# The reports of nextest, one for each of its profiles.
JUNIT = "nextest/*/junit.xml"
# The flaky tests of all suites, and those found by the other runner of a suite, not nextest.
FLAKY = LOGS / "flaky.txt"
FOUND_FLAKY = "*.flaky"
# Longer than removing a cluster needs.
GRACE_SECONDS = 60
PROGRESS_SECONDS = 60
# The amount that all suites write, into target and into an empty cache.
DISK_GB = 25
# Lines of the failed suites' logs, of all together, that are printed again at the end of a run: a viewer of CI may show
# only the end.
END_OF_LOG_LINES = 100


@dataclass(frozen=True)
class Suite:
    """One row of the table below."""

    name: str
    about: str
    # The processors that it uses on average: the sum over running suites stays close to the number that the machine
    # has.
    cores: float = 1.0
    needs: tuple = ()
    # Needs only processors, and may finish late: uses the remaining ones, one such suite at a time.
    is_background: bool = False
    # A build or an installation: the suites that need it cannot run without it.
    is_preparation: bool = False


def background(name, about, needs=(), is_preparation=False):
    return Suite(name, about, 0.0, needs, is_background=True, is_preparation=is_preparation)


# In the order in which they start when several could.
SUITES = [
    Suite("build", "the programs and most tests, linted while they compile", 2.0, is_preparation=True),
    Suite("fmt", "formatting", 0.3),
    Suite("tools", "what clients, browser, contract and engine install", 0.4, is_preparation=True),
    Suite("lint", "what clippy found while `build` compiled; layers of imports; plain words", 0.1, ("build",)),
    background("chart-programs", "Helm and what else the chart is checked with", is_preparation=True),
    background("cluster-programs", "the programs of a Kubernetes cluster", is_preparation=True),
    background("vllm-programs", "vLLM for a machine without a GPU", is_preparation=True),
    background("engine-programs", "llama-server and Ollama", is_preparation=True),
    background("simulation", "a simulated network, under faults that a seed decides"),
    Suite("build-more", "the tests of cluster and chaos, linted while they compile", 1.6, ("build",), is_preparation=True),
    # Early, because the cluster suite waits for it, which runs for long and leaves room for others.
    Suite("images", "static programs with LTO, and their images", 1.6, is_preparation=True),
    Suite("cluster", "a real Kubernetes cluster", 0.8, ("build-more", "images", "cluster-programs")),
    Suite("contract", "relay and worker as black boxes", 1.2, ("build",)),
    Suite("clients", "real SDKs", 0.6, ("build", "tools")),
    Suite("unit", "unit, integration and documentation tests", 1.8, ("build",)),
    Suite("histories", "random histories of the pure cores, every history of small worlds, large fleets", 1.8, ("build",)),
    Suite("browser", "the relay's pages in Chromium", 0.8, ("build", "tools")),
    Suite("engine", "llama.cpp's server from a wheel, through relay and worker", 0.8, ("build",)),
    Suite("docs", "links, the book, every command of the documentation", 0.8, ("build", "clients")),
    Suite("chart", "the Helm chart, alerts, dashboards, deploy/", 1.0, ("build", "chart-programs")),
    Suite("backends", "the multiplexer over real inference servers", 1.2, ("build", "engine-programs", "vllm-programs")),
    Suite("chaos", "the programs under faults and too much load", 1.6, ("build-more",)),
    Suite("speed", "instructions of a request and of a token, of the programs with LTO", 1.0, ("build", "images")),
    # After `simulation`, because both build it.
    Suite("spec", "the specification of the grants protocol, checked and compared with the simulation", 1.0, ("simulation",)),
    Suite("windows", "the programs for Windows, under Wine", 1.6),
    Suite("fuzz", "ten seconds of each fuzz target", 1.8),
    Suite("wheel", "the Python wheel, installed and run to the first response", 1.0, ("build",)),
    Suite("rustdoc", "links of the code's documentation", 1.6),
    Suite("msrv", "the oldest compiler that Cargo.toml promises", 1.6),
    Suite("publish", "images and chart, pushed into a registry", 0.6, ("chart-programs",)),
    Suite("deny", "licences and sources of libraries", 0.3),
    Suite("workflows", "GitHub's workflows", 0.5),
    Suite("soak", "only the soak of `chaos`", 2.0, ("build-more",)),
    Suite("saturated", "two minutes of a saturated model beside another", 2.0, ("build", "engine-programs")),
    Suite("placement", "prompts found in the caches of real engines, with both placements", 2.0, ("build", "engine-programs", "vllm-programs")),
    Suite("autobahn", "Autobahn's WebSocket tests against the relay's socket", 1.0),
]
BY_NAME = {suite.name: suite for suite in SUITES}


@dataclass
class Run:
    """One suite of this run and its state."""

    suite: Suite
    result: str = "waiting"
    process: subprocess.Popen = None
    began: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def is_over(self):
        return self.result not in ("waiting", "running")


@dataclass
class Runner:
    """The suites to run, and their progress."""

    runs: list
    cores: float = float(os.cpu_count() or 1)
    deadline: float = float(os.environ.get("MODELRELAY_TEST_DEADLINE") or "inf")
    interrupted: str = ""
    began: float = field(default_factory=time.time)
    next_progress: float = field(default_factory=lambda: time.time() + PROGRESS_SECONDS)

    def run(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        while not self.interrupted and not all(run.is_over for run in self.runs):
            self._skip_what_cannot_start()
            while (suite := self._next()) is not None:
                self._start(suite)
            self._collect()
            if time.time() > self.deadline:
                self.interrupted = "the time limit"
        if self.interrupted:
            self._interrupt()

    def _on_signal(self, number, _frame):
        self.interrupted = signal.Signals(number).name

    def _running(self):
        return [run for run in self.runs if run.result == "running"]

    def _result_of(self, name):
        return next((run.result for run in self.runs if run.suite.name == name), "passed")

    def _skip_what_cannot_start(self):
        for run in self.runs:
            lacking = [self._result_of(need) for need in run.suite.needs if BY_NAME[need].is_preparation]
            if run.result == "waiting" and any(result in ("FAILED", "skipped", "not run") for result in lacking):
                run.result = "skipped" if "FAILED" not in lacking and "not run" not in lacking else "not run"

    def _next(self):
        """Returns the next suite to start, or None for now. One may always run, however many processors it needs."""
        foreground = [run.suite.cores for run in self._running() if not run.suite.is_background]
        has_background = len(self._running()) > len(foreground)
        for run in self.runs:
            if run.result == "waiting" and all(self._is_over(need) for need in run.suite.needs):
                fits = not foreground or sum(foreground) + run.suite.cores <= self.cores + 0.6
                if not has_background if run.suite.is_background else fits:
                    return run
        return None

    def _is_over(self, need):
        return self._result_of(need) not in ("waiting", "running")

    def _start(self, run):
        run.result, run.began = "running", time.time()
        # A session of its own, so that all its processes can be stopped; Linux shares processors among sessions first.
        yields = "{ echo 19 > /proc/self/autogroup; } 2> /dev/null; renice -n 19 $$ > /dev/null;" if run.suite.is_background else ""
        command = ["bash", "-c", yields + ' . scripts/suites.bash && "suite_$1"', "suite", run.suite.name]
        live = len(self.runs) == 1
        log = None if live else open(log_of(run.suite.name), "wb")
        run.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT if log else None, start_new_session=True,
            env=os.environ | {"MODELRELAY_FLAKY": str(LOGS / f"{run.suite.name}.flaky")})
        if log:
            log.close()
        else:
            log_of(run.suite.name).unlink(missing_ok=True)
        say(f"==> {run.suite.name} starts: {run.suite.about}")

    def _collect(self):
        """Waits for a suite to end, but at most a fraction of a second."""
        for run in self._running():
            pid, status, usage = os.wait4(run.process.pid, os.WNOHANG)
            if pid:
                self._finish(run, os.waitstatus_to_exitcode(status), usage)
                return
        if time.time() >= self.next_progress:
            self.next_progress = time.time() + PROGRESS_SECONDS
            say("    running: " + ", ".join(f"{run.suite.name} {time.time() - run.began:.0f} s" for run in self._running()))
        time.sleep(0.2)

    def _finish(self, run, code, usage):
        run.process.returncode = code
        run.seconds, run.cpu = time.time() - run.began, usage.ru_utime + usage.ru_stime
        if code == 0:
            run.result = "passed"
        elif code == CANNOT_RUN and os.environ.get("CI") != "true":
            run.result = "skipped"
        else:
            run.result = "FAILED"
        log = log_of(run.suite.name)
        if log.exists():
            say(f"\n==> {run.suite.name}")
            sys.stdout.buffer.write(log.read_bytes())
        say(f"<== {run.suite.name}: {run.result} after {run.seconds:.0f} s")

    def _interrupt(self):
        running = self._running()
        for run in running:
            say(f"{run.suite.name} was interrupted by {self.interrupted}")
            signal_group(run.process.pid, signal.SIGTERM)
        end = time.time() + GRACE_SECONDS
        for run in running:
            while time.time() < end and not os.wait4(run.process.pid, os.WNOHANG)[0]:
                time.sleep(0.1)
            signal_group(run.process.pid, signal.SIGKILL)
            run.result, run.seconds = "interrupted", time.time() - run.began
            log = log_of(run.suite.name)
            if log.exists():
                say(f"\n==> {run.suite.name}, the end of its log when it was interrupted")
                sys.stdout.buffer.write(b"\n".join(log.read_bytes().splitlines()[-40:]) + b"\n")
        for run in self.runs:
            if run.result == "waiting":
                run.result = "not run"


def signal_group(group, number):
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def log_of(name):
    return LOGS / f"{name}.log"


def say(text):
    sys.stdout.flush()
    print(text, flush=True)


def with_needs(names):
    """Returns these suites and all that they need, in the table's order. A need that is itself a suite only sets the order."""
    wanted, queue = set(), list(names)
    while queue:
        name = queue.pop()
        if name not in BY_NAME:
            sys.exit(f"unknown suite {name}; available: {' '.join(BY_NAME)}")
        if name not in wanted:
            wanted.add(name)
            queue += [need for need in BY_NAME[name].needs if BY_NAME[need].is_preparation]
    return [suite for suite in SUITES if suite.name in wanted]


def flaky_tests():
    """Returns the tests that failed and passed on a second try: from nextest's reports, and from the lists of other runners."""
    found = [f"{listed.stem}: {name}" for listed in sorted(LOGS.glob(FOUND_FLAKY)) for name in listed.read_text().splitlines()]
    for report in sorted(TARGET.glob(JUNIT)):
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("flakyFailure") is not None or case.find("flakyError") is not None:
                found.append(f"{report.parent.name}: {case.get('classname')} {case.get('name')}")
    return found


def processor_seconds():
    """Returns the seconds that all processors were busy, and those that they had, since the machine started; None if unknown."""
    try:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def print_end_of_log(name, number):
    """Prints the last lines of a suite's log again, so that the end of a long run shows why it failed."""
    log = LOGS / f"{name}.log"
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()[-number:]
        print(f"\nthe end of {name}.log:", *(f"    {line}" for line in lines), sep="\n")


def report(runner, before):
    print("\nsuite               result         wall    processor")
    for run in runner.runs:
        print(f"{run.suite.name:18}  {run.result:11} {run.seconds:6.0f} s {run.cpu:8.0f} s")
    after = processor_seconds()
    share = f", processors {100 * (after[0] - before[0]) / max(1, after[1] - before[1]):.0f} % busy" if before and after else ""
    print(f"in all {time.time() - runner.began:.0f} s{share}")
    flaky = flaky_tests()
    FLAKY.write_text("".join(f"{name}\n" for name in flaky))
    for name in flaky:
        print(f"FLAKY, passed only on the second attempt: {name}")
    failed = [run.suite.name for run in runner.runs if run.result in ("FAILED", "interrupted", "not run")]
    skipped = [run.suite.name for run in runner.runs if run.result == "skipped"]
    if skipped:
        print(f"skipped, see the reason above: {' '.join(skipped)}")
    for name in failed:
        print_end_of_log(name, END_OF_LOG_LINES // len(failed))
    if failed:
        print(f"failed, or not run: {' '.join(failed)}; logs are in {LOGS}")
    return 1 if failed else 0


def with_libraries(action, outcome):
    """Restores or saves compiled libraries. A failure only costs time."""
    try:
        store = libraries.store(ROOT)
        if number := action(store, TARGET):
            say(f"{number} compiled libraries {outcome} {store}")
    except (OSError, shutil.Error, subprocess.SubprocessError) as error:
        say(f"compiled libraries cannot be kept: {error}")


def main():
    names = sys.argv[1:]
    if not names or names == ["--list"]:
        for suite in SUITES:
            print(f"{suite.name:18} {suite.about}")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in [*TARGET.glob(JUNIT), *LOGS.glob(FOUND_FLAKY)]:
        old.unlink()
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < DISK_GB:
        say(f"only {free_gb:.0f} GB are free on this disk: all suites together need up to {DISK_GB} GB, and fail in unclear ways on a full disk")
    before = processor_seconds()
    with_libraries(libraries.restore, "are taken from")
    runner = Runner([Run(suite) for suite in with_needs(names)])
    runner.run()
    if not runner.interrupted:
        with_libraries(libraries.save, "are now kept in")
    return report(runner, before)


if __name__ == "__main__":
    sys.exit(main())
