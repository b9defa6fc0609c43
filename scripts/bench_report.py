#!/usr/bin/env python3
"""Renders a report of the benchmark: the tables of docs/speed.md or docs/scale.md, with the results of the goals.

    scripts/bench_report.py REPORT         prints the tables of a file that `modelrelay-bench run` or `scale` wrote
    scripts/bench_report.py REPORT PAGE    also writes them into a page, between its marks

Each goal is a ratio within one run. The required goals beat every router for language models; the stretch goals come
near to no proxy at all.
"""

import json
import math
import statistics
import sys
from operator import ge as at_least, le as at_most
from pathlib import Path

from bench_scale import scale
from bench_tables import NOTHING, items, machine, quotient, row

# Columns of the table of all systems: title, figure, digits behind the point.
COLUMNS = (
    ("one at a time, p50 ms", "alone_p50", 3),
    ("32 clients, req/s", "requests", 0),
    ("CPU µs/req", "cpu_per_request", 1),
    ("first token p50 ms", "first_event_p50", 2),
    ("p99 ms", "first_event_p99", 2),
    ("35–50 ms", "stalls", 0),
    ("CPU µs/token, paced", "cpu_per_paced_chunk", 1),
    ("tokens/s", "chunks", 0),
    ("CPU µs/token", "cpu_per_chunk", 2),
    ("KiB/stream", "stream_kib", 1),
    ("CPU µs, 220 kB prompt", "cpu_per_long_prompt", 0),
    ("CPU ms, 20 MB prompt", "cpu_per_huge_prompt", 1),
    ("CPU µs/abort", "cpu_per_abort", 0),
    ("burst of 32, no log, first token p99 ms", "burst_p99_unlogged", 2),
    ("the same, logged", "burst_p99", 2),
    ("CPU µs/req, logged", "cpu_per_logged_request", 1),
)

# Rows of the table of ModelRelay alone.
OURS = """\
| the relay's part of a paced token | {relay_cpu_per_paced_chunk:.1f} µs |
| an idle worker: the relay's memory | {idle_worker_kib:.1f} KiB |
| an idle worker: the relay's processor time | {idle_worker_cpu:.4f} % of a core |
| mean processor time of a dispatch among 10 workers | {dispatch_few:.0f} ns |
| among the most workers | {dispatch_many:.0f} ns |
| dispatch with 10 waiting, 99 of 100 | {queue_short:.0f} ns |
| dispatch with the most waiting, 99 of 100 | {queue_long:.0f} ns |
| dispatch with 10 of 50 models, 99 of 100 | {queue_short_models:.0f} ns |
| dispatch with the most of 50 models, 99 of 100 | {queue_long_models:.0f} ns |
| submission that waits, with 10 waiting, 99 of 100 | {submit_short:.0f} ns |
| submission that waits, with the most waiting, 99 of 100 | {submit_long:.0f} ns |
| submission that waits, with 10 of 50 models, 99 of 100 | {submit_short_models:.0f} ns |
| submission that waits, with the most of 50 models, 99 of 100 | {submit_long_models:.0f} ns |
| cancellation, anywhere in the queue, with 10 waiting, 99 of 100 | {cancel_short:.0f} ns |
| cancellation, anywhere in the queue, with the most waiting, 99 of 100 | {cancel_long:.0f} ns |
| cancellation, anywhere in the queue, with 10 of 50 models, 99 of 100 | {cancel_short_models:.0f} ns |
| cancellation, anywhere in the queue, with the most of 50 models, 99 of 100 | {cancel_long_models:.0f} ns |
| expiry, with 10 waiting, 99 of 100 | {expire_short:.0f} ns |
| expiry, with the most waiting, 99 of 100 | {expire_long:.0f} ns |
| expiry, with 10 of 50 models, 99 of 100 | {expire_short_models:.0f} ns |
| expiry, with the most of 50 models, 99 of 100 | {expire_long_models:.0f} ns |
| responses per second of 1 worker | {workers1:.0f} |
| of 2 workers | {workers2:.0f} |
| of 4 workers | {workers4:.0f} |
| of 8 workers | {workers8:.0f} |
| a client that stops reading: memory | {slow_client_kib:.0f} KiB |
| the most before it settled | {slow_client_peak_kib:.0f} KiB |
| until the relay listens | {cold_start:.0f} ms |
| memory of a relay with nothing to do | {idle_relay_mb:.1f} MB |
"""


def ratio(figure, system, own=None):
    """ModelRelay's figure, or another one of it, as a multiple of another system's."""
    return lambda us, of: quotient(us[own or figure], of[system][figure])


def added(figure, system, theirs=None):
    """ModelRelay's figure minus the same, or another one, of another system."""
    return lambda us, of: us[figure] - of[system][theirs or figure]


def ours(figure, base=None):
    """ModelRelay's figure, or the same as a multiple of another one of ModelRelay."""
    return lambda us, _: quotient(us[figure], us[base]) if base else us[figure]


def least_step(us, _):
    """The least factor from one number of workers to the next."""
    steps = [quotient(us[f"workers{2 * few}"], us[f"workers{few}"]) for few in (1, 2, 4)]
    return math.nan if any(map(math.isnan, steps)) else min(steps)


RELAY_ALONE = ratio("cpu_per_paced_chunk", "nginx", own="relay_cpu_per_paced_chunk")
AMONG_WORKERS = ours("dispatch_many", "dispatch_few")
IN_QUEUE = ours("queue_long", "queue_short")
IN_QUEUE_OF_MODELS = ours("queue_long_models", "queue_short_models")

# Name, description for a user, required conditions, conditions of the stretch goal. A condition: text, measurement,
# comparison, bound.
GOALS = (
    ("P1", "one request at a time", [
        ("median, × direct, at most 3.5", ratio("alone_p50", "direct"), at_most, 3.5),
        ("median, × sglang-router, at most 1.25", ratio("alone_p50", "sglang-router"), at_most, 1.25),
    ], [("median, × vllm-router, at most 1", ratio("alone_p50", "vllm-router"), at_most, 1)]),
    ("P2", "responses per second to 32 clients",
     [("× vllm-router, at least 1", ratio("requests", "vllm-router"), at_least, 1)],
     [("× rathole, at least 0.5", ratio("requests", "rathole"), at_least, 0.5)]),
    ("P3", "processor time of a request",
     [("× vllm-router, at most 1", ratio("cpu_per_request", "vllm-router"), at_most, 1)],
     [("× rathole, at most 2", ratio("cpu_per_request", "rathole"), at_most, 2)]),
    ("P4", "time to the first token", [
        ("added to direct, median, at most 1 ms", added("first_event_p50", "direct"), at_most, 1),
        ("added to direct, 99 of 100, at most 5 ms", added("first_event_p99", "direct"), at_most, 5),
        ("first tokens after 35 to 50 ms, none", ours("stalls"), at_most, 0),
    ], [("added to nginx, median, at most 0.3 ms", added("first_event_p50", "nginx"), at_most, 0.3)]),
    ("P5", "processor time of a delivered token",
     [("× vllm-router, at most 1", ratio("cpu_per_paced_chunk", "vllm-router"), at_most, 1)], [
         ("× rathole, at most 1", ratio("cpu_per_paced_chunk", "rathole"), at_most, 1),
         ("the relay alone, × nginx, at most 1", RELAY_ALONE, at_most, 1),
     ]),
    ("P6", "maximum tokens per second", [
        ("× vllm-router, at least 1.2", ratio("chunks", "vllm-router"), at_least, 1.2),
        ("× nginx, at least 0.55", ratio("chunks", "nginx"), at_least, 0.55),
    ], [("× rathole, at least 1", ratio("chunks", "rathole"), at_least, 1)]),
    ("P7", "memory of an open stream, among a thousand",
     [("× rathole, at most 1", ratio("stream_kib", "rathole"), at_most, 1)],
     [("× nginx, at most 1.2", ratio("stream_kib", "nginx"), at_most, 1.2)]),
    ("P8", "an idle worker", [
        ("memory, at most 20 KiB", ours("idle_worker_kib"), at_most, 20),
        ("processor, at most 0.005 % of a core", ours("idle_worker_cpu"), at_most, 0.005),
    ], [("memory, at most 12 KiB", ours("idle_worker_kib"), at_most, 12)]),
    ("P9", "processor time of a prompt of 220 kB",
     [("× vllm-router, at most 1", ratio("cpu_per_long_prompt", "vllm-router"), at_most, 1)],
     [("× rathole, at most 1", ratio("cpu_per_long_prompt", "rathole"), at_most, 1)]),
    ("P10", "size", [
        ("dispatch among 10,000 workers, × among 10, at most 4", AMONG_WORKERS, at_most, 4),
        ("dispatch with 100,000 waiting, 99 of 100, × with 10, at most 2", IN_QUEUE, at_most, 2),
        ("the same with requests for 50 models, at most 2", IN_QUEUE_OF_MODELS, at_most, 2),
        ("responses per second from 1 to 8 workers, smallest step, more than 1", least_step, at_least, 1),
    ], [
        ("dispatch among 10,000 workers, × among 10, at most 1.25", AMONG_WORKERS, at_most, 1.25),
        ("dispatch with 100,000 waiting, × with 10, at most 1.25", IN_QUEUE, at_most, 1.25),
        ("the same with requests for 50 models, at most 1.25", IN_QUEUE_OF_MODELS, at_most, 1.25),
    ]),
    ("P11", "one client of a hundred stops reading", [
        ("more memory, at most 512 KiB", ours("slow_client_kib"), at_most, 512),
        ("gaps of the others, 99 of 100, at most 1.5 × those without", ours("slow_client_gaps"), at_most, 1.5),
    ], [("more memory, at most 256 KiB", ours("slow_client_kib"), at_most, 256)]),
    ("P12", "start", [
        ("until the relay listens, at most 200 ms", ours("cold_start"), at_most, 200),
        ("its memory then, at most 15 MB", ours("idle_relay_mb"), at_most, 15),
    ], [
        ("until the relay listens, at most 50 ms", ours("cold_start"), at_most, 50),
        ("its memory then, at most 8 MB", ours("idle_relay_mb"), at_most, 8),
    ]),
    ("P13", "a burst of 32 streams, with the default log", [
        ("first token, 99 of 100, added to direct, at most 3 ms", added("burst_p99", "direct", "burst_p99_unlogged"), at_most, 3),
    ], [("processor time of a logged request, × one without a log, at most 1.25",
         ours("cpu_per_logged_request", "cpu_per_request"), at_most, 1.25)]),
)

def medians_of(turns):
    """Returns each system's medians, by figure. Stalls are summed: one is too many, in any round."""
    values = {}
    for turn in turns:
        for figure, value in turn["figures"].items():
            if value is not None:  # as JSON writes what is not finite
                values.setdefault(turn["system"], {}).setdefault(figure, []).append(value)
    return {
        system: {figure: sum(all_) if figure == "stalls" else statistics.median(all_) for figure, all_ in of.items()}
        for system, of in values.items()
    }


def judge(conditions, medians):
    """Returns text, measured number and result of each condition; number and result are None without a measurement."""
    for text, measured, holds, bound in conditions:
        try:
            value = measured(medians["modelrelay"], medians)
        except KeyError:
            value = None
        yield text, value, None if value is None else holds(value, bound)


def all_hold(results):
    """True if all results are true; None if one was not measured and none is false."""
    return False if False in results else None if None in results else True


def speed(report):
    """Returns the texts of docs/speed.md, by the names of their marks."""
    turns, medians = report["turns"], medians_of(report["turns"])
    right, megabytes = sum(turn["right"] for turn in turns), sum(turn["bytes"] for turn in turns) / 1e6
    brief = ", brief ones with imprecise figures" if report["quick"] else ""
    text = f"{machine(report)}. Medians of {report['rounds']} rounds{brief}. "
    text += f"{right} responses were compared with the backend's output, {megabytes:.1f} MB.\n\n"
    text += systems(report, medians) + absent(report) + modelrelay_alone(medians.get("modelrelay", {}))
    text += "| goal | about | must | stretch |\n|---|---|---|---|\n"
    for goal, about, must, stretch in GOALS:
        text += row(goal, about, conditions_cell(must, medians), conditions_cell(stretch, medians))
    return {"speed": text}


def systems(report, medians):
    """Contains only the columns with measurements: a run may have been limited to some parts."""
    columns = [column for column in COLUMNS if any(column[1] in figures for figures in medians.values())]
    if not columns:
        return ""
    text = row("", *(title for title, _, _ in columns)) + row("---", *("---:" for _ in columns))
    for system, version in report["systems"]:
        cells = [f"{report['names'][system]} {version}".rstrip()]
        for _, figure, digits in columns:
            value = medians.get(system, {}).get(figure)
            cell = NOTHING if value is None else f"{value:.{digits}f}"
            # The usage of direct is the backend's, which no other figure contains.
            of_backend = system == "direct" and figure.startswith("cpu_per_") and value is not None
            cells.append(f"({cell})" if of_backend else cell)
        text += row(*cells)
    return text + "\n"


def absent(report):
    """Lists the systems without a row, and the cells that are empty for a reason."""
    names = report["names"]
    lines = [f"{names[absent['system']]} was not measured: {absent['reason']}" for absent in report["absent"]]
    for turn in report["turns"]:
        lines += (f"{names[turn['system']]}, round {turn['round']}: {fault}" for fault in turn["faults"])
    return items(lines)


def modelrelay_alone(figures):
    """Contains only the rows with measurements."""
    rows = ""
    for line in OURS.splitlines(keepends=True):
        try:
            rows += line.format(**figures)
        except KeyError:
            pass  # not measured
    return f"| of relay and worker alone | |\n|---|---:|\n{rows}\n" if rows else ""


def conditions_cell(conditions, medians):
    """A cell of the goals' table: whether all conditions hold, and the number of each."""
    results = list(judge(conditions, medians))
    holds = all_hold([holds for _, _, holds in results])
    lines = [{True: "**holds**", False: "**does not hold**", None: "not measured"}[holds]]
    for text, value, holds in results:
        number = NOTHING if value is None else short(value)
        lines.append(f"{text}: **{number}**" if holds is False else f"{text}: {number}")
    return "<br>".join(lines)


def short(value):
    """Three significant digits, and all digits of a large number."""
    return f"{value:.{0 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4}f}"


def put(page, name, text):
    """Returns the page with a text between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the marks of table {name} are missing")
    return before + begin + text + end + after


def main(file, path=None):
    """Prints the tables of a report, and writes them into a page."""
    report = json.loads(Path(file).read_text(encoding="utf-8"))
    texts = speed(report) if "turns" in report else scale(report)
    print(*texts.values(), sep="\n")
    if path:
        page = Path(path).read_text(encoding="utf-8")
        for name, text in texts.items():
            page = put(page, name, text)
        Path(path).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: scripts/bench_report.py REPORT [PAGE]")
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"bench_report: {error}")
