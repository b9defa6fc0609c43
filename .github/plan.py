#!/usr/bin/env python3
"""Decides which jobs of ci.yml run, by .github/suites.toml.

  .github/plan.py all          every job, as JSON for a matrix
  .github/plan.py diff BASE    the jobs for what changed since the common ancestor with BASE
  .github/plan.py check        finds mistakes in the table
"""

import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((ROOT / ".github/suites.toml").read_text())


def expand(names, table=TABLE):
    """Returns the suites that a list of suites and groups stands for.

    >>> sorted(expand(["a", "g"], {"groups": {"g": ["h", "b"], "h": ["c"]}}))
    ['a', 'b', 'c']
    """
    suites = set()
    for name in names:
        group = table["groups"].get(name)
        suites |= {name} if group is None else expand(group, table)
    return suites


def every_suite(table=TABLE):
    """Returns the suites of all jobs."""
    return {suite for job in table["jobs"].values() for suite in job["suites"]}


def suites_for(files, table=TABLE):
    """Returns the suites that changed files need.

    >>> sorted(suites_for(["docs/index.md"]))
    ['docs', 'lint']
    >>> sorted(suites_for(["deploy/docker/Dockerfile.relay", "deny.toml"]))
    ['cluster', 'deny', 'images']
    >>> suites_for(["Cargo.lock"]) == suites_for(["docs/index.md", "new-folder/file"]) == every_suite()
    True
    >>> suites_for([])
    set()
    """
    suites = set()
    for file in files:
        prefix = max(filter(file.startswith, table["paths"]), key=len, default=None)
        suites |= every_suite(table) if prefix is None else expand(table["paths"][prefix], table)
    return suites


def jobs_for(suites, table=TABLE):
    """Returns the entries of the matrix that run the suites.

    >>> [(job["name"], job["suites"]) for job in jobs_for({"images", "fmt", "chart"})]
    [('lint', 'fmt'), ('cluster', 'chart images')]
    >>> [(job["name"], job["partition"]) for job in jobs_for({"contract"})]
    [('contract 1/3', '1/3'), ('contract 2/3', '2/3'), ('contract 3/3', '3/3')]
    """
    jobs = []
    for name, job in table["jobs"].items():
        wanted = " ".join(suite for suite in job["suites"] if suite in suites)
        shards = job.get("shards", 1)
        for shard in range(1, shards + 1) if wanted else []:
            partition = f"{shard}/{shards}" if shards > 1 else ""
            title = f"{name} {partition}".strip()
            jobs.append({"name": title, "cache": name, "suites": wanted, "partition": partition, "minutes": job["minutes"]})
    return jobs


def git_lines(*command):
    """Returns the names that a git command lists."""
    listed = subprocess.run(["git", *command, "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split("\0")[:-1]


def mistakes():
    """Yields the mistakes in the table: suites that CI leaves out or that do not exist, and prefixes that match no file."""
    of_make = " ".join(re.findall(r"^TEST(?:_MORE)? = (.*)", (ROOT / "Makefile").read_text(), re.M)).split()
    defined = re.findall(r"^suite_([\w-]+)\(\)", (ROOT / "scripts/suites.bash").read_text(), re.M)
    in_jobs = [suite for job in TABLE["jobs"].values() for suite in job["suites"]]
    yield from (f"no job runs the suite {suite} of `make test-all`" for suite in of_make if suite not in in_jobs)
    yield from (f"scripts/suites.bash has no suite {suite}" for suite in in_jobs if suite not in defined)
    yield from (f"two jobs run the suite {suite}" for suite in set(in_jobs) if in_jobs.count(suite) > 1)
    files = git_lines("ls-files", "--cached", "--others", "--exclude-standard")
    for prefix, names in TABLE["paths"].items():
        if not any(file.startswith(prefix) for file in files):
            yield f"no file matches the prefix {prefix}"
        yield from (f"{prefix} names {suite}, which no job runs" for suite in expand(names) - every_suite())


def main():
    match sys.argv[1:]:
        case ["all"]:
            print(json.dumps(jobs_for(every_suite())))
        case ["diff", base]:
            print(json.dumps(jobs_for(suites_for(git_lines("diff", "--name-only", "--no-renames", f"{base}...HEAD")))))
        case ["check"]:
            found = list(mistakes())
            for mistake in found:
                print(f".github/suites.toml: {mistake}", file=sys.stderr)
            sys.exit(bool(found or doctest.testmod().failed))
        case _:
            sys.exit(__doc__)


main()
