// One streamed chat request, sent as any client sends it, with its timings.

import { ApiError, fetchAsClient, problem } from './api.js';

/** The last event of a complete response. */
const DONE = '[DONE]';

/**
 * Calls `onText` with each piece of the response. Resolves to {text, firstMs, totalMs, tokens, pieces, stopped}; `tokens` is null if the
 * backend does not report it. A response without its last event is a failure. Aborting `signal` ends it early, which is not a failure.
 */
export async function streamChat({ model, prompt, key, signal, onText }) {
  const began = performance.now();
  const result = { text: '', firstMs: null, totalMs: 0, tokens: null, pieces: 0, stopped: false };
  let complete = false;
  try {
    const response = await fetchAsClient('v1/chat/completions', key, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ model, stream: true, stream_options: { include_usage: true }, messages: [{ role: 'user', content: prompt }] }),
      signal,
    });
    if (!response.ok) throw await problem(response);
    for await (const data of events(response.body)) {
      if (data === DONE) complete = true;
      else take(JSON.parse(data), result, began, onText);
    }
    if (!complete) throw connectionLost(result);
  } catch (error) {
    if (signal?.aborted) result.stopped = true;
    else if (error instanceof ApiError) throw error;
    else if (error instanceof SyntaxError) throw new ApiError(0, 'broken', `The response ended prematurely: ${error.message}`);
    else if (!complete) throw connectionLost(result);
  }
  result.totalMs = performance.now() - began;
  return result;
}

function connectionLost({ text }) {
  return new ApiError(0, 'connection_lost', `Connection lost: ${text ? 'the response is incomplete' : 'no response was received'}.`);
}

function take(data, result, began, onText) {
  if (data.error) throw new ApiError(0, data.error.code ?? '', data.error.message ?? 'The response ended prematurely.');
  if (data.usage?.completion_tokens) result.tokens = data.usage.completion_tokens;
  const delta = data.choices?.[0]?.delta ?? {};
  const piece = delta.content || '';
  // A model that reasons first has begun its response.
  if (!piece && !delta.reasoning_content && !delta.reasoning) return;
  result.firstMs ??= performance.now() - began;
  result.pieces += 1;
  if (!piece) return;
  result.text += piece;
  onText(piece);
}

/** Returns the data of each event; comments have none. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith('data:') ? line.slice(5).trim() : '';
      if (data) yield data;
    }
  }
}
