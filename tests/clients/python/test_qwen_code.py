"""Qwen Code, headless, against relay and worker."""

import os

import pytest
from coding_agents import interrupt, outcome, streamed_words, tool_results
from conftest import MODEL, TEXT, installed


@pytest.fixture
def qwen(headless):
    def start(stack, deed, *options, key="any"):
        return headless(
            os.environ["CLIENTS_NODE"], installed("@qwen-code/qwen-code/cli.js"), stack.prompt(deed), "--auth-type", "openai", "--output-format", "stream-json",
            "--include-partial-messages", *options,
            OPENAI_API_KEY=key, OPENAI_BASE_URL=f"{stack.url}/v1", OPENAI_MODEL=MODEL,
        )

    return start


def test_a_prompt_is_answered_as_a_stream_with_usage(stack, qwen):
    stack = stack()
    events, result = outcome(qwen(stack, "echo"))
    assert (result["result"], result["is_error"]) == (TEXT, False)
    words = streamed_words(events)
    assert "".join(words) == TEXT and len(words) > 1
    [message] = [event["message"] for event in events if event["type"] == "assistant"]
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (5, 4)
    assert {request["path"] for request in stack.seen("done")} == {"/v1/chat/completions"}


def test_a_tool_call_is_made_and_its_result_goes_back(stack, qwen):
    stack = stack()
    events, result = outcome(qwen(stack, "call", "--allowed-tools", "run_shell_command(echo)", "run_shell_command(sleep)"))
    assert (result["result"], result["num_turns"]) == (TEXT, 2)
    assert tool_results(events) == ["mango"]


def test_a_wrong_key_is_reported(stack, qwen):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    _, result = outcome(qwen(stack, "echo", key="mr-no-key"))
    assert result["is_error"] and "401" in result["error"]["message"]
    _, result = outcome(qwen(stack, "echo", key=stack.new_key()))
    assert result["result"] == TEXT


def test_a_refusal_of_the_backend_is_shown(stack, qwen):
    _, result = outcome(qwen(stack(), "refuse"))
    assert result["is_error"] and "maximum context length is 16 tokens" in result["error"]["message"]


def test_ending_it_in_mid_stream_reaches_the_backend(stack, qwen):
    stack = stack()
    interrupt(qwen(stack, "hold"), stack)
