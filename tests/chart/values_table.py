"""Generates the table of values in the chart's README from the comments in values.yaml; --write puts it there."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/modelrelay"
README = CHART / "README.md"
BEGIN, END = "<!-- values: made by scripts/chart generate -->", "<!-- end of values -->"


@dataclasses.dataclass
class Row:
    name: str
    default: str
    text: str


def rows():
    """Returns every value with a comment that begins with `# --`."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    path, comment, found = [], None, []
    for line in (CHART / "values.yaml").read_text().splitlines():
        key = re.match(r"( *)([A-Za-z]+):", line)
        if comment_line := re.match(r" *# ?(-- )?(.*)", line):
            if comment_line[1]:
                comment = [comment_line[2]]
            elif comment is not None:
                comment.append(comment_line[2])
        elif key:
            path = path[: len(key[1]) // 2] + [key[2]]
            if comment is not None:
                found.append(Row(".".join(path), default(values, path), " ".join(comment)))
            comment = None
        else:
            comment = None
    return found


def default(values, path):
    for key in path:
        values = values[key]
    return json.dumps(values)


def table():
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [f"| `{row.name}` | `{row.default}` | {row.text.replace('|', chr(92) + '|')} |" for row in rows()]
    return "\n".join([BEGIN, *lines, END])


def main():
    text = README.read_text()
    made = text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :]
    if "--write" in sys.argv:
        README.write_text(made)
    else:
        print(table())


if __name__ == "__main__":
    main()
