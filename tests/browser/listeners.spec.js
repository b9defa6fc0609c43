// A relay whose clients and admins have an address each: the pages name the right one, and their test boxes work.

import { execFile } from 'node:child_process';
import { promisify } from 'node:util';

import { copied, expect, expectNoSidewaysScroll, inspect, logIn, test } from './lib/test.js';
import { Site, TOKEN } from './lib/site.js';

const OWN_ADDRESS = { ADMIN_LISTEN_ADDR: '127.0.0.1:0', MODELRELAY_REQUIRE_API_KEYS: 'true' };

let site;

test.beforeAll(async () => {
  site = await Site.start(OWN_ADDRESS);
});

test.afterAll(() => site.close());

test.use({ permissions: ['clipboard-read', 'clipboard-write'], expected: ['401'] });

test('a new machine is asked something, by an admin', async ({ page }) => {
  await logIn(page, site, '/setup');
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  await site.worker('garage', 'fresh');
  await expect(page.getByText('It serves fresh.')).toBeVisible();
  await page.getByRole('button', { name: 'Send a test request' }).click();
  await expect(page.getByRole('group', { name: 'Answer' })).toContainText('Say hello');
  await expect.poll(async () => (await site.admin('GET', '/admin/keys')).keys.every((key) => key.revoked)).toBe(true);
});

test('a client is connected to its own address, and tried from here', async ({ page }) => {
  await site.worker('tower', 'tried');
  await page.goto(`${site.pages}/integrate`);
  // Nothing here is for clients, so that there is nothing to see without a login.
  await expect(page.getByRole('heading', { name: 'Log in' })).toBeVisible();
  await inspect(page, 'integrate-elsewhere-login');
  await page.getByLabel('Admin token').fill(TOKEN);
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByLabel('Address of this relay')).toHaveValue(site.url);
  await page.getByRole('button', { name: 'Make one for me' }).click();
  await page.getByLabel('Model', { exact: true }).selectOption('tried');
  await page.getByRole('button', { name: 'Ask', exact: true }).click();
  await expect(page.getByText(/first token after .* tokens in/)).toBeVisible();
  const { stdout } = await promisify(execFile)('sh', ['-c', await copied(page, 'OpenAI’s way')]);
  expect(stdout).toContain('[DONE]');
  await inspect(page, 'integrate-elsewhere-light');
  await page.setViewportSize({ width: 360, height: 780 });
  await expectNoSidewaysScroll(page);
  await page.emulateMedia({ colorScheme: 'dark' });
  await inspect(page, 'integrate-elsewhere-phone-dark');
});
