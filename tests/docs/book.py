"""A preprocessor of mdBook: documents outside of docs/ that the pages link become part of the book.

A page that is only a link to another document of the repository shows that document. Links to such documents lead to that
page, links to other files to a copy below `files/`, and links to folders become plain text: the book is complete wherever it is.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Outside the book, which mdBook empties after this has run; scripts/docs moves it in.
FILES = ROOT / "target/book-files"

STAND_IN = re.compile(r"^# .*\n+\[[^\]]*\]\((\.\./[^)#]+\.md)\)\s*$")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def chapters(items):
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from chapters(item["Chapter"]["sub_items"])


def main():
    context, book = json.load(sys.stdin)
    all_chapters = [chapter for chapter in chapters(book.get("items") or book.get("sections")) if chapter["path"]]
    sources = {}
    for chapter in all_chapters:
        path = DOCS / chapter["path"]
        if stand_in := STAND_IN.match(chapter["content"]):
            shown = (path.parent / stand_in[1]).resolve()
            chapter["content"] = shown.read_text()
            sources[chapter["path"]] = shown
        else:
            sources[chapter["path"]] = path
    places = {source.resolve(): DOCS / path for path, source in sources.items()}
    for chapter in all_chapters:
        chapter["content"] = outside_code(chapter["content"], lambda text, chapter=chapter: LINK.sub(
            lambda link: rewritten(link, sources[chapter["path"]], DOCS / chapter["path"], places), text))
    json.dump(book, sys.stdout)


def outside_code(text, change):
    """Applies a change to the text outside of fenced blocks."""
    parts = re.split(r"(^\s*```.*?^\s*```\s*$)", text, flags=re.M | re.S)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def rewritten(link, source, page, places):
    words, path, anchor = link[1], link[2], link[3] or ""
    target = (source.parent / path).resolve()
    if target in places or (target.suffix == ".md" and DOCS in target.parents):
        return f"[{words}]({os.path.relpath(places.get(target, target), page.parent)}{anchor})"
    if not target.is_file():
        return words
    # mdBook treats every link to an .md as one to a chapter.
    name = target.relative_to(ROOT)
    name = name.with_suffix(".txt") if name.suffix == ".md" else name
    copy = FILES / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(target, copy)
    return f"[{words}]({os.path.relpath(DOCS / 'files' / name, page.parent)})"


if __name__ == "__main__":
    if sys.argv[1:2] != ["supports"]:
        main()
