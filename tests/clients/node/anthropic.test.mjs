// @anthropic-ai/sdk against relay and worker.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { ANTHROPIC_TOOL, MODEL, Stack, TEXT, errorOf, llama, load } from './control.mjs';

const { default: Anthropic } = load('@anthropic-ai/sdk');
const { VERSION } = load('@anthropic-ai/sdk/version');

const BUSY = { workers: [{ MAX_CONCURRENCY: '1' }] };

function sdk(stack, more = {}) {
  return new Anthropic({ apiKey: 'any', baseURL: stack.url, maxRetries: 2, fetch: stack.fetch, ...more });
}

const create = (stack, more) => (body) => sdk(stack, more).messages.create({ max_tokens: 100, ...body });
const kind = (error) => error.error.error.type;

test('the SDK is the one that was measured', () => {
  assert.equal(VERSION.split('.')[0], '1');
});

test('a message is answered with usage and a request id', async (t) => {
  const stack = await Stack.start(t);
  const message = await create(stack)(stack.request());
  assert.deepEqual([message.content[0].text, message.stop_reason], [TEXT, 'end_turn']);
  assert.deepEqual([message.usage.input_tokens, message.usage.output_tokens], [5, 4]);
  assert.ok(message._request_id);
  assert.equal(stack.attempts, 1);
});

test('a message stream ends with its stop reason', async (t) => {
  const stack = await Stack.start(t);
  const message = await sdk(stack).messages.stream({ max_tokens: 100, ...stack.request() }).finalMessage();
  assert.deepEqual([message.content[0].text, message.stop_reason], [TEXT, 'end_turn']);
});

test('a tool call and its result go both ways', async (t) => {
  const stack = await Stack.start(t);
  const request = { max_tokens: 100, ...stack.request('call', { tools: [ANTHROPIC_TOOL] }) };
  const answer = await sdk(stack).messages.stream(request).finalMessage();
  const [called] = answer.content;
  assert.deepEqual([called.name, called.input, answer.stop_reason], ['weather', { city: 'Oslo' }, 'tool_use']);
  const result = { type: 'tool_result', tool_use_id: called.id, content: 'rain' };
  request.messages.push({ role: 'assistant', content: answer.content }, { role: 'user', content: [result] });
  assert.equal((await create(stack)(request)).content[0].text, TEXT);
});

test('models are listed and retrieved', async (t) => {
  const stack = await Stack.start(t);
  const listed = await Array.fromAsync(sdk(stack).models.list());
  assert.deepEqual(listed.map((model) => [model.id, model.type]), [[MODEL, 'model']]);
  assert.ok((await sdk(stack).models.retrieve(MODEL)).display_name);
});

test('an unknown model is not found and not retried', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(sdk(stack).models.retrieve('other/model'));
  assert.ok(error instanceof Anthropic.NotFoundError, error);
  assert.equal(kind(error), 'not_found_error');
  assert.equal(stack.attempts, 1);
});

test('a wrong key is an authentication error and not retried', async (t) => {
  const stack = await Stack.start(t, { relay: { MODELRELAY_REQUIRE_API_KEYS: 'true' } });
  const error = await errorOf(create(stack, { apiKey: 'mr-no-key' })(stack.request()));
  assert.ok(error instanceof Anthropic.AuthenticationError, error);
  assert.equal(kind(error), 'authentication_error');
  assert.equal(stack.attempts, 1);
  const message = await create(stack, { apiKey: await stack.newKey() })(stack.request());
  assert.equal(message.content[0].text, TEXT);
  assert.equal((await stack.seen()).at(-1)['x-api-key'], null, "the relay's own key reached the backend");
});

test('a refusal of the backend arrives as it is', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(create(stack)(stack.request('refuse')));
  assert.ok(error instanceof Anthropic.BadRequestError, error);
  assert.equal(error.error.error.message, "This model's maximum context length is 16 tokens.");
  assert.equal(stack.attempts, 1);
});

test('a full queue is a rate limit that the SDK waits out', async (t) => {
  const stack = await Stack.start(t, { relay: { MAX_QUEUE_LEN: '1', QUEUE_TIMEOUT_SECS: '4' }, ...BUSY });
  const leave = await stack.occupy(create(stack));
  const queued = create(stack)(stack.request());
  await stack.waitForQueue(1);
  const error = await errorOf(create(stack, { maxRetries: 0 })(stack.request()));
  assert.ok(error instanceof Anthropic.RateLimitError, error);
  assert.equal(kind(error), 'rate_limit_error');
  const retryAfter = Number(error.headers.get('retry-after'));
  assert.ok(Number.isInteger(retryAfter) && retryAfter >= 1 && retryAfter <= 60);
  assert.equal(error.requestID, error.error.request_id);

  const before = stack.attempts;
  stack.onAnswer = (response) => response.status === 429 && leave();
  assert.equal((await create(stack)(stack.request())).content[0].text, TEXT);
  assert.equal(stack.attempts, before + 2, 'one refusal, one answer');
  await queued;
});

test('a queue timeout is retried', async (t) => {
  const stack = await Stack.start(t, { relay: { QUEUE_TIMEOUT_SECS: '1' }, ...BUSY });
  const leave = await stack.occupy(create(stack));
  const before = stack.attempts;
  const error = await errorOf(create(stack, { maxRetries: 1 })(stack.request()));
  await leave();
  assert.ok(error instanceof Anthropic.InternalServerError, error);
  assert.deepEqual([error.status, kind(error)], [504, 'overloaded_error']);
  assert.equal(stack.attempts, before + 2);
});

test('a request timeout is not retried', async (t) => {
  const stack = await Stack.start(t, { relay: { REQUEST_TIMEOUT_SECS: '1' } });
  const error = await errorOf(create(stack)(stack.request('hold')));
  assert.ok(error instanceof Anthropic.InternalServerError, error);
  assert.deepEqual([error.status, kind(error)], [504, 'timeout_error']);
  assert.equal(stack.attempts, 1);
  await stack.seen('left');
});

test('a worker killed in mid-stream raises', async (t) => {
  const stack = await Stack.start(t);
  const stream = await create(stack)(stack.request('hold', { stream: true }));
  const words = [];
  const error = await errorOf(async () => {
    for await (const event of stream) {
      if (event.type === 'content_block_delta') words.push(event.delta.text);
      if (words.length === 2) await stack.killWorker();
    }
  });
  assert.deepEqual(words, ['Hello', ' from']);
  assert.ok(error instanceof Anthropic.APIError, error);
  assert.ok(kind(error));
  assert.equal(stack.attempts, 1, 'a request whose response has begun must not be sent again');
});

test('closing a stream reaches the backend', async (t) => {
  const stack = await Stack.start(t);
  const stream = await create(stack)(stack.request('hold', { stream: true }));
  for await (const event of stream) {
    if (event.type === 'content_block_delta') break; // leaving the loop closes the stream
  }
  await stack.seen('left');
});

test('a real llama-server answers', async (t) => {
  const worker = await llama(t);
  if (!worker) return;
  const stack = await Stack.start(t, { workers: [worker] });
  const request = { model: MODEL, messages: [{ role: 'user', content: 'hi' }], max_tokens: 8 };
  assert.ok((await create(stack)(request)).usage.output_tokens);
  assert.ok((await sdk(stack).messages.stream(request).finalMessage()).stop_reason);
});
