"""The documentation's pages as the tests see them: fenced blocks, and the instruction in the comment above each.

An HTML comment in the line above a block defines its use:

    <!-- run -->                                  it runs to its end, in the page's one terminal, and succeeds
    <!-- run: prints "text" -->                   and its output has this text; may be given several times, separated by ;
    <!-- run: background until "text" -->         a terminal of its own; the next block waits for this text in its output
    <!-- run: in another terminal -->             a new terminal, to its end
    <!-- not run: reason -->                      it is not run here, for this reason
    <!-- file: worker.yaml -->                    the reader saves the block under this name

Two comments stand for what a reader already has, and belong to no block:

    <!-- needs: llama-server -->                  without this program the page is not run
    <!-- stage: command -->                       runs like a block; `stage in the background until "text"` like one with a terminal
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUNNABLE = {"sh", "bash", "python", "js"}

FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\S*)\s*$")
COMMENT = re.compile(r"^\s*<!-- (?P<verb>not run|run|file|needs|stage[^:]*)(?:: (?P<rest>.*))? -->\s*$")


@dataclass
class Step:
    """One step of a page: a block, or the instruction of a comment."""

    page: Path
    line: int
    language: str
    text: str
    verb: str = ""
    detail: str = ""
    prints: list = field(default_factory=list)

    @property
    def place(self):
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"

    @property
    def until(self):
        """The text after which a background block has started; None for one that runs to its end."""
        found = re.search(r'background until "(.*?)"', self.detail)
        return found and found.group(1)

    @property
    def is_another_terminal(self):
        return "in another terminal" in self.detail


def all_pages():
    """Returns all pages for people: the book, the README, and the documents of the chart and the deployed files."""
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
    others += [ROOT / "charts/modelrelay/README.md", ROOT / "charts/modelrelay/RUNBOOKS.md", ROOT / "deploy/README.md", ROOT / "deploy/windows/README.md"]
    return sorted(DOCS.rglob("*.md")) + others


def steps(page):
    """Returns the page's blocks and staging comments, in their order."""
    found, marker, lines = [], None, page.read_text().split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := COMMENT.match(line):
            verb, rest = comment["verb"], comment["rest"] or ""
            if verb == "needs" or verb.startswith("stage"):
                found.append(_staged(page, number, verb, rest))
            else:
                marker = (verb, rest)
        elif fence := FENCE.match(line):
            began, body = number, []
            while number < len(lines) and not FENCE.match(lines[number]):
                body.append(lines[number].removeprefix(fence["indent"]))
                number += 1
            number += 1
            verb, detail = marker or ("", "")
            prints = re.findall(r'prints "(.*?)"', detail)
            found.append(Step(page, began, fence["language"], "\n".join(body) + "\n", verb, detail, prints))
            marker = None
        elif line.strip():
            marker = None
    return found


def _staged(page, number, verb, rest):
    if verb == "needs":
        return Step(page, number, "", "", "needs", rest)
    return Step(page, number, "sh", rest + "\n", "run", verb.removeprefix("stage").strip().replace("in the background", "background"))
