"""Shared by all suites: a backend that obeys its prompts, and relays and workers that start and die on request.

Standard library only. Prints one JSON line with its address, then serves until its standard input closes:

    POST   /stacks                        {"relay": {ENV}, "workers": [{ENV}, …]} → {"id", "url"}, once every worker is listed
    POST   /stacks/{id}/workers/{n}/kill  SIGKILL
    DELETE /stacks/{id}
    GET    /seen?tag=T&state=S&count=N    waits until the backend saw N requests tagged T in state S → the requests
    POST   /release?tag=T                 releases the held requests tagged T, and those to come
    GET    /llama                         starts a real llama-server, once → {"url"}, null where neither scripts/backends/build nor scripts/backends/wheel ever ran

The backend finds its instructions in the request's prompt: "tag=T do=echo". `echo` responds; `hold` waits for its release,
a stream after two of its words; `refuse` responds with 400 as vLLM does; `call` calls the first tool offered that is among CALLS,
and responds once it has the tool's result. A request is `running`, then `done` or `left` (the other side closed the connection
first).
"""

import glob
import http.client
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = "org/tiny:1b"  # ids contain slashes and colons
WORDS = ["Hello", " from", " the", " backend"]
REFUSAL = {"error": {"message": "This model's maximum context length is 16 tokens.", "type": "BadRequestError",
                     "param": "input_tokens", "code": 400}}
MANGO = {"command": "echo mango", "description": "Say mango"}
# Qwen Code loses the output of a command that ends at the same moment.
LASTING_MANGO = MANGO | {"command": "echo mango; sleep 1", "is_background": False}
CALLS = {"weather": {"city": "Oslo"}, "Bash": MANGO, "bash": MANGO, "run_shell_command": LASTING_MANGO}
PROGRAMS = os.environ.get("MODELRELAY_BIN_DIR") or os.path.join(ROOT, "target", "debug")
PATIENCE = 50  # seconds until anything here is reported as missing to the test


class Seen:
    """The requests that reached the backend, and the waits for them."""

    def __init__(self):
        self.changed = threading.Condition()
        self.requests = []
        self.released = set()
        self.holds = {}  # tag -> sockets; closing one wakes a held request

    def add(self, request):
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def move(self, request, state):
        with self.changed:
            request["state"] = state
            self.changed.notify_all()

    def wait(self, tag, state, count):
        def found():
            return [r for r in self.requests if r["tag"] == tag and state in (None, r["state"])]

        with self.changed:
            self.changed.wait_for(lambda: len(found()) >= count, PATIENCE)
            return found()

    def release(self, tag):
        with self.changed:
            self.released.add(tag)
            for wake in self.holds.pop(tag, []):
                wake.close()

    def hold(self, tag, connection):
        """Waits for the release; returns False if the other side disconnected first."""
        here, wake = socket.socketpair()
        with self.changed:
            if tag in self.released:
                wake.close()
            else:
                self.holds.setdefault(tag, []).append(wake)
        with here:
            ready, _, _ = select.select([here, connection], [], [])
        return connection not in ready


SEEN = Seen()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status, body, content_type="application/json"):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


# --- the backend ------------------------------------------------------------------------------------------------------


class Backend(Handler):
    """Each worker reaches it under a path of its own, /w0, /w1 …, which shows which worker sent a request."""

    def worker_and_path(self):
        worker, path = re.fullmatch(r"/w(\d+)(/.*)", urlsplit(self.path).path).groups()
        return int(worker), path

    def do_GET(self):
        _, path = self.worker_and_path()
        if path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            self.answer(200 if path == "/health" else 404, {})

    def do_POST(self):
        worker, path = self.worker_and_path()
        body = json.loads(self.body())
        # The last match: agents put much text before and after the prompt.
        tag, deed = re.findall(r"tag=([\w-]+) do=(\w+)", json.dumps(body.get("input") or body["messages"]))[-1]
        request = {"tag": tag, "worker": worker, "path": path, "state": "running", "stream": bool(body.get("stream")),
                   "authorization": self.headers.get("authorization"), "x-api-key": self.headers.get("x-api-key"),
                   "headers": [name.lower() for name in self.headers]}
        SEEN.add(request)
        try:
            SEEN.move(request, "done" if self.obey(path, deed, tag, body) else "left")
        except OSError:
            SEEN.move(request, "left")
            self.close_connection = True

    def obey(self, path, deed, tag, body):
        if deed == "refuse":
            self.answer(400, REFUSAL)
            return True
        if path == "/v1/embeddings":
            self.answer(200, embeddings(body))
            return True
        shape = {"/v1/chat/completions": chat, "/v1/messages": messages, "/v1/responses": responses}[path]
        whole, frames, third_word = shape(body, wanted_call(body) if deed == "call" else None)
        if not body.get("stream"):
            if deed == "hold" and not SEEN.hold(tag, self.connection):
                self.close_connection = True
                return False
            self.answer(200, whole)
            return True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for at, frame in enumerate(frames):
            if deed == "hold" and at == third_word and not SEEN.hold(tag, self.connection):
                self.close_connection = True
                return False
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame.encode()), frame.encode()))
        self.wfile.write(b"0\r\n\r\n")
        return True


def data(value):
    return f"data: {json.dumps(value)}\n\n"


def event(value):
    return f"event: {value['type']}\n{data(value)}"


def wanted_call(body):
    """Returns the tool to call; None once the conversation contains a result, or if no such tool is offered (as for titles)."""
    if any(message["role"] == "tool" or '"tool_result"' in json.dumps(message.get("content")) for message in body["messages"]):
        return None
    offered = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", [])]
    return next((name for name in offered if name in CALLS), None)


# For each dialect: the whole response, the frames of its stream, and which of them contains the third word.


def chat(body, call):
    usage = {"prompt_tokens": 5, "completion_tokens": len(WORDS), "total_tokens": 5 + len(WORDS)}
    base = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
    function = call and {"name": call, "arguments": json.dumps(CALLS[call])}
    called = [{"id": "call_1", "type": "function", "function": function}] if call else None
    message = {"role": "assistant", "content": None, "tool_calls": called} if call else {"role": "assistant", "content": "".join(WORDS)}
    reason = "tool_calls" if call else "stop"
    whole = base | {"object": "chat.completion", "usage": usage,
                    "choices": [{"index": 0, "message": message, "finish_reason": reason}]}

    def chunk(delta, reason=None):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return data(base | {"object": "chat.completion.chunk", "choices": [choice]})

    deltas = [{"tool_calls": [called[0] | {"index": 0}]}] if call else [{"content": word} for word in WORDS]
    frames = [chunk(delta) for delta in deltas] + [chunk({}, reason)]
    if (body.get("stream_options") or {}).get("include_usage"):
        frames.append(data(base | {"object": "chat.completion.chunk", "choices": [], "usage": usage}))
    return whole, [*frames, "data: [DONE]\n\n"], 2


def messages(_body, call):
    base = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
    usage = {"input_tokens": 5, "output_tokens": len(WORDS)}
    block = {"type": "text", "text": ""}
    deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    content, reason = block | {"text": "".join(WORDS)}, "end_turn"
    if call:
        block = {"type": "tool_use", "id": "toolu_1", "name": call, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(CALLS[call])}]
        content, reason = block | {"input": CALLS[call]}, "tool_use"
    whole = base | {"content": [content], "stop_reason": reason, "usage": usage}
    begun = base | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    frames = [
        event({"type": "message_start", "message": begun}),
        event({"type": "content_block_start", "index": 0, "content_block": block}),
        *(event({"type": "content_block_delta", "index": 0, "delta": delta}) for delta in deltas),
        event({"type": "content_block_stop", "index": 0}),
        event({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}),
        event({"type": "message_stop"}),
    ]
    return whole, frames, 4


def responses(*_):
    part = {"type": "output_text", "text": "".join(WORDS), "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 5, "output_tokens": 4, "total_tokens": 9, "input_tokens_details": {"cached_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed",
             "output": [item], "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        *({"type": "response.output_text.delta", **place, "delta": word, "logprobs": []} for word in WORDS),
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [event(one | {"sequence_number": at}) for at, one in enumerate(events)], 5


def embeddings(body):
    count = len(body["input"]) if isinstance(body["input"], list) else 1
    vector = [0.5, -0.25, 1.0]
    coded = body.get("encoding_format") == "base64"
    shown = b64encode(struct.pack("<3f", *vector)).decode() if coded else vector
    return {"object": "list", "model": MODEL, "usage": {"prompt_tokens": count, "total_tokens": count},
            "data": [{"object": "embedding", "index": at, "embedding": shown} for at in range(count)]}


# --- relays and workers -----------------------------------------------------------------------------------------------


class Stack:
    """One relay and its workers, with ports, secret and files of their own."""

    def __init__(self, backend_url, relay_env, worker_envs):
        self.directory = tempfile.TemporaryDirectory(prefix="modelrelay-clients-")
        self.workers, self.relay = [], None
        try:
            port = free_port()
            self.url = f"http://127.0.0.1:{port}"
            listen = {"LISTEN_ADDR": f"127.0.0.1:{port}", "WORKER_SECRET": "stack-secret"}
            self.relay = self.spawn("relay", listen | relay_env)
            self.wait_for(lambda: self.health() is not None, "the relay to answer")
            for number, env in enumerate(worker_envs):
                own = {"PROXY_URL": self.url, "WORKER_SECRET": "stack-secret", "BACKEND_URL": f"{backend_url}/w{number}",
                       "WORKER_NAME": f"worker-{number}", "PROBE_ADDR": "127.0.0.1:0"}
                self.workers.append(self.spawn("worker", own | env))
            self.wait_for(self.all_workers_serve, "the workers to be listed")
        except BaseException:
            self.close()
            raise

    def spawn(self, program, env):
        log = open(os.path.join(self.directory.name, f"{program}-{len(self.workers)}.log"), "wb")
        with log:
            return subprocess.Popen([os.path.join(PROGRAMS, f"modelrelay-{program}")],
                                    env={"PATH": os.environ["PATH"]} | env, cwd=self.directory.name,
                                    stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_for(self, condition, what):
        never = threading.Event()
        for _ in range(PATIENCE * 50):
            if condition():
                return
            if any(program.poll() is not None for program in [self.relay, *self.workers]):
                break
            never.wait(0.02)
        raise RuntimeError(f"timed out waiting for {what}:\n{self.logs()}")

    def health(self):
        return get_json(self.url, "/health")

    def all_workers_serve(self):
        state = get_json(self.url, "/admin/workers", {"authorization": "Bearer stack-admin"})
        if state is None:  # no admin token in this stack: count the workers, then check that the model is listed
            if (self.health() or {}).get("workers_connected") != len(self.workers):
                return False
            listed = get_json(self.url, "/v1/models")
            return not self.workers or any(model["id"] == MODEL for model in (listed or {}).get("data", []))
        return len([w for w in state["workers"] if MODEL in w["models"]]) == len(self.workers)

    def logs(self):
        texts = []
        for name in sorted(os.listdir(self.directory.name)):
            with open(os.path.join(self.directory.name, name), errors="replace") as log:
                texts.append(f"--- {name}\n{log.read()[-4000:]}")
        return "\n".join(texts)

    def close(self):
        for program in [*self.workers, self.relay]:
            if program is not None:
                program.send_signal(signal.SIGKILL)
                program.wait()
        self.directory.cleanup()


class Llama:
    """A real llama-server with a model of random weights, which runs as long as tests may need it."""

    def __init__(self):
        self.lock, self.process, self.url = threading.Lock(), None, None

    def start(self):
        with self.lock:
            if self.url is None and (home := self.home()):
                port = free_port()
                command = [f"{home}/bin/llama-server", "-m", f"{home}/models/tiny-a.gguf", "--alias", MODEL, "-np", "1", "-c", "4096",
                           "-t", "1", "-tb", "1", "--no-warmup", "--port", str(port)]
                quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self.process = subprocess.Popen(command, **quiet)
                self.url = f"http://127.0.0.1:{port}"
                self.wait_until_healthy()
            return self.url

    def wait_until_healthy(self):
        never = threading.Event()
        for _ in range(PATIENCE * 10):
            if get_json(self.url, "/health") is not None:
                return
            never.wait(0.1)
        raise RuntimeError("llama-server did not become healthy")

    @staticmethod
    def home():
        """Returns the newest folder that scripts/backends/build or scripts/backends/wheel has filled."""
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        built = [file for kind in ("backends", "wheel") for file in glob.glob(os.path.join(cache, "modelrelay", kind, "*", "complete"))]
        return os.environ.get("MODELRELAY_BACKENDS") or (os.path.dirname(max(built, key=os.path.getmtime)) if built else None)

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get_json(url, path, headers=None):
    """Returns the JSON of a GET, or None while there is none."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return json.loads(response.read()) if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


class Control(Handler):
    stacks, backend_url, lock, llama = {}, None, threading.Lock(), Llama()

    def handle_request(self):
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            self.answer(200, self.route(self.command, parts.path.strip("/").split("/"), query, self.body()))
        except Exception as error:
            self.answer(500, {"error": str(error)})

    do_GET = do_POST = do_DELETE = handle_request

    def route(self, method, path, query, body):
        match (method, *path):
            case ("POST", "stacks"):
                wish = json.loads(body)
                stack = Stack(self.backend_url, {"MODELRELAY_ADMIN_TOKEN": "stack-admin"} | wish.get("relay", {}),
                              wish.get("workers", [{}]))
                number = str(id(stack))
                with self.lock:
                    self.stacks[number] = stack
                return {"id": number, "url": stack.url}
            case ("POST", "stacks", number, "workers", at, "kill"):
                worker = self.stacks[number].workers[int(at)]
                worker.send_signal(signal.SIGKILL)
                worker.wait()
            case ("DELETE", "stacks", number):
                with self.lock:
                    stack = self.stacks.pop(number)
                stack.close()
            case ("GET", "seen"):
                return SEEN.wait(query["tag"], query.get("state"), int(query.get("count", 1)))
            case ("GET", "llama"):
                return {"url": self.llama.start()}
            case ("POST", "release"):
                SEEN.release(query["tag"])
            case _:
                raise ValueError(f"no such control: {method} {self.path}")
        return {}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a killed worker resets its open connections
            super().handle_error(request, client_address)


def serve(handler):
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    Control.backend_url = serve(Backend)
    print(json.dumps({"control": serve(Control), "model": MODEL, "text": "".join(WORDS)}), flush=True)
    sys.stdin.read()
    for left in Control.stacks.values():
        left.close()
    Control.llama.close()
