"""LiteLLM as a library against relay and worker, through both of its ways to reach one."""

import litellm
import pytest
from conftest import MODEL, OPENAI_TOOL, TEXT, llama

litellm.suppress_debug_info = True
both_ways = pytest.mark.parametrize("api", ["openai", "anthropic"])


def complete(stack, deed="echo", api="openai", **more):
    base = f"{stack.url}/v1" if api == "openai" else stack.url
    options = {"model": f"{api}/{MODEL}", "api_base": base, "api_key": "any", "max_retries": 0, "max_tokens": 100}
    return litellm.completion(**(options | {"messages": [{"role": "user", "content": stack.prompt(deed)}]} | more))


@both_ways
def test_a_chat_is_answered_with_usage(stack, api):
    answer = complete(stack(), api=api)
    assert answer.choices[0].message.content == TEXT
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


@both_ways
def test_a_chat_stream_ends_with_its_finish_reason_and_usage(stack, api):
    chunks = list(complete(stack(), api=api, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:].count("stop") == 1
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [4]


@both_ways
def test_a_tool_call_and_its_result_go_both_ways(stack, api):
    stack = stack()
    message = complete(stack, "call", api, tools=[OPENAI_TOOL]).choices[0].message
    [called] = message.tool_calls
    assert called.function.name == "weather"
    words = [{"role": "user", "content": stack.prompt("call")}, message.model_dump()]
    words.append({"role": "tool", "tool_call_id": called.id, "content": "rain"})
    assert complete(stack, api=api, tools=[OPENAI_TOOL], messages=words).choices[0].message.content == TEXT


@both_ways
def test_a_refusal_of_the_backend_arrives_as_it_is(stack, api):
    with pytest.raises(litellm.BadRequestError, match="maximum context length is 16 tokens"):
        complete(stack(), "refuse", api)


def test_a_wrong_key_is_an_authentication_error(stack):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    with pytest.raises(litellm.AuthenticationError):
        complete(stack, api_key="mr-no-key")
    assert complete(stack, api_key=stack.new_key()).choices[0].message.content == TEXT


def test_a_full_queue_is_a_rate_limit(stack):
    stack = stack(relay={"MAX_QUEUE_LEN": "0"}, workers=[{"MAX_CONCURRENCY": "1"}])
    leave = stack.occupy(lambda messages, **_: complete(stack, messages=messages))
    with pytest.raises(litellm.RateLimitError):
        complete(stack)
    leave()


@both_ways
def test_a_worker_killed_in_mid_stream_raises(stack, api):
    stack = stack()
    words = (chunk.choices[0].delta.content for chunk in complete(stack, "hold", api, stream=True))
    words = (word for word in words if word)
    assert [next(words), next(words)] == ["Hello", " from"]
    stack.kill_worker()
    with pytest.raises(Exception) as caught:
        list(words)
    assert isinstance(caught.value, (litellm.APIError, litellm.APIConnectionError, litellm.ServiceUnavailableError)), caught.value


def test_embeddings_arrive_as_numbers(stack):
    stack = stack()
    answer = litellm.embedding(model=f"openai/{MODEL}", api_base=f"{stack.url}/v1", api_key="any", input=[stack.prompt("echo")])
    assert answer.data[0]["embedding"] == [0.5, -0.25, 1.0]


@both_ways
def test_a_real_llama_server_answers(stack, api):
    stack = stack(workers=[llama()])
    assert complete(stack, api=api, max_tokens=8).usage.completion_tokens
    assert list(complete(stack, api=api, max_tokens=8, stream=True))
