"""LiteLLM's proxy in front of a relay, called by openai-python."""

import os
import subprocess
import sys
import time
import urllib.request

import openai
import pytest
from conftest import MODEL, OPENAI_TOOL, TEXT, Stack, call, free_port

KEY = "sk-suite-0123456789abcdef"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """Yields a stack, and the SDK pointed at a proxy in front of it. The proxy starts slowly, so all tests share one."""
    stack = Stack()
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "config.yaml").write_text(
        "model_list:\n"
        f"  - model_name: gpt\n    litellm_params: {{model: 'openai/{MODEL}', api_base: '{stack.url}/v1', api_key: any, max_retries: 0}}\n"
        f"  - model_name: claude\n    litellm_params: {{model: 'anthropic/{MODEL}', api_base: '{stack.url}', api_key: any, max_retries: 0}}\n"
        "router_settings: {num_retries: 0}\n"
    )
    port = free_port()
    program = os.path.join(os.path.dirname(sys.executable), "litellm")
    # Fetches nothing: the price list is that of the package.
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with open(folder / "log", "wb") as log:
        proxy = subprocess.Popen([program, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"],
                                 cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}/health/liveliness", proxy, folder / "log")
        yield stack, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    finally:
        proxy.kill()
        proxy.wait()
        call("DELETE", f"/stacks/{stack.id}")


def wait_until_it_answers(url, process, log):
    deadline = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)


@pytest.fixture(params=["gpt", "claude"])
def create(request, proxied):
    stack, sdk = proxied
    return lambda deed="echo", **more: sdk.chat.completions.create(**(stack.request(deed, model=request.param, max_tokens=100) | more))


def test_a_chat_is_answered_with_usage(create):
    answer = create()
    assert answer.choices[0].message.content == TEXT
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


def test_a_chat_stream_ends_with_its_finish_reason(create):
    chunks = [chunk for chunk in create(stream=True) if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_tool_call_arrives(create):
    [called] = create("call", tools=[OPENAI_TOOL]).choices[0].message.tool_calls
    assert called.function.name == "weather"


def test_a_refusal_of_the_backend_arrives_as_it_is(create):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16 tokens"):
        create("refuse")


def test_closing_a_stream_reaches_the_backend(create, proxied):
    stack, _ = proxied
    before = len(call("GET", f"/seen?tag={stack.tag}&count=0&state=left"))
    with create("hold", stream=True) as stream:
        assert any(chunk.choices and chunk.choices[0].delta.content for chunk in stream)
    stack.seen("left", count=before + 1)
