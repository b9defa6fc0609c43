// Vercel's AI SDK, with its provider for OpenAI-compatible servers, against relay and worker.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { MODEL, Stack, TEXT, errorOf, llama, load } from './control.mjs';

const { APICallError, embedMany, generateText, isStepCount, jsonSchema, streamText, tool } = load('ai');
const { createOpenAICompatible } = load('@ai-sdk/openai-compatible');

const BUSY = { workers: [{ MAX_CONCURRENCY: '1' }] };

function provider(stack, more = {}) {
  return createOpenAICompatible({ name: 'relay', apiKey: 'any', baseURL: `${stack.url}/v1`, fetch: stack.fetch, includeUsage: true, ...more });
}

const optionsFor = (stack, deed = 'echo', { apiKey = 'any', ...more } = {}) => ({
  model: provider(stack, { apiKey })(MODEL), prompt: stack.prompt(deed), maxRetries: 0, ...more,
});

/** Returns the parts of a stream; an error reported by `onError` is thrown at its end. */
async function* parts(options) {
  let raised;
  const result = streamText({ ...options, onError: ({ error }) => { raised = error; } });
  for await (const part of result.stream) yield part;
  if (raised) throw raised;
}

test('a prompt is answered with usage', async (t) => {
  const stack = await Stack.start(t);
  const { text, usage, finishReason } = await generateText(optionsFor(stack));
  assert.deepEqual([text, finishReason], [TEXT, 'stop']);
  assert.deepEqual([usage.inputTokens, usage.outputTokens], [5, 4]);
  assert.equal(stack.attempts, 1);
});

test('a stream ends whole and carries usage', async (t) => {
  const stack = await Stack.start(t);
  const all = await Array.fromAsync(parts(optionsFor(stack)));
  const words = all.filter((part) => part.type === 'text-delta').map((part) => part.text);
  assert.equal(words.join(''), TEXT);
  assert.ok(words.length > 1);
  const end = all.at(-1);
  assert.deepEqual([end.type, end.finishReason, end.totalUsage.outputTokens], ['finish', 'stop', 4]);
});

test('a tool call is made and its result goes back', async (t) => {
  const stack = await Stack.start(t);
  const cities = [];
  const weather = tool({
    description: 'Of today',
    inputSchema: jsonSchema({ type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }),
    execute: async ({ city }) => { cities.push(city); return 'rain'; },
  });
  const { text, steps } = await generateText(optionsFor(stack, 'call', { tools: { weather }, stopWhen: isStepCount(3) }));
  assert.deepEqual([text, steps.length, cities], [TEXT, 2, ['Oslo']]);
});

test('embeddings arrive as numbers', async (t) => {
  const stack = await Stack.start(t);
  const { embeddings } = await embedMany({ model: provider(stack).embeddingModel(MODEL), values: [stack.prompt('echo'), 'b'] });
  assert.deepEqual(embeddings, [[0.5, -0.25, 1], [0.5, -0.25, 1]]);
});

test('an unknown model is not found and not retried', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(generateText({ ...optionsFor(stack), model: provider(stack)('other/model'), maxRetries: 2 }));
  assert.ok(APICallError.isInstance(error), error);
  assert.deepEqual([error.statusCode, error.data.error.code, stack.attempts], [404, 'model_not_found', 1]);
});

test('a wrong key is a 401 and not retried', async (t) => {
  const stack = await Stack.start(t, { relay: { MODELRELAY_REQUIRE_API_KEYS: 'true' } });
  const error = await errorOf(generateText(optionsFor(stack, 'echo', { apiKey: 'mr-no-key', maxRetries: 2 })));
  assert.deepEqual([error.statusCode, stack.attempts], [401, 1]);
  assert.equal((await generateText(optionsFor(stack, 'echo', { apiKey: await stack.newKey() }))).text, TEXT);
});

test('a refusal of the backend arrives as it is', async (t) => {
  const stack = await Stack.start(t);
  const error = await errorOf(generateText(optionsFor(stack, 'refuse', { maxRetries: 2 })));
  assert.deepEqual([error.statusCode, stack.attempts], [400, 1]);
  assert.match(error.message, /maximum context length is 16 tokens/);
});

test('a full queue is waited out', async (t) => {
  const stack = await Stack.start(t, { relay: { MAX_QUEUE_LEN: '1', QUEUE_TIMEOUT_SECS: '4' }, ...BUSY });
  const leave = await stack.occupy((body) => generateText(optionsFor(stack, 'hold', { prompt: body.messages[0].content })));
  const queued = generateText(optionsFor(stack));
  await stack.waitForQueue(1);
  const before = stack.attempts;
  stack.onAnswer = (response) => response.status === 429 && leave();
  assert.equal((await generateText(optionsFor(stack, 'echo', { maxRetries: 2 }))).text, TEXT);
  assert.equal(stack.attempts, before + 2, 'one refusal, one answer');
  await queued;
});

test('a worker killed in mid-stream raises', async (t) => {
  const stack = await Stack.start(t);
  const words = [];
  const error = await errorOf(async () => {
    for await (const part of parts(optionsFor(stack, 'hold', { maxRetries: 2 }))) {
      if (part.type === 'text-delta') words.push(part.text);
      if (part.type === 'text-delta' && words.length === 2) await stack.killWorker();
    }
  });
  assert.deepEqual(words, ['Hello', ' from']);
  assert.ok(error, 'an error is reported');
  assert.equal(stack.attempts, 1, 'a request whose response has begun must not be sent again');
});

test('leaving a stream reaches the backend', async (t) => {
  const stack = await Stack.start(t);
  const leave = new AbortController();
  for await (const part of parts(optionsFor(stack, 'hold', { abortSignal: leave.signal }))) {
    if (part.type === 'text-delta') leave.abort();
  }
  await stack.seen('left');
});

test('a real llama-server answers', async (t) => {
  const worker = await llama(t);
  if (!worker) return;
  const stack = await Stack.start(t, { workers: [worker] });
  const options = optionsFor(stack, 'echo', { prompt: 'hi', maxOutputTokens: 8 });
  assert.ok((await generateText(options)).usage.outputTokens);
  assert.ok((await Array.fromAsync(parts(options))).at(-1).finishReason);
});
