#!/usr/bin/env python3
"""Checks which way the imports of relay, worker, multiplexer and operator point.

    scripts/layers.py           fails on a larger import circle, a duplicate type name, or an import against the layers
    scripts/layers.py explain   also lists each circle and where to cut it

Imports are the paths in `crate::…` and `super::…` outside of tests; each leads to the file of the deepest module that it names.
A circle is a set of files that all reach each other. Imports between a module and its own child modules do not count for it.
"""

import re
import sys
from collections import defaultdict

from rust_source import ROOT, end_of_block, line_of, split, without_tests

# Files in the largest circle. These limits only fall.
LARGEST_CIRCLE = {"relay": 6, "worker-sidecar": 2, "worker-sidecar/multiplexer": 2, "operator": 0}

# Layers from left to right: a file imports from its own group and from layers to the left. Groups of one layer do not import each
# other. A module belongs to the group that names the longest prefix of its path; `crate` is `lib.rs` or `main.rs`.
LAYERS = {
    "relay": [
        {"dispatch data": "dispatch/model"},
        {"dispatch": "dispatch"},
        {"settings, telemetry, net": "settings telemetry net http kubernetes keys system"},
        {"provider": "provider"},
        {"state, login": "state login"},
        {"clients": "clients", "workers": "workers", "admin": "admin", "dashboard": "dashboard", "admin commands": "admin_cli"},
        {"app": "app crate"},
    ],
    "worker-sidecar": [
        {"shutdown": "shutdown"},
        {"settings, telemetry": "settings telemetry"},
        {"backend": "backend"},
        {"metrics": "metrics"},
        {"link": "link"},
        {"serving": "serving"},
        {"worker": "worker forward"},
        {"relays": "relays", "probe": "probe"},
        {"app": "crate app"},
    ],
    "worker-sidecar/multiplexer": [
        {"data": "crate config effect error estimate event memory"},
        {"policy": "policy"},
        {"machine": "machine"},
        {"net": "net setting_error"},
        {"driver": "driver"},
        {"actor, board, metrics": "actor board metrics"},
        {"slots": "slots"},
    ],
    "operator": [
        {"shared": "crd settings telemetry net resources relays context plural"},
        {"spec": "spec"},
        {"manifests": "manifests"},
        {"cluster": "cluster"},
        {"controllers": "controllers", "provider": "controllers/provider", "worker_pool": "controllers/worker_pool",
         "webhook": "webhook", "relay_client": "relay_client"},
        {"app": "crate app"},
    ],
}

PATH = re.compile(r"(?<![\w:])(?:crate|super)\s*::")
SEGMENT = re.compile(r"\s*(\w+|\*)\s*(::)?")
TYPE = re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+)?(?:struct|enum|trait|union)\s+(\w+)|^(?:pub(?:\([^)]*\))?\s+)?type\s+(\w+)", re.M)


def main():
    explain = sys.argv[1:] == ["explain"]
    problems = [problem for crate in LAYERS for problem in check(Crate(crate), explain)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def check(crate, explain):
    """Prints the figures of a crate and yields its problems. With `explain`, prints circles within the limit too."""
    circles, limit = crate.circles(), LARGEST_CIRCLE[crate.name]
    sizes = "circles of " + ", ".join(str(len(circle)) for circle in circles) + " files" if circles else "no circles"
    print(f"layers: {crate.name}: {len(crate.code)} files; {sizes}")
    for circle in circles:
        if explain or len(circle) > limit:
            print(f"{crate.name}: a circle of {len(circle)} files: {' '.join(map(crate.file, sorted(circle)))}")
            for cut in crate.cuts(circle, 1 if explain else limit):
                print(f"  cut {cut}")
    largest = len(circles[0]) if circles else 0
    if largest > limit:
        yield f"{crate.name}: files in the largest circle: {largest}, limit {limit} (see above)"
    elif largest < limit:
        print(f"layers: {crate.name}: files in the largest circle: {largest}, so lower LARGEST_CIRCLE from {limit} to {largest}")
    for line in crate.against_layers():
        yield f"{crate.name}: against the layers: {line}"
    for module in crate.code:
        if crate.layer(module) is None:
            yield f"{crate.name}: {crate.file(module)} has no layer: add it to LAYERS in scripts/layers.py"
    for name, files in crate.duplicates().items():
        yield f"{crate.name}: the type {name} is defined in {' and '.join(files)}: rename one"


def count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Crate:
    """The modules of a crate that have a file of their own, by their path, and the imports between them."""

    def __init__(self, name, root=ROOT):
        self.name, self.source = name, root / name / "src"
        self.code, tests = {}, set()
        for path in sorted(self.source.rglob("*.rs")):
            module = path.relative_to(self.source).with_suffix("").parts
            module = () if module == ("lib",) else module
            whole, _, _ = split(path.read_text(encoding="utf-8"))
            self.code[module] = without_tests(whole)
            tests |= {(*module, child) for child in set(declared(whole)) - set(declared(self.code[module]))}
        self.code = {module: code for module, code in self.code.items() if not any(module[:n + 1] in tests for n in range(len(module)))}
        # For each pair of files, the lines of the imports.
        self.imports = defaultdict(list)
        for module in self.code:
            for line, target in self.targets(module):
                if target != module:
                    self.imports[module, target].append(line)

    def targets(self, module):
        """Yields a line and the imported file's module for each path in a file."""
        code = self.code[module]
        inline = [(start.start(), end_of_block(code, start.start()), start[1]) for start in re.finditer(r"\bmod\s+(\w+)\s*\{", code)]
        for match in PATH.finditer(code):
            here = module + tuple(name for start, end, name in inline if start < match.start() < end)
            for names in path_tree(code, match.start()):
                base = () if names[0] == "crate" else here
                names = names[1:] if names[0] == "crate" else names
                while names[:1] == ["super"]:
                    base, names = base[:-1], names[1:]
                target = (*base, *names)
                while target not in self.code and target:
                    target = target[:-1]
                yield line_of(code, match.start()), target

    def file(self, module):
        return "/".join(module) + ".rs" if module else "lib.rs"

    def place(self, edge):
        return f"{self.file(edge[0])}:{self.imports[edge][0]} → {self.file(edge[1])}"

    def circles(self):
        """Returns the circles, the largest first."""
        return components(self.edges())

    def edges(self):
        """Returns the imports that count for circles: all but those between a module and its own child module."""
        return {(source, target) for source, target in self.imports if source[:-1] != target and target[:-1] != source}

    def cuts(self, circle, limit):
        """Yields imports to remove, the one that helps most first, until no circle is above the limit."""
        edges = {edge for edge in self.edges() if circle.issuperset(edge)}
        while (left := components(edges)) and len(left[0]) > limit:
            def remaining(edge):
                return sum(len(c) ** 2 for c in components(edges - {edge})), len(self.imports[edge]), edge
            best = min((edge for edge in edges if any(set(edge) <= c for c in left)), key=remaining)
            edges.remove(best)
            sizes = "circles of " + ", ".join(str(len(c)) for c in left) if (left := components(edges)) else "no circle"
            yield f"{self.place(best)} ({count(len(self.imports[best]), 'import')}): leaves {sizes}"

    def layer(self, module):
        """Returns a module's layer as a number, with the name of its group."""
        groups = [(prefix, number, name) for number, layer in enumerate(LAYERS[self.name]) for name, text in layer.items() for prefix in text.split()]
        path = "/".join(module) if module not in ((), ("main",)) else "crate"
        _, number, name = max(((prefix, number, name) for prefix, number, name in groups if f"{path}/".startswith(f"{prefix}/")),
                              key=lambda group: len(group[0]), default=(None, None, None))
        return None if number is None else (number, name)

    def against_layers(self):
        """Returns the imports from a layer to its right, or between groups of one layer."""
        layers = {module: self.layer(module) for module in self.code}
        return [f"{self.place(edge)} ({of[1]} → {to[1]})" for edge in self.imports
                if (of := layers[edge[0]]) and (to := layers[edge[1]]) and of != to and of[0] <= to[0]]

    def duplicates(self):
        """Returns the type names that several files define, with the files."""
        files = defaultdict(list)
        for module, code in self.code.items():
            for name in sorted({match[1] or match[2] for match in TYPE.finditer(code)}):
                files[name].append(self.file(module))
        return {name: places for name, places in sorted(files.items()) if len(places) > 1}


def declared(code):
    return re.findall(r"\bmod\s+(\w+)\s*;", code)


def path_tree(code, start):
    """Returns the paths of a `use` tree or expression: `crate::{a::b, c}` is two."""
    paths = []

    def read(position, names):
        while segment := SEGMENT.match(code, position):
            names, position = [*names, segment[1]], segment.end()
            if not segment[2]:
                break
        else:
            if code[position:].lstrip()[:1] == "{":
                position = code.index("{", position) + 1
                while (rest := re.compile(r"\s*").match(code, position).end()) < len(code) and code[rest] != "}":
                    position = read(rest, names)
                    position = re.compile(r"(?:\s*\bas\s+\w+)?\s*,?").match(code, position).end()
                return rest + 1
        paths.append(names)
        return position

    read(start, [])
    return paths


def components(edges):
    """Returns the sets of more than one node that all reach each other, the largest first (Tarjan's algorithm)."""
    after = defaultdict(list)
    for source, target in sorted(edges):
        after[source].append(target)
    number, low, stack, found = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in after.get(node, ()):
            if target not in number:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == number[node]:
            found.append(set(stack[stack.index(node):]))
            del stack[stack.index(node):]

    for node in sorted(after):
        if node not in number:
            visit(node)
    return sorted((circle for circle in found if len(circle) > 1), key=len, reverse=True)


if __name__ == "__main__":
    sys.exit(main())
