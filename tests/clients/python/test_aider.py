"""aider, with one message, against relay and worker."""

import os

import pytest
from coding_agents import PATIENCE, interrupt
from conftest import MODEL, TEXT


@pytest.fixture
def aider(headless, tmp_path):
    # A list of prices that is recent enough, so that it fetches none.
    (tmp_path / ".aider/caches").mkdir(parents=True)
    (tmp_path / ".aider/caches/model_prices_and_context_window.json").write_text('{"none": {}}')

    def start(stack, deed, key="any"):
        return headless(
            os.environ["CLIENTS_AIDER"], "--model", f"openai/{MODEL}", "--message", stack.prompt(deed), "--no-git", "--yes-always", "--no-pretty",
            "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", "--analytics-disable", "--no-detect-urls",
            OPENAI_API_BASE=f"{stack.url}/v1", OPENAI_API_KEY=key, LITELLM_LOCAL_MODEL_COST_MAP="True", PYTHONUNBUFFERED="1",
        )

    return start


def output_of(process):
    return process.communicate(timeout=PATIENCE)[0]


def test_a_prompt_is_answered_as_a_stream(stack, aider):
    stack = stack()
    process = aider(stack, "hold")
    stack.seen("running")
    begun = ""
    while "Hello from" not in begun:
        begun += (word := process.stdout.read(1))
        assert word, begun
    assert TEXT not in begun
    stack.release()
    assert TEXT in begun + output_of(process)
    [request] = stack.seen("done")
    assert (request["path"], request["stream"]) == ("/v1/chat/completions", True)


def test_a_wrong_key_is_reported(stack, aider):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    assert "AuthenticationError" in output_of(aider(stack, "echo", key="mr-no-key"))
    assert TEXT in output_of(aider(stack, "echo", key=stack.new_key()))


def test_a_refusal_of_the_backend_is_understood(stack, aider):
    assert "has hit a token limit" in output_of(aider(stack(), "refuse"))


def test_ending_it_in_mid_stream_reaches_the_backend(stack, aider):
    stack = stack()
    interrupt(aider(stack, "hold"), stack)
