"""The tables of clients in README.md, docs/compatibility.md and docs/how-to/clients.md, written from a run's reports or checked.

    table.py versions            checks that the pages name the clients and versions that are pinned here; needs no run
    table.py check REPORT…       also checks that they match the results in these JUnit reports
    table.py --write REPORT…     writes them
"""

import json
import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGES = {"results": ROOT / "docs/compatibility.md", "summary": ROOT / "README.md", "settings": ROOT / "docs/how-to/clients.md"}
YES, UNTRIED = "yes", "–"

# A client, the package that pins its version, the pattern of its tests, and how to point it at a relay.
CLIENTS = [
    ("OpenAI, Python", "openai", r"test_openai\b", "`base_url=\"http://relay:8080/v1\"`"),
    ("OpenAI, Node", "openai (npm)", r"openai\.test", "`baseURL: 'http://relay:8080/v1'`"),
    ("Anthropic, Python", "anthropic", r"test_anthropic\b", "`base_url=\"http://relay:8080\"`"),
    ("Anthropic, Node", "@anthropic-ai/sdk (npm)", r"anthropic\.test", "`baseURL: 'http://relay:8080'`"),
    ("LangChain, `ChatOpenAI`", "langchain-openai", r"test_langchain\b.*\[openai\]", "`base_url=\"http://relay:8080/v1\"`"),
    ("LangChain, `ChatAnthropic`", "langchain-anthropic", r"test_langchain\b.*\[anthropic\]", "`base_url=\"http://relay:8080\"`"),
    ("LiteLLM, library", "litellm", r"test_litellm\b", "`api_base`, as OpenAI with `/v1`, as Anthropic without"),
    ("LiteLLM, proxy", "litellm", r"test_litellm_proxy\b", "the same, in `litellm_params`"),
    ("Pydantic AI", "pydantic-ai-slim", r"test_pydantic_ai\b", "`OpenAIProvider(base_url=\"http://relay:8080/v1\")`"),
    ("OpenAI Agents SDK, Python", "openai-agents", r"test_openai_agents\b", "`AsyncOpenAI(base_url=\"http://relay:8080/v1\")` as the model's `openai_client`"),
    ("AI SDK", "ai (npm)", r"ai-sdk\.test", "`createOpenAICompatible({ baseURL: 'http://relay:8080/v1' })`"),
    ("Claude Code", "@anthropic-ai/claude-code (npm)", r"test_claude_code\b", "`ANTHROPIC_BASE_URL=http://relay:8080`"),
    ("opencode", "opencode-ai (npm)", r"test_opencode\b", "a provider with `\"npm\": \"@ai-sdk/openai-compatible\"` and `\"baseURL\": \"http://relay:8080/v1\"`"),
    ("Qwen Code", "@qwen-code/qwen-code (npm)", r"test_qwen_code\b", "`OPENAI_BASE_URL=http://relay:8080/v1`, `--auth-type openai`"),
    ("aider", "aider-chat", r"test_aider\b", "`OPENAI_API_BASE=http://relay:8080/v1`, `--model openai/MODEL`"),
    ("Open WebUI, its calls", "open-webui", r"test_open_webui\b", "a connection to `http://relay:8080/v1`"),
]

# The features that tests show, by the words in their names; a test that shows none is an error.
FEATURES = {
    "answer": r"is answered",
    "stream": r"stream (ends|carries)|as a stream|and streamed",
    "usage": r"usage",
    "tool calls": r"tool call",
    "errors": r"refusal|wrong key|unknown model",
    "busy": r"full queue|queue timeout|request timeout",
    "worker lost": r"worker killed",
    "cancel": r"^(closing|leaving|ending)\b",
    "models": r"models are listed",
    "embeddings": r"embeddings",
    "llama-server": r"real llama.server",
}
# The features in the README's table.
SUMMARY = ["answer", "stream", "tool calls", "errors", "worker lost", "cancel", "llama-server"]
UNLISTED = r"the SDK is the one that was measured"


def main(command, *reports):
    shown = read(reports) if reports else {}
    behind = []
    for name, page in PAGES.items():
        text = page.read_text()
        committed = section(text, name)
        features = SUMMARY if name == "summary" else list(FEATURES)
        table = settings() if name == "settings" else results(committed, shown, features)
        if table != committed:
            behind.append(page)
            if command == "--write":
                page.write_text(marked(name).sub(lambda found: found[1] + table + found[3], text))
    if behind and command != "--write":
        pages = ", ".join(str(page.relative_to(ROOT)) for page in behind)
        sys.exit(f"clients: {pages} is outdated against the pinned versions or the reports: run `tests/clients/run --write`")


def marked(name):
    return re.compile(rf"(<!-- clients: {name} -->\n)(.*?)(<!-- clients: end -->)", re.DOTALL)


def section(text, name):
    return marked(name).search(text)[2]


def settings():
    lines = ["| client | version | points at a relay by |", "|---|---|---|"]
    lines += [f"| {client} | {version(pinned)} | {setting} |" for client, pinned, _, setting in CLIENTS]
    return "\n".join(lines) + "\n"


def results(committed, shown, features):
    """Returns the table; a cell without a report keeps its value from the page."""
    committed_cells = {cells[0]: cells[2:] for cells in map(cells_of, committed.splitlines())}
    lines = ["| " + " | ".join(["client", "version", *features]) + " |", "|---" * (len(features) + 2) + "|"]
    for client, pinned, _, _ in CLIENTS:
        before = dict(zip(features, committed_cells.get(client, [])))
        cells = [shown.get((client, feature)) or before.get(feature, UNTRIED) for feature in features]
        lines.append("| " + " | ".join([client, version(pinned), *cells]) + " |")
    return "\n".join(lines) + "\n"


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def read(reports):
    """Returns (client, feature) → the result in the reports; nothing where it was skipped."""
    shown = {(client[0], feature): UNTRIED for client in CLIENTS for feature in FEATURES}
    for case in (case for report in reports for case in xml.parse(report).iter("testcase")):
        home = f"{case.get('classname')} {case.get('file', '')} {case.get('name')}"
        words = re.sub(r"\[.*|^test ", "", case.get("name").replace("_", " "))
        features = [feature for feature, pattern in FEATURES.items() if re.search(pattern, words)]
        if not features and not re.fullmatch(UNLISTED, words, re.IGNORECASE):
            sys.exit(f"clients: {home}: its name matches no feature of table.py")
        clients = [client for client, _, pattern, _ in CLIENTS if re.search(pattern, home)]
        if not clients:
            sys.exit(f"clients: {home} is of no client that table.py knows")
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"clients: {home} failed")
        skipped = case.find("skipped") is not None
        for key in ((client, feature) for client in clients for feature in features):
            if not skipped:
                shown[key] = YES
            elif "llama-server" in key and shown[key] != YES:
                shown[key] = None  # missing on this machine: the page's result is from one that had it
    return shown


def version(package):
    name = package.removesuffix(" (npm)")
    if name != package:
        return json.loads((HERE / "node/package-lock.json").read_text())["packages"][f"node_modules/{name}"]["version"]
    if name == "open-webui":  # not installed: the release whose calls are replayed
        return re.search(r'^RELEASE = "(.+)"$', (HERE / "python/test_open_webui.py").read_text(), re.MULTILINE)[1]
    pins = "\n".join(path.read_text() for path in sorted((HERE / "python").glob("requirements*.txt")))
    return re.search(rf"^{re.escape(name)}(?:\[\w+\])?==(.+)$", pins, re.MULTILINE)[1]


main(*sys.argv[1:])
