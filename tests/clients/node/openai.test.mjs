// openai-node against relay and worker.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { MODEL, OPENAI_TOOL, Stack, TEXT, errorOf, llama, load } from './control.mjs';

const { default: OpenAI } = load('openai');
const { VERSION } = load('openai/version');

const BUSY = { workers: [{ MAX_CONCURRENCY: '1' }] };

function sdk(stack, more = {}) {
  return new OpenAI({ apiKey: 'any', baseURL: `${stack.url}/v1`, maxRetries: 2, fetch: stack.fetch, ...more });
}

const create = (stack, more) => (body) => sdk(stack, more).chat.completions.create(body);

test('the SDK is the one that was measured', () => {
  assert.equal(VERSION.split('.')[0], '7');
});

test('a chat is answered with usage and a request id', async (t) => {
  const stack = await Stack.start(t);
  const answer = await create(stack)(stack.request());
  assert.equal(answer.choices[0].message.content, TEXT);
  assert.equal(answer.usage.total_tokens, 9);
  assert.ok(answer._request_id);
  assert.equal(stack.attempts, 1);
});

test('a chat stream ends with its finish reason', async (t) => {
  const stack = await Stack.start(t);
  const chunks = await Array.fromAsync(await create(stack)(stack.request('echo', { stream: true })));
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? '').join(''), TEXT);
  assert.equal(chunks.at(-1).choices[0].finish_reason, 'stop');
});

test('a tool call and its result go both ways', async (t) => {
  const stack = await Stack.start(t);
  const request = stack.request('call', { tools: [OPENAI_TOOL] });
  const { message } = (await create(stack)(request)).choices[0];
  const [called] = message.tool_calls;
  assert.deepEqual([called.function.name, called.function.arguments], ['weather', '{"city": "Oslo"}']);
  request.messages.push(message, { role: 'tool', tool_call_id: called.id, content: 'rain' });
  assert.equal((await create(stack)(request)).choices[0].message.content, TEXT);
});

test('a response is answered whole and streamed', async (t) => {
  const stack = await Stack.start(t);
  const request = { model: MODEL, input: stack.prompt('echo') };
  assert.equal((await sdk(stack).responses.create(request)).output_text, TEXT);
  const events = await Array.fromAsync(await sdk(stack).responses.create({ ...request, stream: true }));
  const words = events.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta);
  assert.equal(words.join(''), TEXT);
  assert.equal(events.at(-1).type, 'response.completed');
});

test('embeddings arrive as numbers', async (t) => {
  const stack = await Stack.start(t);
  for (const more of [{}, { encoding_format: 'float' }]) { // the SDK requests base64 by default
    const answer = await sdk(stack).embeddings.create({ model: MODEL, input: [stack.prompt('echo'), 'b'], ...more });
    assert.deepEqual(answer.data.map((item) => Array.from(item.embedding)), [[0.5, -0.25, 1], [0.5, -0.25, 1]]);
  }
});

test('models are listed and retrieved', async (t) => {
  const stack = await Stack.start(t);
  const listed = await Array.fromAsync(sdk(stack).models.list());
  assert.deepEqual(listed.map((model) => model.id), [MODEL]);
  assert.equal((await sdk(stack).models.retrieve(MODEL)).id, MODEL);
});

test('an unknown model is not found and not retried', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(sdk(stack).models.retrieve('other/model'));
  assert.ok(error instanceof OpenAI.NotFoundError, error);
  assert.equal(error.code, 'model_not_found');
  assert.equal(stack.attempts, 1);
});

test('a wrong key is an authentication error and not retried', async (t) => {
  const stack = await Stack.start(t, { relay: { MODELRELAY_REQUIRE_API_KEYS: 'true' } });
  const error = await errorOf(create(stack, { apiKey: 'mr-no-key' })(stack.request()));
  assert.ok(error instanceof OpenAI.AuthenticationError, error);
  assert.deepEqual([error.code, error.type], ['invalid_api_key', 'authentication_error']);
  assert.equal(stack.attempts, 1);
  const answer = await create(stack, { apiKey: await stack.newKey() })(stack.request());
  assert.equal(answer.choices[0].message.content, TEXT);
  assert.equal((await stack.seen()).at(-1).authorization, null, "the relay's own key reached the backend");
});

test('a refusal of the backend arrives as it is', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(create(stack)(stack.request('refuse')));
  assert.ok(error instanceof OpenAI.BadRequestError, error);
  assert.match(error.message, /maximum context length is 16 tokens/);
  assert.equal(stack.attempts, 1);
});

test('a full queue is a rate limit that the SDK waits out', async (t) => {
  const stack = await Stack.start(t, { relay: { MAX_QUEUE_LEN: '1', QUEUE_TIMEOUT_SECS: '4' }, ...BUSY });
  const leave = await stack.occupy(create(stack));
  const queued = create(stack)(stack.request());
  await stack.waitForQueue(1);
  const error = await errorOf(create(stack, { maxRetries: 0 })(stack.request()));
  assert.ok(error instanceof OpenAI.RateLimitError, error);
  assert.deepEqual([error.code, error.type], ['queue_full', 'rate_limit_error']);
  const retryAfter = Number(error.headers.get('retry-after'));
  assert.ok(Number.isInteger(retryAfter) && retryAfter >= 1 && retryAfter <= 60);

  const before = stack.attempts;
  stack.onAnswer = (response) => response.status === 429 && leave();
  assert.equal((await create(stack)(stack.request())).choices[0].message.content, TEXT);
  assert.equal(stack.attempts, before + 2, 'one refusal, one answer');
  await queued;
});

test('a queue timeout is retried', async (t) => {
  const stack = await Stack.start(t, { relay: { QUEUE_TIMEOUT_SECS: '1' }, ...BUSY });
  const leave = await stack.occupy(create(stack));
  const before = stack.attempts;
  const error = await errorOf(create(stack, { maxRetries: 1 })(stack.request()));
  await leave();
  assert.ok(error instanceof OpenAI.InternalServerError, error);
  assert.deepEqual([error.status, error.code], [504, 'queue_timeout']);
  assert.equal(stack.attempts, before + 2);
});

test('a request timeout is not retried', async (t) => {
  const stack = await Stack.start(t, { relay: { REQUEST_TIMEOUT_SECS: '1' } });
  const error = await errorOf(create(stack)(stack.request('hold')));
  assert.ok(error instanceof OpenAI.InternalServerError, error);
  assert.deepEqual([error.status, error.code], [504, 'request_timeout']);
  assert.equal(stack.attempts, 1);
  await stack.seen('left');
});

test('a worker killed before the first byte goes unnoticed', async (t) => {
  const stack = await Stack.start(t, { workers: [{}, {}] });
  const answer = create(stack)(stack.request('hold'));
  const [first] = await stack.seen('running');
  await stack.killWorker(first.worker);
  assert.notEqual((await stack.seen(undefined, { count: 2 })).at(-1).worker, first.worker);
  await stack.release();
  assert.equal((await answer).choices[0].message.content, TEXT);
  assert.equal(stack.attempts, 1);
});

for (const api of ['chat', 'responses']) {
  test(`a worker killed in mid-stream raises (${api})`, async (t) => {
    const stack = await Stack.start(t);
    const stream = api === 'chat'
      ? await create(stack)(stack.request('hold', { stream: true }))
      : await sdk(stack).responses.create({ model: MODEL, input: stack.prompt('hold'), stream: true });
    const words = [];
    const error = await errorOf(async () => {
      for await (const event of stream) {
        const word = api === 'chat' ? event.choices[0].delta.content : event.delta;
        if (word) words.push(word);
        if (words.length === 2) await stack.killWorker();
      }
    });
    assert.deepEqual(words, ['Hello', ' from']);
    assert.ok(error instanceof OpenAI.APIError, error);
    assert.equal(stack.attempts, 1, 'a request whose response has begun must not be sent again');
  });
}

test('closing a stream reaches the backend', async (t) => {
  const stack = await Stack.start(t);
  const stream = await create(stack)(stack.request('hold', { stream: true }));
  for await (const chunk of stream) {
    assert.equal(chunk.choices[0].delta.content, 'Hello');
    break; // leaving the loop closes the stream
  }
  await stack.seen('left');
});

test('a real llama-server answers', async (t) => {
  const worker = await llama(t);
  if (!worker) return;
  const stack = await Stack.start(t, { workers: [worker] });
  const request = { model: MODEL, messages: [{ role: 'user', content: 'hi' }], max_tokens: 8 };
  assert.ok((await create(stack)(request)).usage.completion_tokens);
  const chunks = await Array.fromAsync(await create(stack)({ ...request, stream: true }));
  assert.ok(chunks.at(-1).choices[0].finish_reason);
});
