"""The rule of all suites for failed tests: each runs once more, and is flaky if it passes then.

nextest, Playwright, pytest and Node's runner have it built in. `main` adds it to unittest. scripts/suites.py names in
MODELRELAY_FLAKY the file that collects the flaky tests, one per line, for its summary.
"""

import os
import sys
import unittest


def main():
    """Runs the tests of the program's main module; exits with 1 if a test failed twice."""
    first = run(unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"]))
    # A failed subtest runs again as a part of its test.
    failed = {getattr(test, "test_case", test): None for test, _ in [*first.failures, *first.errors]}
    if not failed:
        sys.exit(not first.wasSuccessful())
    if not all(isinstance(test, unittest.TestCase) for test in failed):
        sys.exit("the set-up of a class or module failed: its tests cannot run once more")
    print(f"\nsecond try of {len(failed)} failed tests")
    second = run(unittest.TestSuite(failed))
    if not second.wasSuccessful():
        sys.exit(1)
    for test in failed:
        report(test.id())
    sys.exit(0)


def run(suite):
    return unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)


def report(name):
    """Lists a test as flaky."""
    print(f"FLAKY, passed on its second try: {name}")
    if listed := os.environ.get("MODELRELAY_FLAKY"):
        with open(listed, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
