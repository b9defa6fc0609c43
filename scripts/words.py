#!/usr/bin/env python3
"""Counts words that make comments, messages, documentation and names hard to read, per 1,000 words, and keeps them from growing.

    scripts/words.py               fails where an area has more of them than its limit
    scripts/words.py list [AREA]   prints every place, with the usual alternative

Code in backticks, blocks of code and generated parts of pages are not counted.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

from rust_source import ROOT, blank, line_of, split, test_spans

# Words per 1,000 in each area. These limits only fall, and an area at or below the aim always passes.
AIM = 0.5
LIMITS = {
    "comments relay": 0.5,
    "comments worker-sidecar": 0.5,
    "comments operator": 0.5,
    "comments tests": 0.5,
    "comments fuzz": 0.5,
    "texts": 0.50,
    "names": 0.5,
    "names of tests": 0.5,
    "documentation": 0.5,
}

# Each word with the usual alternative. A pattern is matched in lower case, as whole words.
WORDS = {
    "nobody|somebody|whoever|everybody": "name the client, relay, worker, backend or operator",
    "ours|theirs": "name the owner",
    "says?|said": "returns, reports, states",
    "tells?|told": "reports, sends; receives, is notified",
    "ask|asks|asked|asking": "requests, queries, calls",
    "believes?|believed": "assumes, has reported",
    "hurry|hurries|hurried": "reports at once",
    "brings?|brought": "starts, delivers, causes",
    "lets? in|took back|takes? back|taken back|comes? together": "accepts; revokes; aggregates",
    "anew": "again",
    "beside": "next to, alongside, in parallel with",
    "so (?:many|long)": "the number, the duration",
    "for ever": "indefinitely",
    "for people": "human-readable",
    "a look": "a probe, a poll",
    "what there is": "available …, assets",
    "has a (?:place|turn)": "is queued, is scheduled",
    "of before": "previous",
    "still counts": "stays in effect",
}
# At the start of a comment or of a name.
OPENERS = {"what|whats|who|whose|whether|where": "start with the subject or a verb; write `True if` for `Whether`"}
# In names of functions and types only.
NAMES = {"asker|suspicion|visitor|bereft|hopeless|standing|speech|swapping|verdict|seen": "a term of the field, see docs/glossary.md"}

CRATES = ["relay", "worker-sidecar", "operator", "protocol", "tests", "bench", "fuzz"]
PROGRAMS = CRATES[:4]
# Pages that are generated as a whole.
GENERATED = {"docs/reference/resources.md"}
NOT_PROSE = re.compile(
    r"<!-- (?:generated|clients|speed|reasons)\b[^>]*-->.*?<!-- (?:/generated|clients: end|speed: end|end of reasons) -->"
    r"|^[ \t]*(```|~~~).*?^[ \t]*\1|<!--.*?-->|`[^`\n]*`|\]\([^)\s]*\)|https?://\S+", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")
NAME = re.compile(r"\b(?:fn|struct|enum|trait|union|type)\s+([A-Za-z_]\w*)")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A string with three words in a row is a text for a reader.
TEXT = re.compile(r"[A-Za-z]{2,} [a-z]+ [a-z]{2,}")


def pattern(words):
    """Returns one pattern with a group for each entry."""
    return re.compile(r"\b(?:" + "|".join(f"({entry})" for entry in words) + r")\b")


@dataclass
class Area:
    """The number of words in an area, and the places of those that are counted."""

    words: int = 0
    found: Counter = field(default_factory=Counter)
    # (file, line, word, alternative)
    places: list = field(default_factory=list)

    def add(self, text, file, line, lists):
        """Adds a text that begins at a line of a file. `lists` has pairs of a pattern and its words."""
        self.words += len(WORD.findall(text))
        for matcher, words in lists:
            for match in matcher.finditer(text.lower()):
                self.found[match[0]] += 1
                self.places.append((file, line + text.count("\n", 0, match.start()), match[0], list(words.values())[match.lastindex - 1]))

    @property
    def rate(self):
        return 1000 * len(self.places) / max(1, self.words)


ANYWHERE = (pattern(WORDS), WORDS)
OPENING = (re.compile("^(" + "|".join(OPENERS) + r")\b"), OPENERS)
IN_NAMES = (pattern(NAMES), NAMES)


def main():
    areas = count(ROOT)
    if sys.argv[1:2] == ["list"]:
        for name, area in areas.items():
            if name in (sys.argv[2:] or areas):
                print(*(f"{file}:{line}: {word}: {instead}" for file, line, word, instead in area.places), sep="\n")
        return 0
    problems = [problem for name, area in areas.items() for problem in check(name, area)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def check(name, area):
    """Prints an area's line of the table and yields a problem if it is above its limit."""
    limit = max(AIM, LIMITS.get(name, AIM))
    most = ", ".join(f"{word} {number}" for word, number in area.found.most_common(4))
    # Hundredths, rounded up, as in the table.
    rate = -(-area.rate * 100 // 1) / 100
    print(f"words: {name:24} {area.words:7} words {rate:6.2f} per 1,000 (limit {limit:.2f}): {most}")
    if max(AIM, rate) < limit:
        print(f"words: {name}: {rate:.2f} per 1,000 words, so lower its limit from {limit:.2f} to {max(AIM, rate):.2f}")
    if rate > limit:
        yield f"{name}: {rate:.2f} per 1,000 words, limit {limit:.2f}; `scripts/words.py list '{name}'` prints all places. The most frequent:"
        for word, _ in area.found.most_common(3):
            hits = [place for place in area.places if place[2] == word]
            yield "\n".join([f"  {word} (instead: {hits[0][3]}):", *(f"    {file}:{line}" for file, line, *_ in hits[:5])])


def count(root):
    """Returns the areas by name."""
    areas = {f"comments {crate}": Area() for crate in CRATES} | {name: Area() for name in ("texts", "names", "names of tests", "documentation")}
    for crate in CRATES:
        for path in sorted((root / crate).rglob("*.rs")):
            file = path.relative_to(root)
            if "target" not in file.parts:
                add_rust(areas, crate, str(file), path.read_text(encoding="utf-8"))
    for path in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]:
        file = str(path.relative_to(root))
        if file not in GENERATED:
            areas["documentation"].add(without_code(path.read_text(encoding="utf-8")), file, 1, [ANYWHERE])
    return areas


def add_rust(areas, crate, file, text):
    """Adds comments, texts and names of one file."""
    code, comments, strings = split(text)
    tests = [(0, len(text))] if is_test(file) else list(test_spans(code))
    for offset, comment in blocks(text, comments):
        areas[f"comments {crate}"].add(without_code(comment), file, line_of(text, offset), [ANYWHERE, OPENING])
    for match in NAME.finditer(code):
        area = "names of tests" if any(start <= match.start() < end for start, end in tests) else "names"
        areas[area].add(" ".join(PART.findall(match[1])), file, line_of(code, match.start()), [ANYWHERE, OPENING, IN_NAMES])
    for offset, string in strings if crate in PROGRAMS else ():
        if TEXT.search(string) and not any(start <= offset < end for start, end in tests):
            areas["texts"].add(without_code(string), file, line_of(text, offset), [ANYWHERE])


def is_test(file):
    return re.search(r"(?:^|/)tests(?:/|\.rs$)", file) is not None


def blocks(text, comments):
    """Joins comments in consecutive lines; yields each with the offset of its first line."""
    block, first, end = [], 0, 0
    for offset, comment in comments:
        gap = text[end:offset]
        if block and (gap.strip() or gap.count("\n") > 1):
            yield first, "\n".join(block)
            block = []
        first, end = first if block else offset, offset + len(comment)
        block.append(re.sub(r"^(?:/{2,3}!?|/\*+!?)\s?|\*/$", "", comment))
    if block:
        yield first, "\n".join(block)


def without_code(text):
    """Returns Markdown with blanks in place of code, links' targets and generated parts. Lines stay the same."""
    return NOT_PROSE.sub(lambda match: blank(match[0]), text)


if __name__ == "__main__":
    sys.exit(main())
