"""The tables of docs/reference/ that are made from the programs and their source.

    reference.py write     writes them between their marks, <!-- generated: NAME --> and <!-- /generated -->
    reference.py check     fails where a committed table differs, and where a real scrape has a metric that no table lists

The text around the marks is written by hand.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from pages import DOCS, ROOT
from scrape import scraped

PROGRAMS = Path(os.environ.get("MODELRELAY_BIN_DIR", ROOT / "target/debug")).resolve()
PLACES = {
    "settings.md": ["settings up", "settings relay", "settings worker", "settings demo", "settings operator"],
    "errors.md": ["errors"],
    "routes.md": ["routes inference", "routes relay", "routes admin", "routes worker"],
    "metrics.md": ["metrics relay", "metrics worker", "metrics operator"],
    "protocol.md": ["messages relay_to_worker", "messages worker_to_relay", "limits"],
}
METRIC_SOURCES = {
    "relay": ("modelrelay_", ["relay/src/telemetry/metrics/families.rs", "relay/src/telemetry/metrics/keys.rs", "relay/src/telemetry/metrics/state.rs", "relay/src/telemetry/metrics/zones.rs", "relay/src/telemetry/metrics/process.rs"]),
    "worker": ("modelrelay_worker_", ["worker-sidecar/src/metrics.rs", "worker-sidecar/multiplexer/src/metrics.rs"]),
    "operator": ("modelrelay_operator_", ["operator/src/telemetry/metrics.rs"]),
}


def source(path):
    """Returns a Rust file without its tests."""
    return (ROOT / path).read_text().split("#[cfg(test)]")[0]


def table(head, rows):
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [head, *cells]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def code(text):
    return f"`{text}`" if text else ""


# ---- settings ----


def settings(program):
    """Returns the options of a program, as its --help lists them."""
    command = {"demo": ["modelrelay-worker", "demo"], "up": ["modelrelay", "up"]}.get(program, [f"modelrelay-{program}"])
    environment = {"PATH": os.environ["PATH"]}
    output = subprocess.run([PROGRAMS / command[0], *command[1:], "--help"], env=environment, capture_output=True, text=True, check=True)
    options = []
    for line in output.stdout.partition("\nOptions:\n")[2].split("\n"):
        if line.strip().startswith("-"):
            options.append(line.strip())
        elif line.strip() and options:
            options[-1] += " " + line.strip()
    rows = [setting(re.sub(r"^-\w, ", "", option)) for option in options]
    return table(["flag", "variable", "default", "meaning"], [row for row in rows if row[0] not in ("`--help`", "`--version`")])


def setting(option):
    flag, _, rest = option.partition(" ")
    rest = re.sub(r"^\s*\[?<[^>]*>\]?", "", rest)
    notes = {}
    for name in ("env", "default", "possible values"):
        if found := re.search(rf"\[{name}: ((?:\[[^\]]*\]|[^\]])*)\]", rest):
            notes[name] = " ".join(found[1].split())
            rest = rest.replace(found[0], "")
    default = notes.get("default", "")
    in_words = " " in default or default == "none"
    meaning = " ".join(rest.split()).rstrip(".")
    return [code(re.sub(r"\[?=?$", "", flag)), code(notes.get("env", "").partition("=")[0]), default if in_words else code(default), meaning]


# ---- errors ----


def errors():
    text = source("protocol/src/error.rs")
    kinds = text.partition("pub enum ErrorKind")[2].partition("\n}")[0]
    meanings = {name: meaning for meaning, name in re.findall(r"/// ([^\n]*)\n    (\w+)(?:\(String\))?,", kinds)}
    rows = re.findall(r'Self::(\w+)(?:\(_\))? => row\((\d+), "(\w+)", "(\w+)", "(\w+)"\)(.*?),\n', text)
    assert len(rows) == len(meanings), "every kind of error has one row"
    listed = []
    for kind, status, openai, name, anthropic, rest in rows:
        retries = {"false": "no", "true": "yes"}.get((re.search(r"retry\((\w+)\)", rest) or [None, None])[1])
        if "after(" in rest:
            retries = "after `Retry-After`"
        listed.append([code(name), status, code(openai), code(anthropic), retries or ("yes" if int(status) >= 500 else "no"), meanings[kind]])
    return table(["code", "status", "OpenAI `type`", "Anthropic `type`", "do SDKs retry", "what happened"], sorted(listed, key=lambda row: (row[1], row[0])))


# ---- routes ----


def routes(which):
    if which == "inference":
        found = re.findall(r'\("(/[^"]+)", Endpoint::(\w+)\)', source("protocol/src/paths.rs"))
        kinds = dict(re.findall(r'Self::(\w+) => "(\w+)"', source("protocol/src/paths.rs")))
        rows = [["POST", code(path), code(kinds[endpoint])] for path, endpoint in found]
        rows += [["GET", code("/v1/responses/{id}"), code("responses")], ["POST", code("/v1/responses/{id}/cancel"), code("responses")]]
        return table(["method", "path", "`endpoint` in metrics"], rows)
    text, prefix = {"relay": relay_routes, "admin": admin_routes, "worker": lambda: (source("worker-sidecar/src/probe.rs"), "")}[which]()
    rows = []
    for path, handlers in re.findall(r'\.route\("([^"]+)", (.+?)\)(?=\s|;)', text):
        methods = re.findall(r"\b(get|post|patch|delete)\(", handlers)
        place = path if path == "/metrics" else prefix + path
        if not place.startswith("/v1/responses"):
            rows.append([" ".join(method.upper() for method in methods), code(place)])
    return table(["methods", "path"], rows)


def relay_routes():
    # The pages' test boxes have some of the same routes on another listener.
    return source("relay/src/app/router.rs").partition("\nfn test_boxes")[0], ""


def admin_routes():
    pages = source("relay/src/dashboard.rs").partition("pub fn admin_routes")[2].partition("\n}")[0]
    return source("relay/src/admin.rs").replace(".merge(more)", pages), "/admin"


# ---- metrics ----


# Where the labels are not next to the name in the source; the scrape checks them.
LABELS = {
    **dict.fromkeys(["modelrelay_zone_requests_total", "modelrelay_zone_workers", "modelrelay_zone_requests_in_flight"], ["provider", "cluster", "zone"]),
    "modelrelay_worker_backend_request_duration_seconds": ["endpoint", "code"],
}


def metrics(program):
    prefix, files = METRIC_SOURCES[program]
    rows = [[code(name), kind, ", ".join(map(code, labels)), help_] for name, (kind, labels, help_) in sorted(families(prefix, files).items())]
    return table(["metric", "type", "labels", "meaning"], rows)


def families(prefix, files):
    """Returns name → type, labels and help: two adjacent literals where a metric is created."""
    found = {}
    for file in files:
        text = source(file)
        pairs = list(re.finditer(r'(\w+)!?\(\s*(?:&?registry,\s*)?(?:(?:name\()?)"([a-z][a-z_]+)"\)?,\s*"([A-Z0-9][^"]+)"', text))
        for pair, following in zip(pairs, [*pairs[1:], None]):
            after = text[pair.end():following.start() if following else len(text)].split("registered(")[0].split("label")[0]
            before = text[max(0, pair.start() - 90):pair.end()]
            labels = re.match(r'[^;]*?&\[((?:"\w+",?\s*)+)\]', after, re.S)
            names = re.findall(r'"(\w+)"', labels[1]) if labels else re.findall(r'^,\s*"(\w+)"', after)
            if re.match(r"[^&;]*\brequest,\s*\)", after):
                names = ["provider", "model", "endpoint"]
            name = pair[2] if pair[2].startswith("process_") else prefix + pair[2]
            is_histogram = "istogram" in before.rpartition(")")[2] + pair[1] or "HistogramOpts" in before[-len(pair[0]) - 40:]
            kind = "histogram" if is_histogram else "counter" if pair[2].endswith("_total") else "gauge"
            found[name] = (kind, LABELS.get(name, names), pair[3])
    return found


def scrape_problems():
    """Yields families of a real scrape that are missing in the tables, or differ there."""
    listed = {name: entry for program, (prefix, files) in METRIC_SOURCES.items() for name, entry in families(prefix, files).items()}
    seen = scraped(PROGRAMS)
    for name, (kind, labels, help_) in seen.items():
        if name not in listed:
            yield f"docs/reference/metrics.md lacks {name}, which a scrape has"
            continue
        expected_kind, expected_labels, expected_help = listed[name]
        if (kind, help_) != (expected_kind, expected_help):
            yield f"{name}: a scrape says {kind}, {help_}; the table {expected_kind}, {expected_help}"
        if labels is not None and sorted(labels) != sorted(expected_labels):
            yield f"{name}: a scrape has the labels {labels}, the table {expected_labels}"
    if len(seen) < 40:
        yield f"a scrape has only {len(seen)} families"


# ---- the worker socket ----


def messages(direction):
    text = source(f"protocol/src/message/{direction}.rs")
    common = text + source("protocol/src/message.rs")
    enum = re.search(r"pub enum (?:RelayToWorker|WorkerToRelay) \{(.*?)\n\}", text, re.S)[1]
    parts = []
    for doc, name, struct in re.findall(r"/// ([^\n]*)\n    (\w+)\((\w+)\)", enum):
        kind = re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
        body = re.search(rf"pub struct {struct} \{{(.*?)\n\}}", common, re.S)[1]
        fields = re.findall(r"((?:    ///[^\n]*\n)+)((?:    #\[[^\n]*\n)*)    pub (\w+): ([^\n]+),", body)
        rows = [[code(field), plain_type(type_), "" if "default" in attributes else "yes",
                 one_line(docs)]
                for docs, attributes, field, type_ in fields]
        parts.append(f"#### {code(kind)}\n\n{doc}\n\n{table(['field', 'type', 'required', 'meaning'], rows)}")
    return "\n\n".join(parts)


def plain_type(rust):
    rust = re.sub(r"^Option<(.*)>$", r"\1", rust)
    rust = re.sub(r"^Box<(.*)>$", r"\1", rust)
    if found := re.match(r"Vec<(.*)>$", rust):
        return f"list of {plain_type(found[1])}"
    if rust.startswith("BTreeMap"):
        return "map of texts"
    if rust == "(String, String)":
        return "[name, value]"
    if rust == "(ConversationKey, u64)":
        return "[key, number]"
    if rust in ("ConversationKey", "RequestClass"):
        return "text"
    if rust == "Location":
        return "object of texts: zone, cluster"
    return {"String": "text", "bool": "true or false", "u16": "number", "u32": "number", "u64": "number", "DetailsByModel": "map of objects"}.get(rust, rust)


def limits():
    rows = re.findall(r"((?:///[^\n]*\n)+)pub const (\w+): \w+ = ([^;]+);", source("protocol/src/limits.rs"))
    return table(["bound", "value", "meaning"], [[code(name), plain_value(value), one_line(docs)] for docs, name, value in rows])


def plain_value(rust):
    if found := re.match(r"(\d+) << (\d+)$", rust):
        return f"{found[1]} {({'10': 'KiB', '20': 'MiB', '30': 'GiB'})[found[2]]}"
    if found := re.match(r"Duration::from_(secs|millis)\((\d+)\)$", rust):
        return f"{found[2]} {({'secs': 's', 'millis': 'ms'})[found[1]]}"
    return f"{int(rust.replace('_', '')):,}"


def one_line(docs):
    words = " ".join(line.strip().removeprefix("///").strip() for line in docs.strip().split("\n"))
    return words.replace("[`", "`").replace("`]", "`")


# ---- pages ----


def made(mark):
    name, _, argument = mark.partition(" ")
    maker = {"settings": settings, "errors": errors, "routes": routes, "metrics": metrics, "messages": messages, "limits": limits}[name]
    return maker(argument) if argument else maker()


def with_tables(page, marks):
    text = page.read_text()
    for mark in marks:
        begin, end = f"<!-- generated: {mark} -->\n", "<!-- /generated -->"
        head, found, rest = text.partition(begin)
        assert found, f"{page} has no {begin.strip()}"
        text = head + begin + made(mark) + "\n" + end + rest.partition(end)[2]
    return text


def main(verb):
    behind = []
    for name, marks in PLACES.items():
        page = DOCS / "reference" / name
        text = with_tables(page, marks)
        if text != page.read_text():
            behind.append(f"docs/reference/{name} is behind the programs: run scripts/docs generate")
            if verb == "write":
                page.write_text(text)
    if verb == "write":
        return 0
    problems = behind + list(scrape_problems())
    print("\n".join(problems) or "docs: the generated tables match the programs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
