"""The requests of Open WebUI's backend, against relay and worker.

Its calls, not the application, which needs gigabytes of model libraries: the same HTTP library at the same version, the
requests of `backend/open_webui/routers/openai.py` and `utils/headers.py` of RELEASE.
"""

import asyncio
import json

import aiohttp
import pytest
from conftest import MODEL, OPENAI_TOOL, TEXT, llama

RELEASE = "0.12.4"
USER = {
    "X-OpenWebUI-User-Name": "Ada%20Lovelace", "X-OpenWebUI-User-Id": "7a0c", "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "user", "X-OpenWebUI-Auth-Type": "jwt", "X-OpenWebUI-Chat-Id": "5c61",
}


def headers(key="any"):
    return {"Content-Type": "application/json", **USER, "Authorization": f"Bearer {key}"}


def post(stack, body, key="any", read=None, path="chat/completions"):
    """Returns status and body; a stream's body is the result of `read` for its lines."""

    async def send():
        async with aiohttp.ClientSession(trust_env=True) as session:
            async with session.post(f"{stack.url}/v1/{path}", data=json.dumps(body), headers=headers(key)) as answer:
                if "text/event-stream" in answer.headers.get("Content-Type", ""):
                    return answer.status, await read(answer)
                return answer.status, await answer.json()

    return asyncio.run(send())


async def frames(answer):
    lines = [line.decode().strip() async for line in answer.content]
    return [line.removeprefix("data: ") for line in lines if line]


def test_models_are_listed(stack):
    stack = stack()

    async def send():
        # First the check of the connection, then the list, like its settings page and its chat.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10), trust_env=True) as session:
            for sent in (headers(), {"Authorization": "Bearer any"}):
                async with session.get(f"{stack.url}/v1/models", headers=sent) as answer:
                    yield await answer.json()

    async def collect():
        return [[model["id"] for model in answer["data"]] async for answer in send()]

    assert asyncio.run(collect()) == [[MODEL], [MODEL]]


def test_a_chat_is_answered_and_nothing_of_its_user_reaches_the_backend(stack):
    stack = stack()
    # Requests for titles and tags of chats have this form, without a stream.
    status, answer = post(stack, stack.request(stream=False, max_tokens=1000))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, TEXT)
    [request] = stack.seen("done")
    assert not [name for name in request["headers"] if name.startswith("x-openwebui")]


def test_a_chat_stream_ends_with_done_and_carries_usage(stack):
    stack = stack()
    body = stack.request(stream=True, stream_options={"include_usage": True})
    status, lines = post(stack, body, read=frames)
    assert (status, lines[-1]) == (200, "[DONE]")
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == TEXT
    assert chunks[-1]["usage"]["total_tokens"] == 9


def test_a_tool_call_arrives_in_a_stream(stack):
    stack = stack()
    _, lines = post(stack, stack.request("call", stream=True, tools=[OPENAI_TOOL]), read=frames)
    assert json.loads(lines[0])["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "weather"


def test_embeddings_arrive_as_numbers(stack):
    stack = stack()
    _, answer = post(stack, {"model": MODEL, "input": [stack.prompt("echo")]}, path="embeddings")
    assert answer["data"][0]["embedding"] == [0.5, -0.25, 1.0]


def test_a_refusal_of_the_backend_arrives_as_it_is(stack):
    stack = stack()
    status, answer = post(stack, stack.request("refuse", stream=True))
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


def test_a_wrong_key_is_an_error_with_a_message(stack):
    stack = stack(relay={"MODELRELAY_REQUIRE_API_KEYS": "true"})
    status, answer = post(stack, stack.request(), key="mr-no-key")
    assert status == 401 and answer["error"]["message"]
    assert post(stack, stack.request(), key=stack.new_key())[0] == 200


def test_a_worker_killed_in_mid_stream_is_an_error_in_the_stream(stack):
    stack = stack()
    seen = []

    async def read(answer):
        async for line in answer.content:
            seen.append(line.decode())
            if " from" in seen[-1]:
                await asyncio.to_thread(stack.kill_worker)

    # If the connection were broken, Open WebUI would drop the text that it has shown.
    post(stack, stack.request("hold", stream=True), read=read)
    assert json.loads([line for line in seen if line.strip()][-1].removeprefix("data: "))["error"]["message"]
    assert not any("[DONE]" in line for line in seen)


def test_leaving_a_stream_reaches_the_backend(stack):
    stack = stack()

    async def read(answer):
        await answer.content.readline()
        answer.close()  # as when a user stops a response

    post(stack, stack.request("hold", stream=True), read=read)
    stack.seen("left")


def test_a_real_llama_server_answers(stack):
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
    _, lines = post(stack(workers=[llama()]), request, read=frames)
    assert lines[-1] == "[DONE]"
