// Connecting a client: the commands copied from the page work.

import { execFile } from 'node:child_process';
import { promisify } from 'node:util';

import { copied, createKey, expect, expectNoSidewaysScroll, inspect, logIn, test } from './lib/test.js';
import { Site } from './lib/site.js';

const CLIENTS = ['curl', 'OpenAI · Python', 'OpenAI · TypeScript', 'Anthropic · Python', 'Anthropic · TypeScript', 'LangChain', 'LiteLLM', 'Open WebUI', 'Claude Code', 'Codex', 'opencode', 'Continue'];

let site;

test.beforeAll(async () => {
  site = await Site.start({ MODELRELAY_REQUIRE_API_KEYS: 'true' });
  await site.worker('tower');
});

test.afterAll(() => site.close());

test.use({ permissions: ['clipboard-read', 'clipboard-write'], expected: ['401'] });

test('a key is made, and the copied line runs', async ({ page }) => {
  await logIn(page, site, '/integrate');
  await expect(page.getByLabel('Model', { exact: true })).toHaveValue('demo');
  await createKey(page);
  const key = await page.getByLabel('API key').inputValue();
  const main = page.getByRole('main');
  await expect(main).not.toContainText(key);
  const line = await copied(page, 'OpenAI API');
  expect(line).toContain(key);
  const { stdout } = await promisify(execFile)('sh', ['-c', line]);
  expect(stdout).toContain('[DONE]');
  await inspect(page, 'integrate-light');
  await page.getByRole('button', { name: 'Show', exact: true }).click();
  await expect(main).toContainText(key);

  for (const client of CLIENTS) {
    await page.getByRole('radio', { name: client, exact: true }).check();
    const texts = await page.getByRole('main').locator('pre').allTextContents();
    expect(texts.join('\n'), client).toContain(site.url);
    if (client !== 'Open WebUI') expect(texts.join('\n'), client).toContain('demo');
    expect(texts.join('\n'), client).toContain(key);
    expect(texts.join('\n'), client).not.toContain('undefined');
  }
  await page.getByRole('radio', { name: 'opencode' }).check();
  expect(JSON.parse(await copied(page, 'opencode.json')).provider.modelrelay.options).toEqual({ baseURL: `${site.url}/v1`, apiKey: key });
});

test('response streams and can be stopped', async ({ page }) => {
  const { secret } = await site.admin('POST', '/admin/keys', { name: 'pasted' });
  // A user with a key and without a login.
  await page.goto(`${site.url}/integrate`);
  await expect(page.getByText('Enter a key to list the models.')).toBeVisible();
  await page.getByLabel('API key').fill(secret);
  await page.getByLabel('API key').blur();
  await expect(page.getByLabel('Model', { exact: true })).toHaveValue('demo');
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await expect(page.getByText(/first token after .* tokens in/)).toBeVisible();
  const long = Array.from({ length: 400 }, (_, i) => `word${i}`).join(' ');
  await page.getByLabel('Prompt').fill(long);
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await expect(page.getByText('Receiving …')).toBeVisible();
  await page.getByRole('button', { name: 'Stop' }).click();
  await expect(page.getByText(/^Stopped: /)).toBeVisible();
  // Stopping cancels the request at the relay and at the backend.
  await expect.poll(async () => (await site.admin('GET', '/admin/requests')).requests.length).toBe(0);
  await page.setViewportSize({ width: 360, height: 780 });
  await expectNoSidewaysScroll(page);
  await page.emulateMedia({ colorScheme: 'dark' });
  await inspect(page, 'integrate-phone-dark');
});

/** Sends a prompt from the page to a worker that the test simulates; resolves once the first piece is shown. */
async function beginAnswer(page, name) {
  const { secret } = await site.admin('POST', '/admin/keys', { name });
  const [hand] = await site.hands(1, () => ({ name, models: [name] }));
  await page.goto(`${site.url}/integrate`);
  await page.getByLabel('API key').fill(secret);
  await page.getByLabel('API key').blur();
  await page.getByLabel('Model', { exact: true }).selectOption(name);
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await expect.poll(() => hand.requests.length).toBe(1);
  const send = (type, more) => hand.send({ type, request_id: hand.requests[0], ...more });
  send('response_chunk', { chunk: `data: ${JSON.stringify({ choices: [{ delta: { content: 'A first' } }] })}\n\n` });
  const answer = page.getByRole('group', { name: 'Response' });
  await expect(answer).toHaveText('A first');
  return { hand, answer, send };
}

test('response that ends early is incomplete', async ({ page }) => {
  const { hand, answer, send } = await beginAnswer(page, 'ends-early');
  send('response_complete', { status_code: 200, headers: {} });
  await expect(page.getByText('Connection lost: the response is incomplete.')).toBeVisible();
  await expect(answer).toHaveText('A first');
  hand.close();
});

test('response of a lost worker ends with the relay’s error', async ({ page }) => {
  const { hand, answer } = await beginAnswer(page, 'lost');
  hand.close();
  await expect(page.getByText(/worker .*(lost|disconnected)/)).toBeVisible();
  await expect(answer).toHaveText('A first');
});

test('a model’s name cannot leave its quotes', async ({ page }) => {
  const name = `it's "$(touch /tmp/x)" \`x\` \\ <b>`;
  const [hand] = await site.hands(1, () => ({ name: 'odd', models: [name] }));
  await logIn(page, site, '/integrate');
  await page.getByLabel('Model', { exact: true }).selectOption(name);
  const line = await copied(page, 'OpenAI API');
  const { stdout } = await promisify(execFile)('sh', ['-c', line.replace(/^curl/, 'printf "%s\\n"')]);
  expect(stdout).toContain(JSON.stringify(name));
  await page.getByRole('radio', { name: 'opencode' }).check();
  expect(JSON.parse(await copied(page, 'opencode.json')).model).toBe(`modelrelay/${name}`);
  hand.close();
});
