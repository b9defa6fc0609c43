"""Tests the checks of the documentation, each on a page made for it: a check that finds nothing is useless."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import links
import pages
import run


class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        self.page = self.folder / "page.md"
        for module in (pages, links):
            self.enterContext(mock.patch.object(module, "ROOT", self.folder))

    def write(self, text):
        self.page.write_text(text)
        return self.page

    def test_only_blocks_without_a_mark_are_found(self):
        marked = "<!-- run -->\n```sh\ntrue\n```\n\n<!-- not run: wants a GPU -->\n```sh\nfalse\n```\n```yaml\na: b\n```\n"
        self.assertEqual(run.unmarked(self.write(marked)), [])
        self.assertEqual([step.line for step in run.unmarked(self.write("```sh\ntrue\n```\n" + marked))], [1])
        self.assertEqual(len(run.unmarked(self.write("<!-- run -->\n\nwords between\n\n```python\n1\n```\n"))), 1)

    def test_mark_sets_the_action_for_a_block(self):
        step, = pages.steps(self.write('<!-- run: background until "up"; prints "a"; prints "b" -->\n```sh\nserve\n```\n'))
        self.assertEqual((step.until, step.prints, step.text), ("up", ["a", "b"], "serve\n"))
        step, = pages.steps(self.write('<!-- stage in the background until "up": serve -->\n'))
        self.assertEqual((step.verb, step.until, step.text), ("run", "up", "serve\n"))

    def test_links_to_missing_files_and_headings_are_found(self):
        (self.folder / "other.md").write_text("# A *few* `words`, here\n\n## Twice\n\n## Twice\n")
        good = "[a](other.md#a-few-words-here) [b](other.md#twice-1) [c](#top) `[d](nowhere.md)` [e](https://example.org)\n\n# Top\n"
        self.assertEqual(list(links.problems(self.write(good))), [])
        links.anchors.cache_clear()
        bad = list(links.problems(self.write("[a](nowhere.md) [b](other.md#thrice) [c](#top)\n")))
        self.assertEqual(len(bad), 3, bad)

    @unittest.skipUnless(run.can_unshare(), "wants a network of its own")
    def test_page_fails_on_a_failed_command_or_other_output(self):
        def code(text):
            script = Path(run.__file__)
            environment = {**os.environ, "MODELRELAY_BIN_DIR": "/nonexistent"}
            ended = subprocess.run([*run.UNSHARE, sys.executable, script, "--page", self.write(text)], env=environment, capture_output=True, check=False)
            return ended.returncode, ended.stdout.decode()

        self.assertEqual(code('<!-- run: prints "4" -->\n```sh\nx=4\n```\n\n<!-- run: prints "4" -->\n```sh\necho $x\n```\n')[0], 1, "the block has not printed yet")
        self.assertEqual(code('<!-- run -->\n```sh\nx=4\n```\n\n<!-- run: prints "4" -->\n```sh\necho $x\n```\n')[0], 0)
        failed, output = code("<!-- run -->\n```sh\nfalse\necho never\n```\n")
        self.assertEqual((failed, "never\n  output" in output, "it ended with code 1" in output), (1, True, True), output)
        self.assertEqual(code('<!-- run: background until "up" -->\n```sh\necho down\n```\n')[0], 1)
        self.assertEqual(code('<!-- file: a/b.txt -->\n```yaml\na: 1\n```\n\n<!-- run: prints "a: 1" -->\n```sh\ncat a/b.txt\n```\n')[0], 0)


class Runbook(unittest.TestCase):
    def test_quoted_messages_exist_in_the_programs(self):
        """Texts in the first column of its tables, cut at placeholders, exist in the programs' source."""
        text = (pages.DOCS / "runbook.md").read_text()
        quoted = {span for row in re.findall(r"^\| ([^|]*) \|", text, re.M) for span in re.findall(r"``(.*?)``|`([^`]*)`", row)}
        fragments = {part.strip() for spans in quoted for span in spans for part in re.split(r"…|[;:] |\b\d{3}\b.*|[A-Z]{2,}\S*|\w+=\S*", span)}
        fragments = {part for part in fragments if len(part.split()) >= 3 and not part.startswith(("modelrelay-", "Connection refused", "Too many open files"))}
        self.assertGreater(len(fragments), 20)
        folders = [pages.ROOT / folder / "src" for folder in ("relay", "worker-sidecar", "worker-sidecar/multiplexer", "protocol")]
        source = "\n".join(file.read_text() for folder in folders for file in folder.rglob("*.rs"))
        source = re.sub(r"\\\n\s*", "", source)
        self.assertEqual([part for part in fragments if part not in source], [])


if __name__ == "__main__":
    unittest.main()
