// A relay with separate addresses for clients, workers and admins: the pages show the right one, and their test boxes work.

import { execFile } from 'node:child_process';
import { promisify } from 'node:util';

import { copied, createKey, expect, expectNoSidewaysScroll, inspect, logIn, test } from './lib/test.js';
import { Site, TOKEN } from './lib/site.js';

const OWN_ADDRESSES = { ADMIN_LISTEN_ADDR: '127.0.0.1:0', WORKER_LISTEN_ADDR: '127.0.0.1:0', WORKERS_ON_CLIENT_PORT: 'false', MODELRELAY_REQUIRE_API_KEYS: 'true' };

let site;

test.beforeAll(async () => {
  site = await Site.start(OWN_ADDRESSES);
});

test.afterAll(() => site.close());

test.use({ permissions: ['clipboard-read', 'clipboard-write'], expected: ['401'] });

test('new machine dials the worker address and answers an admin', async ({ page }) => {
  await logIn(page, site, '/setup');
  await expect(page.getByLabel('Relay address, seen from that machine')).toHaveValue(site.workers);
  await expect(page.getByText(`WORKER_LISTEN_ADDR=0.0.0.0:${new URL(site.workers).port}`)).toBeVisible();
  await page.getByRole('radio', { name: 'Other' }).check();
  await page.getByLabel('Server address, seen from that machine').fill(await site.backend('fresh'));
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  const worker = site.line(await copied(page, 'Start the worker'));
  await expect(page.getByText('It serves fresh.')).toBeVisible();
  await page.getByRole('button', { name: 'Send a test request' }).click();
  await expect(page.getByRole('group', { name: 'Response' })).toContainText('Say hello');
  await expect.poll(async () => (await site.admin('GET', '/admin/keys')).keys.every((key) => key.revoked)).toBe(true);
  worker.kill();
});

test('client uses the client address, test request the page address', async ({ page }) => {
  await site.worker('tower', 'tried');
  await page.goto(`${site.pages}/integrate`);
  // Clients do not use this listener, so nothing is shown without a login.
  await expect(page.getByRole('heading', { name: 'Log in' })).toBeVisible();
  await inspect(page, 'integrate-elsewhere-login');
  await page.getByLabel('Admin token').fill(TOKEN);
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByLabel('Address of this relay')).toHaveValue(site.url);
  await createKey(page);
  await page.getByLabel('Model', { exact: true }).selectOption('tried');
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await expect(page.getByText(/first token after .* tokens in/)).toBeVisible();
  const { stdout } = await promisify(execFile)('sh', ['-c', await copied(page, 'OpenAI API')]);
  expect(stdout).toContain('[DONE]');
  await inspect(page, 'integrate-elsewhere-light');
  await page.setViewportSize({ width: 360, height: 780 });
  await expectNoSidewaysScroll(page);
  await page.emulateMedia({ colorScheme: 'dark' });
  await inspect(page, 'integrate-elsewhere-phone-dark');
});
