"""Renders the tables of docs/scale.md: measurements, and what follows from them for larger machines and fleets."""

import math
import statistics

from bench_tables import NOTHING, NOT_MEASURED, items, machine, percent, quotient, row

WORKERS = """\
| {count:,} idle workers | |
|---|---:|
| the relay's memory for one | {kib:.1f} KiB |
| its processor time for one | {cpu_percent:.5f} % of a core |
| its processor time for one heartbeat | {heartbeat_micros:.0f} µs |
| and for a handshake with registration | {handshake_micros:.0f} µs |
| its metrics with all of them: size, processor time | {scrape_kib:.0f} KiB, {scrape_cpu_ms:.1f} ms |
| the relay is killed; another listens on its port after | {away_ms:.0f} ms |
| all workers are attached again after | {back_seconds:.1f} s |
| one of them, half and 99 of 100 of them after | {back[p50_ms]:.0f} ms, {back[p99_ms]:.0f} ms |
| dials that failed meanwhile | {failed_dials:,} |
| the new relay's processor time for each that returned | {return_micros:.0f} µs |
| its memory for one | {return_kib:.1f} KiB |

"""

# 500 ms: the pace of bench/src/scale/streams.rs.
STREAMS = """\
| {ours[count]:,} streams at once | direct | modelrelay |
|---|---:|---:|
| first token, half of them after, ms | {direct[first_event][p50_ms]:.2f} | {ours[first_event][p50_ms]:.2f} |
| 99 of 100 after, ms | {direct[first_event][p99_ms]:.2f} | {ours[first_event][p99_ms]:.2f} |
| between two tokens, 99 of 100, ms (500 ms apart) | {direct[gaps][p99_ms]:.1f} | {ours[gaps][p99_ms]:.1f} |
| tokens, each compared | {direct[events]} | {ours[events]} |
| memory of a stream, relay + worker, KiB | – | {ours[relay_kib]:.1f} + {ours[worker_kib]:.1f} |
| processor time of a token, relay + worker, µs | – | {ours[relay_micros]:.1f} + {ours[worker_micros]:.1f} |

"""

QUEUE = """\
| {count:,} waiting requests | |
|---|---:|
| arrived per second | {a_second:,.0f} |
| the relay's processor time for one, with its connection | {submit_micros:.0f} µs |
| its memory for one, with its connection | {kib:.1f} KiB |
| clients that disconnected at once | {left:,} |
| their requests had left the queue after | {leave_ms:.0f} ms |
| the relay's processor time for one disconnect | {leave_micros:.0f} µs |
| timed out | {expired:,} |
| late, half and 99 of 100 of them by | {late[p50_ms]:.0f} ms, {late[p99_ms]:.0f} ms |
| the relay's processor time for one of these | {expire_micros:.0f} µs |

"""

THROUGHPUT = "| workers, 4 requests of 20 ms at once each | responses per second |\n|---:|---:|\n"

NETWORK = """\
| client, relay and worker in networks of their own | one at a time, p50 ms | first token p50 ms | p99 ms \
| after 35–50 ms |
|---|---:|---:|---:|---:|
"""

WAY = "| {way} | {alone_p50_ms:.3f} | {first_p50_ms:.2f} | {first_p99_ms:.2f} | {stalls} of {first_events} |\n"

FEATURES = """\
| | CPU µs/request | of that the relay | CPU µs/token, paced | of that the relay | one at a time, p50 ms |
|---|---:|---:|---:|---:|---:|
"""

# The rows of that table: the feature that each is compared with, and its name.
FEATURE_ROWS = {
    "plain": (None, "**plain**: one relay, one worker, none of these"),
    "keys": ("plain", "API keys required"),
    "scraped": ("plain", "metrics of both read every second"),
    "multiplexer": ("plain", "a worker with a multiplexer, driver `static`, one model"),
    "two_relays": ("plain", "two relays, half of the clients each"),
    "played": (None, "**a worker played by the benchmark**, current protocol"),
    "text": ("played", "the same with the earlier protocol, text only"),
}
# The cells of each row: figure, digits behind the point.
COSTS = {"request_micros": 1, "relay_request_micros": 1, "chunk_micros": 1, "relay_chunk_micros": 1, "alone_p50_ms": 3}

NOISE = """
The rounds of the first row lie {:.0f} % apart, and {:.0f} % for tokens: smaller differences are not significant.
"""

# The measurements multiplied by a hundred: the number of relays that a million workers need, and the load of each.
#
# A worker links to every relay behind the name that it dials, so more relays behind one name do not reduce the workers
# of any relay. Only another name does. Relays and workers with one name are a *cell*: two relays, as one may restart.
TIMES = 100
RELAYS_A_CELL = 2
# The connections of one relay's listener for workers before `MAX_CONNECTIONS` (65,536) has to be raised, with room to
# grow.
WORKERS_A_CELL = 50_000
# Seconds between two heartbeats, the default of `HEARTBEAT_INTERVAL`.
HEARTBEAT = 15
# The reading speed of people, and a little more.
TOKENS_A_SECOND = 20

# The tables of capacity: cores of a relay, and the part of them that it uses on average, with the rest for peaks; numbers of relays, and
# the cores of each; the default of `MAX_CONNECTIONS`.
CORES = (1, 4, 16)
USED = 0.7
RELAYS = (1, 2, 4, 8)
CORES_OF_EACH = 4
CONNECTIONS = 65_536


def scale(report):
    """Returns the texts of docs/scale.md, by the names of their marks."""
    brief = ", a brief run with imprecise figures" if report["quick"] else ""
    files = "any number of" if report["open_files"] == 2**64 - 1 else f"{report['open_files']:,}"
    text = f"{machine(report)}. In {report['seconds']:.0f} s{brief}. A program may have {files} files open. "
    text += f"{report['right']:,} responses were compared with the backend's output, "
    text += f"{report['bytes'] / 1e6:.1f} MB.\n\n"
    text += items([f"**{fault}**" for fault in report["faults"]]) + items(report["absent"])
    text += WORKERS.format(**report["workers"]) if report["workers"] else ""
    direct, relayed = ways(report)
    text += STREAMS.format(direct=direct, ours=relayed) if direct and relayed else ""
    text += QUEUE.format(**report["queue"]) if report["queue"] else ""
    if report["throughput"]:
        text += THROUGHPUT + "".join(row(str(count), f"{rate:,.0f}") for count, rate in report["throughput"]) + "\n"
    if report["network"]:
        names = {True: "modelrelay", False: "direct"}
        text += NETWORK + "".join(WAY.format(way=names[way["is_relayed"]], **way) for way in report["network"]) + "\n"
    return {
        "scale": text, "features": features(report["features"]), "capacity": capacity(report), "cluster": cluster(report),
    }


def capacity(report):
    """What relays carry: the costs of one request, token, stream and worker, divided into the processors of a relay."""
    streams, workers = ways(report)[1], report["workers"]
    of = {feature: medians_of_feature(report["features"], feature) for feature in ("plain", "two_relays")}
    if not (streams and workers and of["plain"]):
        return NOT_MEASURED
    request, token, kib = of["plain"]["relay_request_micros"], streams["relay_micros"], streams["relay_kib"]
    text = row("a relay with", "short responses per second", "tokens per second", "streams of readers", "memory for them", "first limit")
    text += row("---", *["---:"] * 4, "---")
    for cores in CORES:
        micros = cores * USED * 1e6
        readers = min(micros / token / TOKENS_A_SECOND, CONNECTIONS)
        limit = "`MAX_CONNECTIONS`" if readers == CONNECTIONS else "processor time of tokens"
        text += row(
            plural(cores, "core"), f"{micros / request:,.0f}", f"{micros / token:,.0f}", f"{readers:,.0f}", gib(readers, kib),
            limit)
    # A worker that serves several relays sends each of them fewer tokens at once.
    several = quotient(of["two_relays"]["relay_chunk_micros"], of["plain"]["relay_chunk_micros"]) if of["two_relays"] else 1
    text += "\n" + row(f"relays of {CORES_OF_EACH} cores", "streams of readers", "links to 10,000 workers", "memory for these", "their heartbeats")
    text += row("---:", *["---:"] * 4)
    for relays in RELAYS:
        links, cost = relays * 10_000, token * (several if relays > 1 else 1)
        readers = relays * CORES_OF_EACH * USED * 1e6 / cost / TOKENS_A_SECOND
        beats = links / HEARTBEAT * workers["heartbeat_micros"] / 1e6
        text += row(str(relays), f"{readers:,.0f}", f"{links:,}", gib(links, workers["kib"]), f"{beats:.2f} cores")
    if loaded := report.get("loaded"):
        expected = loaded["tokens_a_second"] * token / 1e6
        text += f"""
Checked with {loaded["streams"]:,} streams of readers over networks of their own: {loaded["tokens_a_second"]:,.0f} tokens a second took \
{loaded["relay_cores"]:.2f} cores of the relay, where the cost of a token above gives {expected:.2f} \
({percent(loaded["relay_cores"], expected):+.0f} %).
"""
    return text


def plural(number, thing):
    """A number of things."""
    return f"{number} {thing}{'s' * (number != 1)}"


def medians_of_feature(rounds, feature):
    """The medians of a feature's rounds; empty if it was not measured."""
    measured = [costs for costs in rounds if costs["feature"] == feature]
    return {figure: statistics.median(costs[figure] for costs in measured) for figure in COSTS} if measured else {}


def ways(report):
    """The streams without and with relay and worker; None if they were not measured."""
    found = {way["is_relayed"]: way for way in report["streams"]}
    return found.get(False), found.get(True)


def features(rounds):
    """The table of features, with the median of each feature's rounds."""
    medians = {}
    for feature in FEATURE_ROWS:
        if measured := medians_of_feature(rounds, feature):
            medians[feature] = measured
    if not medians:
        return NOT_MEASURED
    text = FEATURES
    for feature, costs in medians.items():
        base, name = FEATURE_ROWS[feature]
        cells = [cost_cell(figure, costs, medians.get(base)) for figure in COSTS]
        if feature in ("played", "text"):
            cells[0] = cells[2] = NOTHING  # the usage of a played worker belongs to the benchmark
        text += row(name, *cells)
    plain = [costs for costs in rounds if costs["feature"] == "plain"]
    return text + NOISE.format(spread(plain, "request_micros"), spread(plain, "chunk_micros")) if plain[1:] else text


def cost_cell(figure, costs, base):
    """A figure of a feature, and its difference from the feature that it is compared with."""
    text = f"{costs[figure]:.{COSTS[figure]}f}"
    return f"{text} ({percent(costs[figure], base[figure]):+.0f} %)" if base else text


def spread(rounds, figure):
    """The difference between rounds, in percent of the least."""
    values = [costs[figure] for costs in rounds]
    return percent(max(values), min(values))


def cluster(report):
    """The table of a cluster a hundred times as large as what was measured."""
    measured = report["workers"]
    if not measured:
        return NOT_MEASURED
    workers = measured["count"] * TIMES
    cell = min(WORKERS_A_CELL, workers)
    relays = math.ceil(workers / cell) * RELAYS_A_CELL
    beats, beat, handshake = cell / HEARTBEAT, measured["heartbeat_micros"], measured["return_micros"]
    pace = measured["count"] / measured["back_seconds"]
    text = f"""\
| | from | |
|---|---|---:|
| relays | {workers:,} workers ÷ {cell:,} a cell × {RELAYS_A_CELL} relays | {relays:,} |
| a relay's links to workers | each worker of its cell | {cell:,} |
| its memory for them | {memory(cell, measured["kib"])} |
| its heartbeats | ÷ {HEARTBEAT} s; × {beat:.0f} µs of processor time \
| {beats:,.0f} a second, {beats * beat / 1e4:.0f} % of a core |
| heartbeats of all relays | × {relays:,} | {beats * relays:,.0f} a second |
| handshakes after its restart | × {handshake:.0f} µs of processor time | {cell * handshake / 1e6:.0f} s of a core |
| until all of them are back | as fast as here, {pace:,.0f} a second | {cell / pace:.0f} s |
"""
    if streams := ways(report)[1]:
        all_, micros = streams["count"] * TIMES, streams["relay_micros"]
        tokens = all_ / relays * TOKENS_A_SECOND
        text += f"""\
| streams of a relay | {all_:,} ÷ {relays:,} relays | {all_ / relays:,.0f} |
| its memory for them | {memory(all_ / relays, streams["relay_kib"])} |
| its tokens | × {TOKENS_A_SECOND} a second; × {micros:.1f} µs of processor time \
| {tokens:,.0f} a second, {tokens * micros / 1e6:.1f} cores |
"""
    if queue := report["queue"]:
        all_ = queue["count"] * TIMES
        text += f"""\
| waiting requests of a relay | {all_:,} ÷ {relays:,} relays | {all_ / relays:,.0f} |
| its memory for them | {memory(all_ / relays, queue["kib"])} |
"""
    return text


def memory(count, kib):
    """Two cells: the memory of each of a number of things, and of all."""
    return f"× {kib:.1f} KiB | {gib(count, kib)}"


def gib(count, kib):
    """The memory of a number of things."""
    return f"{count * kib / 1024**2:.2f} GiB"
