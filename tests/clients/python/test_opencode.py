"""opencode, headless, against relay and worker."""

import json

import pytest
from coding_agents import events_of, interrupt
from conftest import MODEL, TEXT, installed


@pytest.fixture
def opencode(headless):
    def start(stack, deed, key="any"):
        options = {"baseURL": f"{stack.url}/v1", "apiKey": key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {"limit": {"context": 100_000, "output": 4096}}}}
        config = {"model": f"relay/{MODEL}", "provider": {"relay": provider}, "share": "disabled", "permission": {"bash": "allow"}}
        # Without a title it would request one from the model.
        return headless(
            installed("opencode-*/bin/opencode"), "run", "--pure", "--format", "json", "--title", "a test", stack.prompt(deed),
            OPENCODE_CONFIG_CONTENT=json.dumps(config), OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        )

    return start


def parts(process, kind):
    """Returns the parts of this kind that it printed."""
    return [event.get("part") or event["error"] for event in events_of(process) if event["type"] == kind]


def test_a_prompt_is_answered_as_a_stream_with_usage(stack, opencode):
    stack = stack()
    events = events_of(process := opencode(stack, "echo"))
    assert [event["part"]["text"] for event in events if event["type"] == "text"] == [TEXT]
    tokens = events[-1]["part"]["tokens"]
    assert (tokens["input"], tokens["output"], process.returncode) == (5, 4, 0)
    [request] = stack.seen("done")
    assert (request["path"], request["stream"]) == ("/v1/chat/completions", True)


def test_a_tool_call_is_made_and_its_result_goes_back(stack, opencode):
    stack = stack()
    [called] = parts(opencode(stack, "call"), "tool_use")
    assert (called["tool"], called["state"]["output"]) == ("bash", "mango\n")
    stack.seen("done", count=2)


def test_a_wrong_key_is_reported(stack, opencode):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    [error] = parts(opencode(stack, "echo", key="mr-no-key"), "error")
    assert error["data"]["statusCode"] == 401, error
    [text] = parts(opencode(stack, "echo", key=stack.new_key()), "text")
    assert text["text"] == TEXT


def test_a_refusal_of_the_backend_is_shown(stack, opencode):
    error, *_ = parts(opencode(stack(), "refuse"), "error")
    assert "maximum context length is 16 tokens" in error["data"]["message"]


def test_ending_it_in_mid_stream_reaches_the_backend(stack, opencode):
    stack = stack()
    interrupt(opencode(stack, "hold"), stack)
