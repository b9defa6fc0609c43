"""Turns the steps that a simulation recorded into traces that Replay.tla reads: one for each start of a worker.

A step of a worker comes with the grants that it queued. A worker that has a multiplexer, or a link without `core1`, is
not described by Grants.tla, and has no trace.
"""

import json
from dataclasses import dataclass, field, replace

# The steps of a worker that concern none of its links, and those of a relay: `ByRelay` of Replay.tla.
OF_ALL_LINKS = ("timeout", "capacity")
OF_RELAYS = ("sends", "cancels", "unsends", "reports", "announces_leaving", "stops", "reads_grant", "reads_end", "reads_refusal",
             "reads_draining", "loses", "opens")
GRANT = ("slots", "others", "capacity", "links")


@dataclass
class Trace:
    """The steps that concern one start of a worker, in their order."""

    name: str
    capacity: int
    steps: list = field(default_factory=list)
    # The numbers of the links, in the order in which the worker opened them.
    links: dict = field(default_factory=dict)
    joined: set = field(default_factory=set)
    ids: dict = field(default_factory=dict)
    last_of_worker: dict = None
    is_described: bool = True
    # Of a trace with a fault: the step that the specification must not allow.
    early: dict = None

    def add(self, link, raw):
        op = raw["op"]
        step = {"op": op, "l": self.links.get(link, 0), "grants": []}
        if "id" in raw:
            step["id"] = self.ids.setdefault(raw["id"], len(self.ids) + 1)
        if "waiting" in raw:
            step["n"] = int(raw["waiting"])
        if op == "capacity":
            step["n"] = int(raw["capacity"])
        if op == "reads_grant":
            step["grant"] = grant_of(raw)
        if op not in OF_RELAYS:
            if self._joins_previous(step):
                return
            self.last_of_worker = step
        self.steps.append(step)

    def _joins_previous(self, step):
        """True if the step is a part of the previous one: a cancel that frees its slot, a request that frees it and fails."""
        previous = self.last_of_worker
        is_same = previous is not None and previous.get("id", 0) == step.get("id") and previous["l"] == step["l"]
        if is_same and step["op"] == "frees" and previous["op"] == "cancel":
            return True
        if is_same and step["op"] == "errs" and previous["op"] == "frees":
            previous["op"] = "ends"
            return True
        # The error of a request that had no slot any more.
        return step["op"] == "errs"


def grant_of(raw):
    return {name: int(raw[name]) for name in GRANT}


def read(seed, lines):
    """Returns the reader of a seed, which has its traces."""
    reader = Reader(seed)
    reader.read([json.loads(line) for line in lines])
    return reader


class Reader:
    def __init__(self, seed):
        self.seed = seed
        self.traces = []
        # By host: the trace of its running worker, and the links of its running relay.
        self.running, self.of_relay = {}, {}
        # By the worker's number of a link, and by the relay's name of it. No two links of a simulation share either.
        self.by_number, self.by_name = {}, {}
        self.ended = set()
        # The number of steps that belong to no trace, such as those of links that a worker never acknowledged.
        self.unmatched = 0

    def read(self, records):
        for raw in records:
            if raw["op"] == "starts":
                self.running[raw["host"]] = Trace(f"seed {self.seed}, {raw['host']}", int(raw["capacity"]))
                self.traces.append(self.running[raw["host"]])
            elif raw["op"] == "acknowledged" and raw["host"] in self.running:
                trace = self.running[raw["host"]]
                trace.links[raw["name"]] = len(trace.links) + 1
                self.by_number[raw["link"]] = self.by_name[raw["name"]] = (trace, raw["name"])
        self.running = {}
        traces = iter(self.traces)
        for raw in records:
            if raw["op"] == "starts":
                self.running[raw["host"]] = next(traces)
            else:
                self._add(raw)

    def described(self):
        """Returns the traces of the starts that Grants.tla describes."""
        return [trace for trace in self.traces if trace.is_described and trace.joined]

    def _add(self, raw):
        op, host = raw["op"], raw["host"]
        if op == "crashes":
            self.running.pop(host, None)
            self.ended |= self.of_relay.pop(host, set())
        elif op in OF_RELAYS:
            self._add_of_relay(op, host, raw)
        elif op in OF_ALL_LINKS:
            if host in self.running:
                self.running[host].add(None, raw)
            else:
                self.unmatched += 1
        elif op != "acknowledged":
            if raw["link"] in self.by_number:
                self._add_of_worker(op, host, raw)
            else:
                self.unmatched += 1

    def _add_of_relay(self, op, host, raw):
        if op == "opens":
            self.of_relay.setdefault(host, set()).add(raw["link"])
        if raw["link"] in self.by_name and raw["link"] not in self.ended:
            trace, name = self.by_name[raw["link"]]
            trace.add(name, raw)
            if op == "opens":
                trace.steps[-1]["relay"] = host
        else:
            self.unmatched += 1

    def _add_of_worker(self, op, host, raw):
        trace, name = self.by_number[raw["link"]]
        if self.running.get(host) is not trace:
            self.unmatched += 1
            return
        if op == "grants":
            trace.last_of_worker["grants"].append((trace.links[name], grant_of(raw)))
            return
        if op == "joins":
            trace.joined.add(name)
            trace.is_described &= raw["core1"] == "true"
        if name in trace.joined:
            trace.add(name, raw)
        else:
            self.unmatched += 1


def sent_early(trace):
    """Returns the trace with one request sent just before the grant that permits it, or None if it has no such request."""
    slots, inflight, last_grant = {}, {}, {}
    for number, step in enumerate(trace.steps):
        op, link = step["op"], step["l"]
        running = inflight.setdefault(link, set())
        if op == "reads_grant":
            # Without this grant, no further request may be sent. What a refusal takes away only lowers the slots.
            is_needed = len(running) >= slots.get(link, 0)
            slots[link] = step["grant"]["slots"]
            last_grant[link] = number if is_needed else None
        elif op == "sends" and last_grant.get(link) is not None:
            at = last_grant[link]
            steps = [*trace.steps[:at], step, *trace.steps[at:number], *trace.steps[number + 1:]]
            return replace(trace, steps=steps, early=step)
        elif op == "sends":
            running.add(step["id"])
        elif op in OF_RELAYS and link:
            # After another step of this link, the request might have been allowed before the grant.
            last_grant[link] = None
            running.discard(step.get("id"))
    return None


def as_module(traces):
    """Returns the module Traces."""
    links = max(len(trace.links) for trace in traces)
    relays = {step["relay"] for trace in traces for step in trace.steps if "relay" in step}
    body = ",\n".join(
        f"[name |-> {quoted(trace.name)}, capacity |-> {trace.capacity}, steps |-> <<\n" + ",\n".join(map(as_record, trace.steps)) + ">>]"
        for trace in traces)
    return (f"---- MODULE Traces ----\nEXTENDS Naturals\nMaxLink == {links}\nAllRelays == {as_names(relays)}\nOfRelays == {as_names(OF_RELAYS)}\n"
            f"Traces == <<\n{body}>>\n====\n")


def as_names(names):
    return "{" + ", ".join(sorted(map(quoted, names))) + "}"


def as_record(step):
    fields = [f"{name} |-> {as_value(value)}" for name, value in step.items() if name != "grants"]
    grants = ", ".join(f"<<{link}, {as_value(grant)}>>" for link, grant in step["grants"])
    return f"[{', '.join(fields)}, grants |-> {{{grants}}}]"


def as_value(value):
    if isinstance(value, dict):
        return "[" + ", ".join(f"{name} |-> {number}" for name, number in value.items()) + "]"
    return quoted(value) if isinstance(value, str) else str(value)


def quoted(text):
    return f'"{text}"'
