// The pages' pure functions: reasons why requests wait, sums, and quoting for languages that are not run here.

import { expect, test } from '@playwright/test';

import { niceTicks, timeRange, timeTicks } from '../../relay/web/chart.js';
import { lasting, starting } from '../../relay/web/commands.js';
import { bytes, duration, milliseconds, percent } from '../../relay/web/format.js';
import { whyWaiting } from '../../relay/web/reasons.js';
import { CLIENTS } from '../../relay/web/snippets.js';
import { combined, lastMinute } from '../../relay/web/summary.js';

const provider = { name: 'local', enabled: true };
const model = { id: 'm', waiting: 1, workers: 1, open_workers: 1 };
const worker = { worker_id: 'w', name: 'gpu', load: 2, capacity: 4, draining: false, slots: null };
const slot = { id: 's0', state: 'ready', target: null, eta: null, models: [] };

test('why requests wait', () => {
  const why = (changes, workers) => whyWaiting({ ...provider, ...changes.provider }, { ...model, ...changes.model }, workers).words;
  expect(why({ provider: { enabled: false } }, [worker])).toContain('The provider is disabled');
  expect(why({ model: { workers: 0, open_workers: 0 } }, [])).toContain('No connected worker');
  expect(why({ model: { workers: 0, open_workers: 0 } }, [{ ...worker, draining: true }])).toContain('Only draining workers');
  const cold = { model: { open_workers: 0 } };
  const slotted = (changes) => [{ ...worker, slots: [{ ...slot, ...changes }] }];
  expect(why(cold, slotted({ state: 'loading', target: 'm' }))).toBe('gpu is loading it in slot s0.');
  expect(why(cold, slotted({ state: 'draining', target: 'm' }))).toBe('gpu is making room for it (draining) in slot s0.');
  expect(why({ model: { ...cold.model, asked_worker: 'gpu' } }, slotted({}))).toContain('gpu is assigned to load it');
  expect(why(cold, slotted({ models: [{ id: 'm', status: 'failed', message: 'out of memory' }] }))).toBe('gpu could not load it: out of memory');
  expect(why(cold, slotted({}))).toBe('1 worker can load this model; none has it loaded now.');
  expect(why({}, [{ ...worker, load: 4 }])).toBe('All 4 worker slots of 1 worker are busy.');
});

test('sums of several providers', () => {
  const part = { requests: 30, errors: 1, tokens_in: 5, tokens_out: 10, queue_depth: 1, in_flight: 2, ttft_p50: 100, ttft_p95: 200 };
  const silent = { ...part, requests: 0, errors: 0, ttft_p50: null, ttft_p95: null };
  const slow = { ...part, requests: 10, ttft_p50: 500, ttft_p95: 900 };
  const point = { at: 1, providers: { a: part, b: slow, c: silent } };
  expect(combined(point)).toEqual({ at: 1, requests: 40, errors: 2, tokensIn: 15, tokensOut: 30, queued: 3, inFlight: 6, p50: 200, p95: 900 });
  expect(combined(point, 'c')).toMatchObject({ requests: 0, p50: null, p95: null });
  expect(combined(point, 'new')).toMatchObject({ requests: 0, inFlight: 0 });
  expect(lastMinute([], 10_000)).toMatchObject({ requestsPerSecond: 0, p50: null, p95: null });
  expect(lastMinute([combined(point), combined(point, 'c')], 10_000)).toMatchObject({ requestsPerSecond: 2, p95: 900 });
});

test('numbers are human-readable', () => {
  expect([0, 59_499, 61_000, 3_600_000, 90_000_000].map(duration)).toEqual(['0 s', '59 s', '1 min 1 s', '1 h', '1 d 1 h']);
  expect([1.25, 12.4, 1234, 61_000].map(milliseconds)).toEqual(['1.3 ms', '12 ms', '1.23 s', '1 min 1 s']);
  expect([bytes(900), bytes(1536), bytes(64 << 20)]).toEqual(['900 B', '1.5 KiB', '64 MiB']);
  expect([percent(0, 0), percent(0, 5), percent(1, 1000), percent(1, 3)]).toEqual(['–', '0 %', '< 1 %', '33 %']);
  expect([niceTicks(0.5), niceTicks(1), niceTicks(95)]).toEqual([[0, 0.2, 0.4, 0.6], [0, 0.5, 1], [0, 50, 100]]);
});

test('chart shows up to an hour of data', () => {
  const minute = 60_000;
  const end = 100 * 15 * minute + 90_000;
  const range = (minutes) => timeRange(end - minutes * minute, end) / minute;
  expect([0, 3, 7, 60, 90].map(range)).toEqual([5, 5, 7, 60, 60]);
  const ticks = (minutes) => timeTicks(end, minutes * minute).map((at) => (end - at) / minute);
  expect(ticks(5)).toEqual([0.5, 1.5, 2.5, 3.5, 4.5]);
  expect(ticks(10)).toEqual([1.5, 3.5, 5.5, 7.5, 9.5]);
  expect(ticks(60)).toEqual([1.5, 16.5, 31.5, 46.5]);
});

test('machine shutdown stops the worker before Ollama', () => {
  const unit = (engine) => lasting({ system: 'linux', relay: 'http://r', provider: 'local', secret: 's', backend: { url: 'http://b', engine }, atOnce: 2 })[1].text;
  expect(unit('ollama')).toContain('\nAfter=network-online.target ollama.service\n');
  expect(unit('vllm')).toContain('\nAfter=network-online.target\n');
});

test('filled-in values stay within their quotes', () => {
  const odd = `a'b"c$(d)\`e\`%f<g>&\\`;
  const settings = { relay: 'http://r', provider: odd, secret: odd, backend: { url: 'http://b', engine: 'vllm' }, atOnce: 2, name: odd };
  const text = (system) => [...starting({ ...settings, system }), ...lasting({ ...settings, system })].map((block) => block.text).join('\n');
  const inShell = `'a'\\''b"c$(d)\`e\`%f<g>&\\'`;
  expect(text('linux')).toContain(`PROVIDER_NAME=${inShell} \\`);
  expect(text('linux')).toContain('Environment="WORKER_NAME=a\'b\\"c$(d)`e`%%f<g>&\\\\"');
  expect(text('macos')).toContain('<string>a\'b"c\\$(d)\\`e\\`%f&lt;g&gt;&amp;\\\\</string>');
  expect(text('container')).toContain(`WORKER_NAME: "a'b\\"c$$(d)\`e\`%f<g>&\\\\"`);
  expect(text('kubernetes')).toContain(`{name: WORKER_NAME, value: ${JSON.stringify(odd)}}`);
  expect(text('windows')).toContain("$env:WORKER_NAME = 'a''b\"c$(d)`e`%f<g>&\\'");
  expect(text('windows')).toContain(`\nname: ${JSON.stringify(odd)}\n`);
  for (const client of CLIENTS) {
    const whole = client.make({ base: 'http://r', key: odd, model: odd }).map((block) => block.text).join('\n');
    // The name is never unquoted: neither its own quotes nor anything that a shell would run.
    expect(whole, client.name).not.toContain(odd);
  }
});
