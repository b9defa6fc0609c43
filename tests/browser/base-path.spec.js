// The pages below a path of a reverse proxy, which strips the path from requests or keeps it.

import { createServer, request } from 'node:http';
import { connect } from 'node:net';

import { copied, createKey, expect, logIn, test } from './lib/test.js';
import { Site } from './lib/site.js';

const BASE = '/llm';
const VIEWS = ['Workers', 'Queue', 'Requests', 'Providers', 'Event log', 'API keys', 'Overview'];

let site;
let proxy;

test.use({ permissions: ['clipboard-read', 'clipboard-write'], expected: ['401'] });

// Closes the page first, because it reports an error when the relay stops.
test.afterEach(async ({ page }) => {
  await page.close();
  await site.close();
  proxy.close();
});

/** A proxy on a free port. Requests outside of the path get 404 and are listed in `outside`. */
async function startProxy(pass) {
  const server = createServer((incoming, answer) => {
    const path = below(server, pass, incoming);
    if (!path) return answer.writeHead(404).end();
    const onward = request(server.relay + path, { method: incoming.method, headers: incoming.headers }, (response) => {
      answer.writeHead(response.statusCode, response.headers);
      response.pipe(answer);
    });
    onward.on('error', () => answer.destroy());
    answer.on('close', () => onward.destroy());
    return incoming.pipe(onward);
  });
  server.on('upgrade', (incoming, socket) => {
    const path = below(server, pass, incoming);
    if (!path) return socket.destroy();
    const onward = connect(Number(new URL(server.relay).port), '127.0.0.1');
    const headers = Object.entries(incoming.headers).map(([name, value]) => `${name}: ${value}\r\n`);
    onward.write(`GET ${path} HTTP/1.1\r\n${headers.join('')}\r\n`);
    for (const [from, to] of [[socket, onward], [onward, socket]]) from.on('error', () => to.destroy()).pipe(to);
    return undefined;
  });
  server.outside = [];
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  server.url = `http://127.0.0.1:${server.address().port}${BASE}`;
  return server;
}

/** Returns the path for the relay; nothing if it is not below the base path. */
function below(server, pass, { url }) {
  if (url === BASE || url.startsWith(`${BASE}/`)) return pass(url);
  server.outside.push(url);
  return null;
}

const FORMS = { strips: (url) => url.slice(BASE.length) || '/', keeps: (url) => url };

for (const [form, pass] of Object.entries(FORMS)) {
  test(`every page works below a proxy that ${form} its path`, async ({ page }) => {
    proxy = await startProxy(pass);
    site = await Site.start({ PUBLIC_URL: proxy.url, MODELRELAY_REQUIRE_API_KEYS: 'true' });
    proxy.relay = site.url;
    site.pages = proxy.url;
    const failed = [];
    page.on('response', (response) => response.status() >= 400 && failed.push(`${response.status()} ${response.url()}`));
    page.on('requestfailed', (one) => {
      // Leaving a page aborts its requests.
      if (one.failure().errorText !== 'net::ERR_ABORTED') failed.push(`${one.failure().errorText} ${one.url()}`);
    });

    await logIn(page, site, '');
    await expect(page).toHaveURL(`${proxy.url}/dashboard`);
    await walk(page);
    await addMachine(page);
    await connectClient(page);
    await page.getByRole('button', { name: 'Log out' }).click();
    await expect(page.getByRole('button', { name: 'Log in to create one' })).toBeVisible();
    // No models are listed without a key.
    expect(failed.filter((line) => !line.startsWith('401 ') || !line.endsWith('/v1/models'))).toEqual([]);
    expect(proxy.outside).toEqual([]);
  });
}

async function walk(page) {
  for (const name of VIEWS) {
    const link = page.getByRole('navigation').getByRole('link', { name });
    await link.click();
    await expect(page.getByRole('heading', { level: 1, name })).toBeVisible();
    await expect(link).toHaveAttribute('aria-current', 'page');
    await expect(page.getByRole('navigation').locator('[aria-current]')).toHaveCount(1);
  }
}

async function addMachine(page) {
  await page.getByRole('main').getByRole('link', { name: 'Add a machine' }).click();
  await expect(page).toHaveURL(`${proxy.url}/setup`);
  await expect(page.getByLabel('Relay address, seen from that machine')).toHaveValue(proxy.url);
  await page.getByRole('radio', { name: 'Other' }).check();
  await page.getByLabel('Server address, seen from that machine').fill(await site.backend('fresh'));
  await page.getByLabel('Worker name (optional)').fill('garage');
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  const command = await copied(page, 'Start the worker');
  expect(command).toContain(`PROXY_URL=${proxy.url} `);
  site.line(command);
  await expect(page.getByText('garage is connected.')).toBeVisible();
  await expect(page.getByText('It serves fresh.')).toBeVisible();
  await page.getByRole('button', { name: 'Send a test request' }).click();
  await expect(page.getByRole('status').filter({ hasText: 'first token after' })).toBeVisible();
  await page.getByRole('link', { name: 'Show worker' }).click();
  await expect(page.getByRole('heading', { level: 1, name: 'garage' })).toBeVisible();
}

async function connectClient(page) {
  await page.getByRole('navigation').getByRole('link', { name: 'Connect a client' }).click();
  await expect(page).toHaveURL(`${proxy.url}/integrate`);
  await expect(page.getByLabel('Address of this relay')).toHaveValue(proxy.url);
  await createKey(page);
  await expect(page.getByLabel('Model', { exact: true })).toHaveValue('fresh');
  expect(await copied(page, 'OpenAI API')).toContain(`${proxy.url}/v1/chat/completions`);
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await expect(page.getByText(/first token after .* tokens in/)).toBeVisible();
}
