"""anthropic-python against relay and worker."""

import anthropic
import pytest
from conftest import ANTHROPIC_TOOL, MODEL, TEXT, in_background, llama

BUSY = {"workers": [{"MAX_CONCURRENCY": "1"}]}


def sdk(stack, attempts, **more):
    options = {"api_key": "any", "max_retries": 2, "http_client": attempts.client} | more
    return anthropic.Anthropic(base_url=stack.url, **options)


def message_request(stack, *arguments, **more):
    return stack.request(*arguments, max_tokens=100, **more)


def kind(error):
    return error.body["error"]["type"]


def test_the_sdk_is_the_one_that_was_measured():
    assert anthropic.__version__.split(".")[0] == "2"


def test_a_message_is_answered_with_usage_and_a_request_id(stack, attempts):
    stack = stack()
    message = sdk(stack, attempts).messages.create(**message_request(stack))
    assert (message.content[0].text, message.stop_reason) == (TEXT, "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 4)
    assert message._request_id
    assert attempts.count == 1


def test_a_message_stream_ends_with_its_stop_reason(stack, attempts):
    stack = stack()
    with sdk(stack, attempts).messages.stream(**message_request(stack)) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().stop_reason == "end_turn"


def test_a_tool_call_and_its_result_go_both_ways(stack, attempts):
    stack = stack()
    messages = sdk(stack, attempts).messages
    request = message_request(stack, "call", tools=[ANTHROPIC_TOOL])
    with messages.stream(**request) as stream:
        answer = stream.get_final_message()
    [called] = answer.content
    assert (called.name, called.input, answer.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "rain"}
    request["messages"] += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert messages.create(**request).content[0].text == TEXT


def test_models_are_listed_and_retrieved(stack, attempts):
    client = sdk(stack(), attempts)
    assert [(model.id, model.type) for model in client.models.list()] == [(MODEL, "model")]
    assert client.models.retrieve(MODEL).display_name


def test_an_unknown_model_is_not_found_and_not_retried(stack, attempts):
    client = sdk(stack(), attempts)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert kind(caught.value) == "not_found_error"
    assert attempts.count == 1


def test_a_wrong_key_is_an_authentication_error_and_not_retried(stack, attempts):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    with pytest.raises(anthropic.AuthenticationError) as caught:
        sdk(stack, attempts, api_key="mr-no-key").messages.create(**message_request(stack))
    assert kind(caught.value) == "authentication_error"
    assert attempts.count == 1
    message = sdk(stack, attempts, api_key=stack.new_key()).messages.create(**message_request(stack))
    assert message.content[0].text == TEXT
    assert stack.seen()[-1]["x-api-key"] is None, "the relay's own key reached the backend"


def test_a_refusal_of_the_backend_arrives_as_it_is(stack, attempts):
    stack = stack()
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk(stack, attempts).messages.create(**message_request(stack, "refuse"))
    assert caught.value.body["error"]["message"] == "This model's maximum context length is 16 tokens."
    assert attempts.count == 1


def test_a_full_queue_is_a_rate_limit_that_the_sdk_waits_out(stack, attempts):
    stack = stack(relay={"MAX_QUEUE_LEN": "1", "QUEUE_TIMEOUT_SECS": "4"}, **BUSY)
    create = sdk(stack, attempts).messages.create
    leave = stack.occupy(lambda **request: create(max_tokens=100, **request))
    queued = in_background(create, **message_request(stack))
    stack.wait_for_queue(1)
    with pytest.raises(anthropic.RateLimitError) as caught:
        sdk(stack, attempts, max_retries=0).messages.create(**message_request(stack))
    assert kind(caught.value) == "rate_limit_error"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.request_id == caught.value.body["request_id"]

    before = attempts.count
    attempts.on_answer = lambda response: response.status_code == 429 and leave()
    assert create(**message_request(stack)).content[0].text == TEXT
    assert attempts.count == before + 2, "one refusal, one answer"
    queued.join()


def test_a_queue_timeout_is_retried(stack, attempts):
    stack = stack(relay={"QUEUE_TIMEOUT_SECS": "1"}, **BUSY)
    create = sdk(stack, attempts, max_retries=1).messages.create
    leave = stack.occupy(lambda **request: create(max_tokens=100, **request))
    before = attempts.count
    with pytest.raises(anthropic.InternalServerError) as caught:
        create(**message_request(stack))
    leave()
    assert (caught.value.status_code, kind(caught.value)) == (504, "overloaded_error")
    assert attempts.count == before + 2


def test_a_request_timeout_is_not_retried(stack, attempts):
    stack = stack(relay={"REQUEST_TIMEOUT_SECS": "1"})
    with pytest.raises(anthropic.InternalServerError) as caught:
        sdk(stack, attempts).messages.create(**message_request(stack, "hold"))
    assert (caught.value.status_code, kind(caught.value)) == (504, "timeout_error")
    assert attempts.count == 1
    stack.seen("left")


def test_a_worker_killed_in_mid_stream_raises(stack, attempts):
    stack = stack()
    with sdk(stack, attempts).messages.stream(**message_request(stack, "hold")) as stream:
        words = iter(stream.text_stream)
        assert [next(words), next(words)] == ["Hello", " from"]
        stack.kill_worker()
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(words)
    assert kind(caught.value)
    assert attempts.count == 1, "a request whose response has begun must not be sent again"


def test_closing_a_stream_reaches_the_backend(stack, attempts):
    stack = stack()
    with sdk(stack, attempts).messages.stream(**message_request(stack, "hold")) as stream:
        assert next(iter(stream.text_stream)) == "Hello"
        stack.seen("running")
    stack.seen("left")


def test_a_real_llama_server_answers(stack, attempts):
    messages = sdk(stack(workers=[llama()]), attempts).messages
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = messages.create(**request)
    assert answer.stop_reason and answer.usage.output_tokens
    with messages.stream(**request) as stream:
        assert stream.get_final_message().stop_reason
