"""Tests of scripts/libraries.py on small folders."""

import os
import tempfile
import unittest
from pathlib import Path

import libraries

LIBRARY, OURS = "0123456789abcdef", "fedcba9876543210"


def built(target, crate, code, text="compiled"):
    """Writes what cargo writes for one crate."""
    for folder in (f".fingerprint/{crate}-{code}", "deps", f"build/{crate}-{code}/out"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    (target / f".fingerprint/{crate}-{code}/lib-{crate}").write_text(code)
    (target / f"deps/lib{crate}-{code}.rlib").write_text(text)
    (target / f"deps/{crate}-{code}.d").write_text(text)
    (target / f"build/{crate}-{code}/out/made.rs").write_text(text)


def files(base):
    return sorted(str(file.relative_to(base)) for file in base.rglob("*") if file.is_file())


class Libraries(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.base = Path(folder.name)
        self.store = self.base / "cache" / "now"

    def test_fresh_clone_gets_the_libraries_of_another_one(self):
        first, second = self.base / "first", self.base / "second"
        built(first / "debug", "serde", LIBRARY)
        built(first / "debug", "modelrelay-relay", OURS)
        libraries.save(self.store, first)
        self.assertEqual(libraries.restore(self.store, second), 1)
        self.assertEqual(files(second), [
            f"debug/.fingerprint/serde-{LIBRARY}/lib-serde",
            f"debug/build/serde-{LIBRARY}/out/made.rs",
            f"debug/deps/libserde-{LIBRARY}.rlib",
            f"debug/deps/serde-{LIBRARY}.d",
        ])
        kept, given = (folder / f"debug/deps/libserde-{LIBRARY}.rlib" for folder in (first, second))
        self.assertEqual(kept.stat().st_mtime_ns, given.stat().st_mtime_ns)

    def test_state_without_set_gets_the_newest_of_its_compiler(self):
        libraries.KEPT_SETS, kept = 3, libraries.KEPT_SETS
        self.addCleanup(setattr, libraries, "KEPT_SETS", kept)
        target = self.base / "target"
        for time, name, crate in ((1, "this-old", "http"), (2, "this-new", "serde"), (3, "other-new", "url")):
            built(self.base / name / "debug", crate, LIBRARY)
            libraries.save(self.base / "cache" / name, self.base / name)
            os.utime(self.base / "cache" / name, (time, time))
        self.assertEqual(libraries.restore(self.base / "cache" / "this-unknown", target), 1)
        self.assertTrue((target / f"debug/deps/libserde-{LIBRARY}.rlib").exists())

    def test_folder_with_libraries_is_left_alone(self):
        first, second = self.base / "first", self.base / "second"
        built(first / "x86_64/release", "serde", LIBRARY)
        libraries.save(self.store, first)
        built(second / "x86_64/release", "http", OURS)
        before = files(second)
        self.assertEqual(libraries.restore(self.store, second), 0)
        self.assertEqual(files(second), before)

    def test_changed_files_of_a_clone_leave_the_store_unchanged(self):
        first, second = self.base / "first", self.base / "second"
        built(first / "debug", "serde", LIBRARY)
        libraries.save(self.store, first)
        libraries.restore(self.store, second)
        for file in (f".fingerprint/serde-{LIBRARY}/lib-serde", f"deps/serde-{LIBRARY}.d", f"build/serde-{LIBRARY}/out/made.rs"):
            (second / "debug" / file).write_text("changed")
            self.assertNotEqual((self.store / "debug" / file).read_text(), "changed", file)

    def test_only_the_latest_sets_are_kept(self):
        built(self.base / "target" / "debug", "serde", LIBRARY)
        for time, name in enumerate(("long-ago", "before", "now")):
            libraries.save(self.base / "cache" / name, self.base / "target")
            os.utime(self.base / "cache" / name, (time, time))
        self.assertEqual(sorted(folder.name for folder in (self.base / "cache").iterdir()), ["before", "now"])


if __name__ == "__main__":
    unittest.main()
