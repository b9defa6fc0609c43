// Stacks for the Node suites, through control.py; the SDKs themselves come from the cache.

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { createRequire } from 'node:module';

const control = JSON.parse(process.env.CLIENTS_CONTROL);
export const { model: MODEL, text: TEXT } = control;

/** Loads an installed package: a module can import only from its parent folders. */
export const load = createRequire(process.env.CLIENTS_NODE_MODULES + '/');

async function call(method, path, body) {
  const response = await fetch(control.control + path, { method, body: body && JSON.stringify(body) });
  const answer = await response.json();
  assert.ok(response.ok, answer.error);
  return answer;
}

/** A relay with workers, and a tag that identifies this test's requests to the backend. Ends with the test. */
export class Stack {
  tag = randomUUID();
  /** The number of HTTP requests of SDK clients, including their own retries. */
  attempts = 0;
  onAnswer = () => {};

  static async start(test, { relay = {}, workers = [{}] } = {}) {
    const stack = new Stack();
    Object.assign(stack, await call('POST', '/stacks', { relay, workers }));
    test.after(() => call('DELETE', `/stacks/${stack.id}`));
    return stack;
  }

  /** The `fetch` of the SDKs. */
  fetch = async (...request) => {
    this.attempts += 1;
    const response = await fetch(...request);
    await this.onAnswer(response);
    return response;
  };

  prompt(deed, tag = this.tag) {
    return `tag=${tag} do=${deed}`;
  }

  request(deed = 'echo', { tag, ...more } = {}) {
    return { model: MODEL, messages: [{ role: 'user', content: this.prompt(deed, tag) }], ...more };
  }

  /** Returns the backend's requests of this test, once there are `count` in `state`. */
  async seen(state, { count = 1, tag = this.tag } = {}) {
    const wanted = state ? `&state=${state}` : '';
    const requests = await call('GET', `/seen?tag=${tag}&count=${count}${wanted}`);
    assert.ok(requests.length >= count, `the backend saw ${JSON.stringify(requests)}`);
    return requests;
  }

  release(tag = this.tag) {
    return call('POST', `/release?tag=${tag}`);
  }

  killWorker(number = 0) {
    return call('POST', `/stacks/${this.id}/workers/${number}/kill`);
  }

  async newKey() {
    return (await this.admin('POST', '/admin/keys', { name: 'suite' })).secret;
  }

  async waitForQueue(length) {
    const deadline = Date.now() + 20_000;
    while (((await this.admin('GET', '/admin/stats')).queue_depth.local ?? 0) < length) {
      assert.ok(Date.now() < deadline, 'no request is queued');
    }
  }

  async admin(method, path, body) {
    const headers = { authorization: 'Bearer stack-admin', 'content-type': 'application/json' };
    const response = await fetch(this.url + path, { method, headers, body: body && JSON.stringify(body) });
    return response.json();
  }

  /** Occupies a worker's only slot through `create`, an SDK's call; returns a function that frees it. */
  async occupy(create) {
    const tag = `occupy-${this.tag}`;
    const answer = create(this.request('hold', { tag }));
    await this.seen('running', { tag });
    return async () => {
      await this.release(tag);
      await answer;
    };
  }
}

/** Returns a worker's settings for a real llama-server; skips the test if there is none. */
export async function llama(test) {
  const { url } = await call('GET', '/llama');
  if (url) return { BACKEND_URL: url };
  assert.notEqual(process.env.CI, 'true', 'no llama-server is in the cache: run scripts/backends/build');
  test.skip('no llama-server is in the cache: run scripts/backends/build');
  return null;
}

const weather = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
// The tool that the backend calls, in either dialect.
export const OPENAI_TOOL = { type: 'function', function: { name: 'weather', description: 'Of today', parameters: weather } };
export const ANTHROPIC_TOOL = { name: 'weather', description: 'Of today', input_schema: weather };

/** Returns the error with which a promise or an async function fails. */
export async function errorOf(doing) {
  try {
    await (typeof doing === 'function' ? doing() : doing);
  } catch (error) {
    return error;
  }
  assert.fail('no error was raised');
}
