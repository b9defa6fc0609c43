"""Pydantic AI's agents against relay and worker."""

import asyncio

import openai
import pytest
from conftest import MODEL, TEXT, llama
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


def agent(stack, api="chat", key="any", **more):
    provider = OpenAIProvider(base_url=f"{stack.url}/v1", api_key=key)
    return Agent(MODELS[api](MODEL, provider=provider), **more)


@pytest.mark.parametrize("api", MODELS)
def test_a_prompt_is_answered_with_usage(stack, api):
    stack = stack()
    result = agent(stack, api).run_sync(stack.prompt("echo"))
    assert result.output == TEXT
    usage = result.usage
    assert (usage.input_tokens, usage.output_tokens) == (5, 4)


@pytest.mark.parametrize("api", MODELS)
def test_a_stream_ends_whole_and_carries_usage(stack, api):
    stack = stack()
    streamed = agent(stack, api).run_stream_sync(stack.prompt("echo"))
    words = list(streamed.stream_text(delta=True, debounce_by=None))
    assert "".join(words) == TEXT and len(words) > 1
    assert streamed.usage.output_tokens == 4


def test_a_tool_call_is_made_and_its_result_goes_back(stack):
    stack = stack()
    cities = []

    def weather(city: str) -> str:
        cities.append(city)
        return "rain"

    assert agent(stack, tools=[weather]).run_sync(stack.prompt("call")).output == TEXT
    assert cities == ["Oslo"]
    stack.seen("done", count=2)


def test_a_refusal_of_the_backend_arrives_as_it_is(stack):
    stack = stack()
    with pytest.raises(ModelHTTPError) as caught:
        agent(stack).run_sync(stack.prompt("refuse"))
    assert caught.value.status_code == 400
    assert "maximum context length is 16 tokens" in str(caught.value.body)
    stack.seen(count=1)


def test_a_wrong_key_is_an_http_error_401(stack):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    with pytest.raises(ModelHTTPError) as caught:
        agent(stack, key="mr-no-key").run_sync(stack.prompt("echo"))
    assert caught.value.status_code == 401
    assert agent(stack, key=stack.new_key()).run_sync(stack.prompt("echo")).output == TEXT


@pytest.mark.parametrize("api", MODELS)
def test_a_worker_killed_in_mid_stream_raises(stack, api):
    stack = stack()
    words = agent(stack, api).run_stream_sync(stack.prompt("hold")).stream_text(delta=True, debounce_by=None)
    assert [next(words), next(words)] == ["Hello", " from"]
    stack.kill_worker()
    with pytest.raises((ModelAPIError, openai.APIError)):
        list(words)
    assert len(stack.seen()) == 1, "a request whose response has begun must not be sent again"


def test_leaving_a_stream_reaches_the_backend(stack):
    stack = stack()

    async def stream():
        async with agent(stack).run_stream(stack.prompt("hold")) as streamed:
            assert await anext(streamed.stream_text(delta=True, debounce_by=None)) == "Hello"
            await asyncio.to_thread(stack.seen, "running")
            asyncio.current_task().cancel()  # like a web server whose own client has disconnected
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stream())
    stack.seen("left")


def test_a_real_llama_server_answers(stack):
    one = agent(stack(workers=[llama()]), model_settings={"max_tokens": 8})
    assert one.run_sync("hi").usage.output_tokens
    assert list(one.run_stream_sync("hi").stream_text(delta=True))
