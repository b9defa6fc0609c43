"""LangChain's chat models and embeddings against relay and worker."""

import anthropic
import openai
import pytest
from conftest import MODEL, OPENAI_TOOL, TEXT, llama
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

MODELS = {"openai": ChatOpenAI, "anthropic": ChatAnthropic}
SDKS = {"openai": openai, "anthropic": anthropic}

pytestmark = pytest.mark.parametrize("api", MODELS)


def chat(stack, api, **more):
    url = {"openai": f"{stack.url}/v1", "anthropic": stack.url}[api]
    return MODELS[api](**({"model": MODEL, "base_url": url, "api_key": "any", "max_tokens": 100} | more))


def test_a_chat_is_answered_with_usage(stack, api):
    stack = stack()
    message = chat(stack, api).invoke(stack.prompt("echo"))
    assert message.content == TEXT
    assert (message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]) == (5, 4)


def test_a_chat_stream_ends_whole_and_carries_usage(stack, api):
    stack = stack()
    more = {"stream_usage": True} if api == "openai" else {}  # off by default where the address is not OpenAI's
    whole = None
    for chunk in chat(stack, api, **more).stream(stack.prompt("echo")):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == TEXT
    assert whole.usage_metadata["output_tokens"] == 4


def test_a_tool_call_and_its_result_go_both_ways(stack, api):
    stack = stack()
    model = chat(stack, api).bind_tools([OPENAI_TOOL])
    messages = [HumanMessage(stack.prompt("call"))]
    message = model.invoke(messages)
    [called] = message.tool_calls
    assert (called["name"], called["args"]) == ("weather", {"city": "Oslo"})
    assert model.invoke([*messages, message, ToolMessage("rain", tool_call_id=called["id"])]).content == TEXT


def test_a_refusal_of_the_backend_arrives_as_it_is(stack, api):
    stack = stack()
    with pytest.raises(SDKS[api].BadRequestError, match="maximum context length is 16 tokens"):
        chat(stack, api).invoke(stack.prompt("refuse"))


def test_a_wrong_key_is_an_authentication_error(stack, api):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    with pytest.raises(SDKS[api].AuthenticationError):
        chat(stack, api, api_key="mr-no-key").invoke(stack.prompt("echo"))
    assert chat(stack, api, api_key=stack.new_key()).invoke(stack.prompt("echo")).content == TEXT


def test_a_worker_killed_in_mid_stream_raises(stack, api):
    stack = stack()
    words = (chunk.text for chunk in chat(stack, api).stream(stack.prompt("hold")) if chunk.text)
    assert [next(words), next(words)] == ["Hello", " from"]
    stack.kill_worker()
    with pytest.raises(SDKS[api].APIError):
        list(words)


def test_closing_a_stream_reaches_the_backend(stack, api):
    stack = stack()
    stream = chat(stack, api).stream(stack.prompt("hold"))
    assert any(chunk.text for chunk in stream)
    stack.seen("running")
    stream.close()
    stack.seen("left")


def test_embeddings_arrive_as_numbers(stack, api):
    if api == "anthropic":
        pytest.skip("Anthropic's API has no embeddings")
    stack = stack()
    # Otherwise it sends OpenAI's own token ids, which have another meaning for every other model.
    maker = OpenAIEmbeddings(model=MODEL, base_url=f"{stack.url}/v1", api_key="any", check_embedding_ctx_length=False)
    assert maker.embed_documents([stack.prompt("echo"), "b"]) == [[0.5, -0.25, 1.0]] * 2


def test_a_real_llama_server_answers(stack, api):
    model = chat(stack(workers=[llama()]), api, max_tokens=8)
    assert model.invoke("hi").usage_metadata["output_tokens"]
    assert list(model.stream("hi"))
