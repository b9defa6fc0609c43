"""Reads Rust source without a compiler: separates code, comments and strings, and finds code that only tests compile."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A comment, a raw string, a string or a character, in this order.
TOKEN = re.compile(
    r"""[/r"'](?:
      (?<=/)(?:/[^\n]*|\*.*?\*/)
    | (?<=r)(\#*)".*?"\1
    | (?<=")(?:[^"\\]+|\\.)*"
    | (?<=')(?:\\(?:u\{[0-9a-fA-F_]+\}|x[0-9a-fA-F]{2}|.)|[^\\'\n])')""",
    re.DOTALL | re.VERBOSE)
ONLY_IN_TESTS = re.compile(
    r"#\[cfg\((?:test|all\(test\b[^\]]*)\)\]\s*(?:#\[[^\]]*\]\s*)*"
    r"(?=(?:pub(?:\([^)]*\))?\s+)?(?:async\s+|unsafe\s+)*(?:mod|fn|impl|use|struct|enum|trait|type|const|static)\b)")
BRACE = re.compile(r"[{}]")


def split(text):
    """Returns the code, comments and strings of a file: the latter as pairs of offset and text, the code with blanks in their
    place. Offsets and lines stay the same."""
    code, comments, strings, end = [], [], [], 0
    for match in TOKEN.finditer(text):
        code += text[end:match.start()], blank(match[0])
        end = match.end()
        if match[0][0] != "'":
            (comments if match[0][0] == "/" else strings).append((match.start(), match[0]))
    return "".join([*code, text[end:]]), comments, strings


def blank(text):
    return "\n".join(" " * len(line) for line in text.split("\n"))


def end_of_block(code, start):
    """Returns the offset behind the brace that closes the first block at or after `start`."""
    depth = 0
    for brace in BRACE.finditer(code, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    return len(code)


def test_spans(code):
    """Yields the start and end offset of each item that only tests compile."""
    end = 0
    for match in ONLY_IN_TESTS.finditer(code):
        if match.start() >= end:
            stop = re.compile(r"[{;]").search(code, match.end())
            end = end_of_block(code, stop.start()) if stop and stop[0] == "{" else stop.end() if stop else len(code)
            yield match.start(), end


def without_tests(code):
    """Returns the code with blanks in place of code that only tests compile."""
    for start, end in test_spans(code):
        code = code[:start] + blank(code[start:end]) + code[end:]
    return code


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1
