// What a worker's response and pages of other origins can do to a relay, in a real browser: nothing, unless a setting allows it.

import { createServer } from 'node:http';

import { expect, test } from '@playwright/test';

import { Site } from './lib/site.js';
import { logIn } from './lib/test.js';

/** The response of a malicious backend to any request. Its script would mark the page and the relay's origin. */
const PAGE = '<!doctype html><title>taken</title><script>document.title = "run"; fetch("/taken"); parent.postMessage("run", "*")</script>';

let site;
let backend;
let elsewhere;

/** A local server with one page for all paths, and the requests that it received. */
async function served(body, headers) {
  const requests = [];
  const server = createServer((request, response) => {
    requests.push(`${request.method} ${request.url}`);
    request.resume();
    if (request.url === '/v1/models') {
      response.setHeader('content-type', 'application/json');
      response.end('{"object":"list","data":[{"id":"m","object":"model"}]}');
      return;
    }
    response.writeHead(200, headers);
    response.end(body);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { requests, server, port: server.address().port };
}

test.beforeAll(async () => {
  backend = await served(PAGE, { 'content-type': 'text/html', 'service-worker-allowed': '/', 'set-cookie': 'taken=1' });
  elsewhere = await served('<!doctype html><title>elsewhere</title>', { 'content-type': 'text/html' });
});

test.afterAll(() => {
  backend.server.close();
  elsewhere.server.close();
});

test.afterEach(() => site.close());

async function start(env = {}) {
  site = await Site.start(env);
  const worker = site.bareWorker('malicious', { BACKEND_URL: `http://127.0.0.1:${backend.port}` });
  await worker.logged(/registered/);
  await expect.poll(async () => (await (await fetch(`${site.url}/v1/models`)).json()).data.length).toBe(1);
}

/** Another site than 127.0.0.1 to a browser. */
const otherSite = () => `http://localhost:${elsewhere.port}`;

for (const [name, env] of [['', {}], [', with an admin listener of its own', { ADMIN_LISTEN_ADDR: '127.0.0.1:0' }]]) {
  test(`a worker's page cannot run at the relay's origin${name}`, async ({ page }) => {
    await start(env);
    await logIn(page, site);
    await page.goto(otherSite());
    const before = backend.requests.length;
    await page.setContent(`<form method="post" enctype="multipart/form-data" action="${site.url}/v1/audio/transcriptions">
      <input name="model" value="m"><button>Go</button></form>`);
    await page.getByRole('button').click();
    await expect(page.getByText('cross_origin')).toBeVisible();
    for (const path of ['/v1/responses/resp_1', '/v1/responses/resp_2']) {
      await page.goto(site.url + path);
      await expect(page.getByText('cross_origin')).toBeVisible();
      expect(await page.title()).not.toBe('run');
    }
    expect(backend.requests.slice(before).filter((line) => !line.endsWith('/v1/models') && !line.endsWith('/health'))).toEqual([]);
  });
}

test("a worker's response is data for a page of the relay", async ({ page }) => {
  await start();
  await logIn(page, site);
  const answer = await page.evaluate(async () => {
    const body = JSON.stringify({ model: 'm', messages: [] });
    const response = await fetch('/v1/chat/completions', { method: 'POST', headers: { 'content-type': 'application/json' }, body });
    return [response.status, response.headers.get('content-type'), (await response.text()).slice(0, 15)];
  });
  expect(answer).toEqual([200, 'text/plain; charset=utf-8', '<!doctype html>']);
  expect((await page.context().cookies()).map(({ name }) => name)).not.toContain('taken');
  const registered = page.evaluate(() => navigator.serviceWorker.register('/v1/responses/resp_1', { scope: '/' }));
  await expect(registered).rejects.toThrow();
});

test('page under a rebound name reads nothing', async ({ playwright }) => {
  await start();
  const browser = await playwright.chromium.launch({ args: ['--host-resolver-rules=MAP rebound.test 127.0.0.1'] });
  const page = await browser.newPage();
  const response = await page.goto(`http://rebound.test:${new URL(site.url).port}/v1/models`);
  expect(response.status()).toBe(421);
  await browser.close();
});

test('only origins in ALLOWED_ORIGINS may send requests', async ({ page }) => {
  await start({ ALLOWED_ORIGINS: `https://chat.example,${otherSite()}` });
  await page.goto(otherSite());
  const read = (url) => page.evaluate(async (url) => {
    try {
      const body = JSON.stringify({ model: 'm', messages: [] });
      const response = await fetch(`${url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json', authorization: 'Bearer any' }, body });
      return [response.status, Boolean(response.headers.get('x-request-id'))];
    } catch (error) {
      return error.name;
    }
  }, url);
  expect(await read(site.url)).toEqual([200, true]);
  const before = backend.requests.length;
  await page.goto(`http://127.0.0.1:${elsewhere.port}`);
  expect(await read(site.url)).toBe('TypeError');
  expect(backend.requests.slice(before).filter((line) => line.startsWith('POST'))).toEqual([]);
});
