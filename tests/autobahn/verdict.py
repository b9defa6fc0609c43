"""Reads the report of Autobahn's fuzzing client: prints the figures, and exits with 1 if a case failed."""

import collections
import json
import sys

# The suite's verdicts other than a fault. A case that only informs has no right result.
GOOD = {"OK", "NON-STRICT", "INFORMATIONAL"}
# The number of cases when this was written. Fewer would mean that not all were run.
AT_LEAST = 247


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        (agent, cases), = json.load(file).items()
    figures = collections.Counter(case["behavior"] for case in cases.values())
    closes = collections.Counter(case["behaviorClose"] for case in cases.values())
    print(f"autobahn: {len(cases)} cases of {agent}: {spelled(figures)}; closing: {spelled(closes)}")
    failed = [name for name, case in cases.items() if not {case["behavior"], case["behaviorClose"]} <= GOOD]
    for name in failed:
        print(f"autobahn: case {name} failed: {cases[name]['behavior']}, closing {cases[name]['behaviorClose']}")
    if len(cases) < AT_LEAST:
        print(f"autobahn: only {len(cases)} of {AT_LEAST} cases were run")
    sys.exit(bool(failed) or len(cases) < AT_LEAST)


def spelled(figures):
    return ", ".join(f"{count} {name}" for name, count in sorted(figures.items()))


main()
