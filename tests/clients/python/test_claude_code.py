"""Claude Code, headless, against relay and worker: the program itself, with nothing but the relay within its reach."""

import pytest
from coding_agents import interrupt, outcome, streamed_words, tool_results
from conftest import MODEL, TEXT, installed


@pytest.fixture
def claude(headless):
    def start(stack, deed, *options, key="any"):
        program = installed("@anthropic-ai/claude-code-*/claude")
        return headless(
            program, "-p", stack.prompt(deed), "--output-format", "stream-json", "--verbose", "--include-partial-messages", *options,
            ANTHROPIC_BASE_URL=stack.url, ANTHROPIC_AUTH_TOKEN=key, ANTHROPIC_MODEL=MODEL, ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
            CLAUDE_CODE_MAX_RETRIES="1", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1", DISABLE_TELEMETRY="1",
        )

    return start


def test_a_prompt_is_answered_as_a_stream_with_usage(stack, claude):
    stack = stack()
    events, result = outcome(claude(stack, "echo"))
    assert (result["result"], result["is_error"]) == (TEXT, False)
    assert (result["usage"]["input_tokens"], result["usage"]["output_tokens"]) == (5, 4)
    words = streamed_words(events)
    assert "".join(words) == TEXT and len(words) > 1
    assert {request["path"] for request in stack.seen("done")} == {"/v1/messages"}


def test_a_tool_call_is_made_and_its_result_goes_back(stack, claude):
    stack = stack()
    events, result = outcome(claude(stack, "call", "--allowedTools", "Bash(echo:*)"))
    assert (result["result"], result["num_turns"]) == (TEXT, 2)
    assert tool_results(events) == ["mango"]


def test_a_wrong_key_is_reported(stack, claude):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    _, result = outcome(claude(stack, "echo", key="mr-no-key"))
    assert result["is_error"] and result["api_error_status"] == 401
    _, result = outcome(claude(stack, "echo", key=stack.new_key()))
    assert result["result"] == TEXT


def test_a_refusal_of_the_backend_is_shown(stack, claude):
    _, result = outcome(claude(stack(), "refuse"))
    assert result["is_error"] and "maximum context length is 16 tokens" in result["result"]


def test_ending_it_in_mid_stream_reaches_the_backend(stack, claude):
    stack = stack()
    interrupt(claude(stack, "hold"), stack)
