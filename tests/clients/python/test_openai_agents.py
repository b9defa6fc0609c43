"""OpenAI's Agents SDK against relay and worker, with both of OpenAI's APIs."""

import asyncio

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from conftest import MODEL, TEXT, llama

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}

set_tracing_disabled(True)


def agent(stack, api="chat", key="any", **more):
    client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key)
    return Agent(name="assistant", model=MODELS[api](MODEL, openai_client=client), **more)


def run(agent, prompt):
    return asyncio.run(Runner.run(agent, prompt))


async def words_of(streamed):
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            yield event.data.delta


@pytest.mark.parametrize("api", MODELS)
def test_a_prompt_is_answered_with_usage(stack, api):
    stack = stack()
    result = run(agent(stack, api), stack.prompt("echo"))
    assert result.final_output == TEXT
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (1, 5, 4)


@pytest.mark.parametrize("api", MODELS)
def test_a_stream_ends_whole(stack, api):
    stack = stack()

    async def stream():
        streamed = Runner.run_streamed(agent(stack, api), stack.prompt("echo"))
        return [word async for word in words_of(streamed)], streamed.final_output

    words, output = asyncio.run(stream())
    assert "".join(words) == output == TEXT and len(words) > 1


def test_a_tool_call_is_made_and_its_result_goes_back(stack):
    stack = stack()
    cities = []

    @function_tool
    def weather(city: str) -> str:
        """The weather of today."""
        cities.append(city)
        return "rain"

    assert run(agent(stack, tools=[weather]), stack.prompt("call")).final_output == TEXT
    assert cities == ["Oslo"]
    stack.seen("done", count=2)


@pytest.mark.parametrize("api", MODELS)
def test_a_refusal_of_the_backend_arrives_as_it_is(stack, api):
    stack = stack()
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16 tokens"):
        run(agent(stack, api), stack.prompt("refuse"))
    assert len(stack.seen()) == 1


def test_a_wrong_key_is_an_authentication_error(stack):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    with pytest.raises(openai.AuthenticationError):
        run(agent(stack, key="mr-no-key"), stack.prompt("echo"))
    assert run(agent(stack, key=stack.new_key()), stack.prompt("echo")).final_output == TEXT


@pytest.mark.parametrize("api", MODELS)
def test_a_worker_killed_in_mid_stream_raises(stack, api):
    stack = stack()

    async def stream():
        words = words_of(Runner.run_streamed(agent(stack, api), stack.prompt("hold")))
        assert [await anext(words), await anext(words)] == ["Hello", " from"]
        await asyncio.to_thread(stack.kill_worker)
        async for _ in words:
            pass

    with pytest.raises(openai.APIError):
        asyncio.run(stream())
    assert len(stack.seen()) == 1, "a request whose response has begun must not be sent again"


@pytest.mark.parametrize("api", MODELS)
def test_leaving_a_stream_reaches_the_backend(stack, api):
    stack = stack()

    async def stream():
        streamed = Runner.run_streamed(agent(stack, api), stack.prompt("hold"))
        assert await anext(words_of(streamed)) == "Hello"
        await asyncio.to_thread(stack.seen, "running")
        streamed.cancel()

    asyncio.run(stream())
    stack.seen("left")


def test_a_real_llama_server_answers(stack):
    one = agent(stack(workers=[llama()]), model_settings=ModelSettings(max_tokens=8))

    async def both():
        whole = await Runner.run(one, "hi")
        return whole.context_wrapper.usage.output_tokens, [word async for word in words_of(Runner.run_streamed(one, "hi"))]

    assert all(asyncio.run(both()))
