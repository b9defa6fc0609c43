"""Every relative link of the documentation leads to an existing file, and every anchor to a heading of it."""

import re
import sys
from functools import cache

from pages import DOCS, ROOT, all_pages

BOOK = ROOT / "target/book"
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    text = re.sub(r"^(\s*)```.*?^\s*```\s*$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)


@cache
def anchors(page):
    """Returns the anchors that GitHub and mdBook make of headings."""
    found, seen = set(), {}
    for heading in re.findall(r"^#{1,6} +(.*?)\s*$", re.sub(r"^(\s*)```.*?^\s*```\s*$", "", page.read_text(), flags=re.M | re.S), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def problems(page):
    for match in LINK.finditer(without_code(page.read_text())):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {target.relative_to(ROOT)} has no heading #{anchor}"


# A first screen, and one for readers to see whether the project fits their needs.
README_LINES = 110


def readme_is_long():
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > README_LINES:
        yield f"README.md has {lines} lines, and may have {README_LINES}: move something into docs/"


def outside_the_book():
    """Yields pages below docs/ that are missing in the book's table of contents: readers would not find them."""
    listed = {(DOCS / path).resolve() for path in re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "SUMMARY.md").read_text())}
    for page in sorted(DOCS.rglob("*.md")):
        if page.name != "SUMMARY.md" and page.resolve() not in listed:
            yield f"{page.relative_to(ROOT)} is not in docs/SUMMARY.md"


def problems_of_the_book():
    """Checks the same for the built book, where chapters and files have moved."""
    ids = cache(lambda page: set(re.findall(r'id="([^"]+)"', page.read_text())))
    for page in sorted(BOOK.rglob("*.html")):
        # The page with all chapters and the page for wrong addresses are not in the folders that their links assume.
        if page.name in ("print.html", "404.html", "toc.html"):
            continue
        for link in set(re.findall(r'<a[^>]* href="([^"]*)"', page.read_text())):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if re.match(r"[a-z]+:", link) or target.name == "print.html":
                continue
            if not target.exists():
                yield f"{page.relative_to(BOOK)} of the book: {link} leads nowhere"
            elif anchor and target.suffix == ".html" and anchor not in ids(target):
                yield f"{page.relative_to(BOOK)} of the book: {target.relative_to(BOOK)} has no #{anchor}"


def main(what):
    if what == ["book"]:
        found = list(problems_of_the_book())
        print("\n".join(found) or "docs: every link of the book leads somewhere")
        return bool(found)
    pages = all_pages()
    found = [problem for page in pages for problem in problems(page)] + [*outside_the_book(), *readme_is_long()]
    print("\n".join(found) or f"docs: every relative link of {len(pages)} pages leads somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
