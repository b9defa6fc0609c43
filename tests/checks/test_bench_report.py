"""Tests of scripts/bench_report.py on small reports."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

import bench_report
import bench_scale

MACHINE = {"cpu": "A CPU", "cores": 2, "kernel": "6.1", "load_before": 0.5, "date": "2026-01-01"}
NAMES = {
    "direct": "direct (the backend itself)",
    "nginx": "nginx, 1 worker, proxy_buffering off",
    "modelrelay": "**modelrelay** (relay and worker)",
}


def turn(system, faults=(), **figures):
    return {"system": system, "round": 1, "figures": figures, "right": 10, "bytes": 3450, "faults": faults}


def speed_report():
    direct = turn("direct", alone_p50=0.1, cpu_per_request=7.0)
    ours = turn("modelrelay", ["Memory: it did not fit"], alone_p50=0.2, cpu_per_request=7.0, first_event_p50=1.5)
    ours["figures"]["cold_start"] = 12.3
    return {
        "machine": MACHINE, "rounds": 1, "quick": False, "names": NAMES,
        "systems": [["direct", ""], ["modelrelay", "0.1.0"]], "turns": [direct, ours],
        "absent": [{"system": "nginx", "reason": "not installed: nginx is not in PATH"}],
    }


def costs(feature, times):
    figures = {"alone_p50_ms": 0.2, "request_micros": 50, "relay_request_micros": 30}
    figures |= {"chunk_micros": 10, "relay_chunk_micros": 5}
    return {"feature": feature} | {figure: value * times for figure, value in figures.items()}


def streams(is_relayed):
    times = {"p50_ms": 0.0, "p99_ms": 3.5}
    return {
        "is_relayed": is_relayed, "count": 5000, "events": 100_000, "first_event": times, "gaps": times,
        "relay_kib": 12.0, "worker_kib": 9.0, "relay_micros": 10.0, "worker_micros": 8.0,
    }


def scale_report(**changes):
    """A report in which everything but the network was measured."""
    none = {"p50_ms": 0.0, "p99_ms": 0.0}
    return {
        "machine": MACHINE, "open_files": 20_000, "quick": False, "seconds": 200.0,
        "workers": {
            "count": 10_000, "handshake_micros": 180.0, "kib": 8.0, "cpu_percent": 0.0004, "heartbeat_micros": 60.0,
            "scrape_cpu_ms": 2.0, "scrape_kib": 40.0, "away_ms": 20.0, "back_seconds": 4.0, "back": none,
            "failed_dials": 7, "return_micros": 200.0, "return_kib": 9.0,
        },
        "streams": [streams(False), streams(True)],
        "queue": {
            "count": 15_000, "a_second": 5000.0, "submit_micros": 90.0, "kib": 6.0, "left": 7500, "leave_ms": 300.0,
            "leave_micros": 30.0, "expired": 7500, "late": none, "expire_micros": 40.0,
        },
        "throughput": [[1, 190.0], [8, 1500.0]], "network": [],
        "features": [costs("plain", 1), costs("keys", 1.1), costs("played", 3)],
        "right": 12, "bytes": 4_000_000, "absent": ["Network: no network namespaces"], "faults": [],
    } | changes


def source(file):
    """Returns the text of a file of the runner."""
    return (Path(bench_report.__file__).parent.parent / "bench/src" / file).read_text(encoding="utf-8")


def variants(file, enum):
    """Returns the variants of an enum of the runner, as JSON has them."""
    text = source(file).partition(f"pub enum {enum} {{")[2].partition("}")[0]
    names = [line.strip(" ,") for line in text.splitlines() if line.endswith(",")]
    return ["".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_") for name in names]


class Tables(unittest.TestCase):
    def line(self, text, begin):
        lines = [line for line in text.splitlines() if line.startswith(begin)]
        self.assertTrue(lines, f"{begin} is missing in {text}")
        return lines[0]


class Goals(unittest.TestCase):
    def goal(self, name, figures):
        """Returns whether the required and the stretch conditions of a goal hold, and the result of each required one."""
        medians = bench_report.medians_of([turn(system, **{figure: value}) for system, figure, value in figures])
        _, _, *both = next(goal for goal in bench_report.GOALS if goal[0] == name)
        must, stretch = ([holds for _, _, holds in bench_report.judge(conditions, medians)] for conditions in both)
        return bench_report.all_hold(must), bench_report.all_hold(stretch), must

    def test_medians_are_per_system_while_stalls_are_summed(self):
        turns = [turn("direct", alone_p50=1.0, stalls=0.0)]
        turns += [turn("modelrelay", alone_p50=alone, stalls=stalls) for alone, stalls in ((5.0, 0), (9.0, 1), (6.0, 0))]
        medians = bench_report.medians_of([*turns, turn("nginx", alone_p50=None)])
        self.assertEqual(medians["modelrelay"], {"alone_p50": 6.0, "stalls": 1})
        self.assertEqual(medians["direct"]["alone_p50"], 1.0)
        self.assertNotIn("nginx", medians)

    def test_goals_compare_with_their_peers(self):
        peers = [("direct", "alone_p50", 1.0), ("sglang-router", "alone_p50", 2.4), ("vllm-router", "alone_p50", 2.0)]
        for ours, must, stretch in (2.0, True, True), (3.0, True, False), (3.1, False, False):
            with self.subTest(ours=ours):
                results = self.goal("P1", [*peers, ("modelrelay", "alone_p50", ours)])
                self.assertEqual(results[:2], (must, stretch))

    def test_goal_with_unmeasured_figures_is_unknown(self):
        direct = ("direct", "alone_p50", 1.0)
        self.assertEqual(self.goal("P1", [direct, ("modelrelay", "alone_p50", 2.0)]), (None, None, [True, None]))
        # One that is broken is enough.
        self.assertEqual(self.goal("P1", [direct, ("modelrelay", "alone_p50", 9.0)]), (False, None, [False, None]))

    def test_single_stall_breaks_fourth_goal(self):
        figures = [
            ("direct", "first_event_p50", 1.0), ("direct", "first_event_p99", 2.0),
            ("modelrelay", "first_event_p50", 1.5), ("modelrelay", "first_event_p99", 3.0),
        ]
        self.assertTrue(self.goal("P4", [*figures, ("modelrelay", "stalls", 0)])[0])
        self.assertFalse(self.goal("P4", [*figures, ("modelrelay", "stalls", 1)])[0])

    def test_smallest_step_decides_about_workers(self):
        rates = [("modelrelay", f"workers{count}", rate) for count, rate in ((1, 100.0), (2, 200.0), (4, 190.0), (8, 400.0))]
        self.assertEqual(self.goal("P10", rates)[2], [None, None, None, False])

    def test_rate_of_zero_breaks_goal_of_workers(self):
        for few, more in ((0.0, 0.0), (100.0, 0.0)):
            rates = [("modelrelay", f"workers{count}", rate) for count, rate in ((1, few), (2, more), (4, 9.0), (8, 18.0))]
            with self.subTest(few=few, more=more):
                self.assertEqual(self.goal("P10", rates)[2], [None, None, None, False])

    def test_every_goal_is_known_after_complete_run(self):
        figures = dict.fromkeys(variants("figures.rs", "Figure"), 2.0)
        peers = ("direct", "nginx", "vllm-router", "sglang-router", "rathole", "modelrelay")
        medians = bench_report.medians_of([turn(system, **figures) for system in peers])
        self.assertEqual([goal[0] for goal in bench_report.GOALS], [f"P{number}" for number in range(1, 14)])
        for name, _, *both in bench_report.GOALS:
            for text, value, _ in (result for conditions in both for result in bench_report.judge(conditions, medians)):
                self.assertIsNotNone(value, f"{name}: {text}")
        self.assertEqual(len(bench_report.modelrelay_alone(figures).splitlines()), 2 + 29 + 1)

    def test_peer_without_rate_is_infinitely_slow(self):
        for ours, holds in (5.0, True), (0.0, False):
            with self.subTest(ours=ours):
                figures = [("vllm-router", "requests", 0.0), ("modelrelay", "requests", ours)]
                self.assertEqual(self.goal("P2", figures)[0], holds)


class Speed(Tables):
    def setUp(self):
        self.text = bench_report.speed(speed_report())["speed"]

    def test_every_system_has_row_with_measured_cells(self):
        # Columns without a value are left out.
        self.assertEqual(
            self.line(self.text, "|  |"), "|  | one at a time, p50 ms | CPU µs/req | first token p50 ms |")
        self.assertEqual(self.line(self.text, "| direct"), "| direct (the backend itself) | 0.100 | (7.0) | – |")
        ours = "| **modelrelay** (relay and worker) 0.1.0 | 0.200 | 7.0 | 1.50 |"
        self.assertEqual(self.line(self.text, "| **modelrelay**"), ours)
        self.assertIn("\n| until the relay listens | 12 ms |\n", self.text)
        begin = "A CPU, 2 cores, Linux 6.1, 2026-01-01; load before the run 0.5. Medians of 1 rounds. 20 responses were compared"
        self.assertTrue(self.text.startswith(begin), self.text)

    def test_system_without_row_is_listed_with_reason(self):
        reason = "- nginx, 1 worker, proxy_buffering off was not measured: not installed: nginx is not in PATH\n"
        self.assertIn(reason, self.text)
        self.assertIn("- **modelrelay** (relay and worker), round 1: Memory: it did not fit\n\n", self.text)

    def test_goals_show_their_verdicts(self):
        first = self.line(self.text, "| P1 |")
        self.assertIn("| not measured<br>median, × direct, at most 3.5: 2.00<br>", first)
        self.assertIn("median, × sglang-router, at most 1.25: –", first)
        self.assertIn("12.30", self.line(self.text, "| P12 |"))
        figures = {"modelrelay": {"idle_worker_kib": 130.0}}
        cell = bench_report.conditions_cell(bench_report.GOALS[7][3], figures)
        self.assertEqual(cell, "**does not hold**<br>memory, at most 12 KiB: **130**")


class Scale(Tables):
    def test_every_part_has_table_and_gaps_are_noted(self):
        text = bench_scale.scale(scale_report())["scale"]
        for line in (
            "| 10,000 idle workers | |",
            "| all workers are attached again after | 4.0 s |",
            "| 5,000 streams at once | direct | modelrelay |",
            "| 99 of 100 after, ms | 3.50 | 3.50 |",
            "| memory of a stream, relay + worker, KiB | – | 12.0 + 9.0 |",
            "| 15,000 waiting requests | |",
            "| 8 | 1,500 |",
            "- Network: no network namespaces",
        ):
            self.assertIn(line, text.splitlines())
        self.assertIn(". In 200 s. A program may have 20,000 files open. 12 responses were compared", text)
        self.assertIn("any number of files", bench_scale.scale(scale_report(open_files=2**64 - 1))["scale"])

    def test_feature_is_compared_with_its_baseline(self):
        text = bench_scale.features(scale_report()["features"])
        self.assertTrue(self.line(text, "| **plain**").endswith("| 50.0 | 30.0 | 10.0 | 5.0 | 0.200 |"))
        keys = "| 55.0 (+10 %) | 33.0 (+10 %) | 11.0 (+10 %) | 5.5 (+10 %) | 0.220 (+10 %) |"
        self.assertTrue(self.line(text, "| API keys").endswith(keys))
        self.assertTrue(self.line(text, "| **a worker played").endswith("| – | 90.0 | – | 15.0 | 0.600 |"))
        self.assertNotIn("apart", text)  # one round says nothing of noise

    def test_runner_and_tables_have_same_features(self):
        self.assertEqual(variants("scale/features.rs", "Feature"), list(bench_scale.FEATURE_ROWS))
        self.assertIn("const PACE: Duration = Duration::from_millis(500);", source("scale/streams.rs"))

    def test_features_show_median_and_spread_of_rounds(self):
        text = bench_scale.features([costs("plain", times) for times in (1, 3, 1.2)])
        self.assertIn("| 60.0 | 36.0 | 12.0 | 6.0 | 0.240 |", text)
        self.assertIn("lie 200 % apart", text)

    def test_capacity_follows_from_costs(self):
        loaded = {"streams": 1000, "tokens_a_second": 20_000.0, "relay_cores": 0.24}
        both = [costs("plain", 1), costs("two_relays", 1.4)]
        text = bench_scale.capacity(scale_report(features=both, loaded=loaded))
        for line in (
            # 0.7 s ÷ 30 µs, ÷ 10 µs, ÷ 20 a second; × 12 KiB.
            "| 1 core | 23,333 | 70,000 | 3,500 | 0.04 GiB | processor time of tokens |",
            "| 16 cores | 373,333 | 1,120,000 | 56,000 | 0.64 GiB | processor time of tokens |",
            # 4 × 0.7 s ÷ 10 µs ÷ 20; 10,000 ÷ 15 s × 60 µs.
            "| 1 | 14,000 | 10,000 | 0.08 GiB | 0.04 cores |",
            "| 2 | 20,000 | 20,000 | 0.15 GiB | 0.08 cores |",
        ):
            self.assertIn(line, text.splitlines())
        self.assertIn("took 0.24 cores of the relay, where the cost of a token above gives 0.20 (+20 %)", text)
        self.assertEqual(bench_scale.capacity(scale_report(features=[])), bench_scale.NOT_MEASURED)

    def test_million_workers_need_forty_relays(self):
        text = bench_scale.cluster(scale_report())
        for begin, result in (
            ("relays | 1,000,000 workers ÷ 50,000 a cell × 2 relays", "40"),
            ("a relay's links to workers", "50,000"),
            # 50,000 × 8 KiB, and 50,000 ÷ 15 × 60 µs.
            ("its memory for them", "0.38 GiB"),
            ("its heartbeats | ÷ 15 s", "3,333 a second, 20 % of a core"),
            ("heartbeats of all relays", "133,333 a second"),
            # 50,000 × 200 µs; 10,000 came back in 4 s.
            ("handshakes after its restart", "10 s of a core"),
            ("until all of them are back", "20 s"),
            ("streams of a relay", "12,500"),
            ("its tokens", "250,000 a second, 2.5 cores"),
            ("waiting requests of a relay | 1,500,000 ÷ 40 relays", "37,500"),
        ):
            self.assertTrue(self.line(text, f"| {begin}").endswith(f" | {result} |"), text)

    def test_unmeasured_figures_are_left_out_of_arithmetic(self):
        self.assertEqual(bench_scale.cluster(scale_report(workers=None)), bench_scale.NOT_MEASURED)
        self.assertEqual(len(bench_scale.cluster(scale_report(queue=None, streams=[])).splitlines()), 2 + 7)


class Pages(unittest.TestCase):
    def test_new_table_replaces_previous_one(self):
        page = "a\n<!-- t: begin -->\nold\n<!-- t: end -->\nb\n"
        written = bench_report.put(page, "t", "new\n")
        self.assertEqual(written, "a\n<!-- t: begin -->\nnew\n<!-- t: end -->\nb\n")
        self.assertEqual(bench_report.put(written, "t", "new\n"), written)
        self.assertRaises(ValueError, bench_report.put, page, "other", "")

    def test_report_is_printed_and_written_into_page(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            report, page = Path(folder) / "report.json", Path(folder) / "page.md"
            report.write_text(json.dumps(scale_report()))
            names = ("scale", "features", "capacity", "cluster")
            page.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in names))
            bench_report.main(report, page)
            written = page.read_text(encoding="utf-8")
        self.assertIn("| 10,000 idle workers | |", printed.getvalue())
        self.assertTrue(written.endswith("| its memory for them | × 6.0 KiB | 0.21 GiB |\n<!-- cluster: end -->\n"), written)


if __name__ == "__main__":
    unittest.main()
