"""Tests of scripts/words.py, each on a small repository written for it."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import words


class Words(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.write("README.md", "")
        self.write("CONTRIBUTING.md", "")

    def write(self, file, text):
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def found(self, area):
        return [f"{Path(file).name}:{line} {word}" for file, line, word, _ in words.count(self.root)[area].places]

    def test_opener_counts_only_at_a_comment_start(self):
        self.write("relay/src/a.rs", "//! Nobody is asked,\n//! so that `nobody` knows what is tolled.\n\n/// Whether\n/// it says so.\nfn f() {} // what\n")
        self.assertEqual(self.found("comments relay"), ["a.rs:1 nobody", "a.rs:1 asked", "a.rs:5 says", "a.rs:4 whether", "a.rs:6 what"])

    def test_texts_of_tests_are_not_counted(self):
        self.write("operator/src/a.rs", 'const A: &str = "told";\nfn f() { info!("the worker told us // nothing"); }\n#[cfg(test)]\nmod tests { fn g() { panic!("nobody was told anything") } }\n')
        self.write("tests/contract/tests/a.rs", 'fn g() { panic!("nobody was told anything") }\n')
        self.assertEqual(self.found("texts"), ["a.rs:2 told"])
        self.assertEqual(self.found("comments operator"), [])

    def test_names_are_split_into_words(self):
        self.write("protocol/src/a.rs", "struct ToldOnce;\nfn is_anew() {}\nfn untold() {}\nfn somewhat() {}\n#[cfg(test)]\nmod tests {\n    fn who_asks_is_heard() {}\n}\n")
        self.assertEqual(self.found("names"), ["a.rs:1 told", "a.rs:2 anew"])
        self.assertEqual(self.found("names of tests"), ["a.rs:7 asks", "a.rs:7 who"])

    def test_page_is_counted_without_code_and_generated_parts(self):
        self.write("docs/how-to/a.md", "What `nobody` [says](nobody.md)\n\n```sh\necho anew\n```\n\n<!-- run: says -->\n<!-- generated: limits -->\n| told |\n<!-- /generated -->\n\nfor ever\n")
        self.write("docs/reference/resources.md", "nobody\n")
        self.assertEqual(self.found("documentation"), ["a.md:1 says", "a.md:12 for ever"])

    def test_build_output_is_skipped(self):
        self.write("tests/simulation/target/debug/build/a.rs", "// nobody\n")
        self.assertEqual(self.found("comments tests"), [])

    def test_area_above_its_limit_fails_with_places(self):
        area = words.Area()
        area.add("plain " * 997 + "nobody\nnobody says", "a.rs", 7, [words.ANYWHERE])
        with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.dict(words.LIMITS, {"names": 3.0}):
            self.assertEqual(list(words.check("names", area)), [])
            words.LIMITS["names"] = 2.99
            problem = "\n".join(words.check("names", area))
            words.LIMITS["names"] = 3.5
            list(words.check("names", area))
        self.assertIn("names: 3.00 per 1,000 words, limit 2.99", problem)
        self.assertIn("nobody (instead: name the client, relay, worker, backend or operator):\n    a.rs:7\n    a.rs:8", problem)
        self.assertIn("lower its limit from 3.50 to 3.00", printed.getvalue())
