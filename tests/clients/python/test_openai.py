"""openai-python against relay and worker."""

import openai
import pytest
from conftest import MODEL, OPENAI_TOOL, TEXT, in_background, llama

BUSY = {"workers": [{"MAX_CONCURRENCY": "1"}]}


def sdk(stack, attempts, **more):
    options = {"api_key": "any", "max_retries": 2, "http_client": attempts.client} | more
    return openai.OpenAI(base_url=f"{stack.url}/v1", **options)


def test_the_sdk_is_the_one_that_was_measured():
    assert openai.__version__.split(".")[0] == "3"


def test_a_chat_is_answered_with_usage_and_a_request_id(stack, attempts):
    stack = stack()
    answer = sdk(stack, attempts).chat.completions.create(**stack.request())
    assert answer.choices[0].message.content == TEXT
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 9)
    assert answer._request_id
    assert attempts.count == 1


def test_a_chat_stream_ends_with_its_finish_reason(stack, attempts):
    stack = stack()
    chunks = list(sdk(stack, attempts).chat.completions.create(**stack.request(stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stream_carries_usage_on_request(stack, attempts):
    stack = stack()
    request = stack.request(stream=True, stream_options={"include_usage": True})
    chunks = list(sdk(stack, attempts).chat.completions.create(**request))
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 9)


def test_a_tool_call_and_its_result_go_both_ways(stack, attempts):
    stack = stack()
    create = sdk(stack, attempts).chat.completions.create
    request = stack.request("call", tools=[OPENAI_TOOL])
    message = create(**request).choices[0].message
    [called] = message.tool_calls
    assert (called.function.name, called.function.arguments) == ("weather", '{"city": "Oslo"}')
    request["messages"] += [message, {"role": "tool", "tool_call_id": called.id, "content": "rain"}]
    assert create(**request).choices[0].message.content == TEXT


def test_a_response_is_answered_whole_and_streamed(stack, attempts):
    stack = stack()
    client = sdk(stack, attempts)
    assert client.responses.create(model=MODEL, input=stack.prompt("echo")).output_text == TEXT
    events = list(client.responses.create(model=MODEL, input=stack.prompt("echo"), stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"


def test_embeddings_arrive_as_numbers(stack, attempts):
    stack = stack()
    client = sdk(stack, attempts)
    for more in ({}, {"encoding_format": "float"}):  # the SDK requests base64 by default
        answer = client.embeddings.create(model=MODEL, input=[stack.prompt("echo"), "b"], **more)
        assert [item.embedding for item in answer.data] == [[0.5, -0.25, 1.0]] * 2


def test_models_are_listed_and_retrieved(stack, attempts):
    client = sdk(stack(), attempts)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_unknown_model_is_not_found_and_not_retried(stack, attempts):
    stack = stack(workers=[{}])
    client = sdk(stack, attempts)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"
    assert attempts.count == 1


def test_a_wrong_key_is_an_authentication_error_and_not_retried(stack, attempts):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"}, workers=[{}])
    with pytest.raises(openai.AuthenticationError) as caught:
        sdk(stack, attempts, api_key="mr-no-key").chat.completions.create(**stack.request())
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
    assert attempts.count == 1
    key = stack.new_key()
    answer = sdk(stack, attempts, api_key=key).chat.completions.create(**stack.request())
    assert answer.choices[0].message.content == TEXT
    assert stack.seen()[-1]["authorization"] is None, "the relay's own key reached the backend"


def test_a_refusal_of_the_backend_arrives_as_it_is(stack, attempts):
    stack = stack()
    with pytest.raises(openai.BadRequestError) as caught:
        sdk(stack, attempts).chat.completions.create(**stack.request("refuse"))
    assert "maximum context length is 16 tokens" in caught.value.message
    assert (caught.value.type, caught.value.code) == ("BadRequestError", "400")
    assert attempts.count == 1


def test_a_full_queue_is_a_rate_limit_that_the_sdk_waits_out(stack, attempts):
    stack = stack(relay={"MAX_QUEUE_LEN": "1", "QUEUE_TIMEOUT_SECS": "4"}, **BUSY)
    create = sdk(stack, attempts).chat.completions.create
    leave = stack.occupy(create)
    queued = in_background(create, **stack.request())
    stack.wait_for_queue(1)
    with pytest.raises(openai.RateLimitError) as caught:
        sdk(stack, attempts, max_retries=0).chat.completions.create(**stack.request())
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]

    before = attempts.count
    attempts.on_answer = lambda response: response.status_code == 429 and leave()
    assert create(**stack.request()).choices[0].message.content == TEXT
    assert attempts.count == before + 2, "one refusal, one answer"
    queued.join()


def test_a_queue_timeout_is_retried(stack, attempts):
    stack = stack(relay={"QUEUE_TIMEOUT_SECS": "1"}, **BUSY)
    leave = stack.occupy(sdk(stack, attempts).chat.completions.create)
    before = attempts.count
    with pytest.raises(openai.InternalServerError) as caught:
        sdk(stack, attempts, max_retries=1).chat.completions.create(**stack.request())
    leave()
    assert (caught.value.status_code, caught.value.code) == (504, "queue_timeout")
    assert attempts.count == before + 2


def test_a_request_timeout_is_not_retried(stack, attempts):
    stack = stack(relay={"REQUEST_TIMEOUT_SECS": "1"})
    with pytest.raises(openai.InternalServerError) as caught:
        sdk(stack, attempts).chat.completions.create(**stack.request("hold"))
    assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
    assert attempts.count == 1
    stack.seen("left")


def test_a_worker_killed_before_the_first_byte_goes_unnoticed(stack, attempts):
    stack = stack(workers=[{}, {}])
    answers = []
    create = sdk(stack, attempts).chat.completions.create
    thread = in_background(lambda: answers.append(create(**stack.request("hold"))))
    (first,) = stack.seen("running")
    stack.kill_worker(first["worker"])
    again = stack.seen(count=2)[-1]
    assert again["worker"] != first["worker"]
    stack.release()
    thread.join()
    assert answers[0].choices[0].message.content == TEXT
    assert attempts.count == 1


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_worker_killed_in_mid_stream_raises(stack, attempts, api):
    stack = stack()
    client = sdk(stack, attempts)
    if api == "chat":
        stream = client.chat.completions.create(**stack.request("hold", stream=True))
        words = (chunk.choices[0].delta.content for chunk in stream)
    else:
        stream = client.responses.create(model=MODEL, input=stack.prompt("hold"), stream=True)
        words = (event.delta for event in stream if event.type == "response.output_text.delta")
    assert [next(words), next(words)] == ["Hello", " from"]
    stack.kill_worker()
    with pytest.raises(openai.APIError):
        list(words)
    assert attempts.count == 1, "a request whose response has begun must not be sent again"


def test_closing_a_stream_reaches_the_backend(stack, attempts):
    stack = stack()
    with sdk(stack, attempts).chat.completions.create(**stack.request("hold", stream=True)) as stream:
        assert next(iter(stream)).choices[0].delta.content == "Hello"
        stack.seen("running")
    stack.seen("left")


def test_a_real_llama_server_answers(stack, attempts):
    create = sdk(stack(workers=[llama()]), attempts).chat.completions.create
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = create(**request)
    assert answer.choices[0].finish_reason and answer.usage.completion_tokens
    assert list(create(stream=True, **request))[-1].choices[0].finish_reason
