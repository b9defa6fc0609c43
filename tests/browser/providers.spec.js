// A relay with two providers: the choices between them have an effect.

import { copied, expect, inspect, logIn, test } from './lib/test.js';
import { SECRET, Site } from './lib/site.js';

let site;

test.beforeAll(async () => {
  const secrets = `workerSecrets: [{value: '${SECRET}'}]`;
  site = await Site.start({}, `providers:\n- name: home\n  ${secrets}\n- name: lab\n  ${secrets}\n`);
  await site.hands(3, (number) => ({ name: `lab-${number}`, models: ['big'], slots: 4, provider: 'lab' }));
  await site.hands(1, () => ({ name: 'home-0', models: ['small'], slots: 2, provider: 'home' }));
});

test.afterAll(() => site.close());

test.use({ permissions: ['clipboard-read', 'clipboard-write'] });

test('figures cover all providers or the selected one', async ({ page }) => {
  await logIn(page, site);
  await expect(page.getByText('of 14, 14 free')).toBeVisible();
  await page.getByRole('main').getByLabel('Provider').selectOption('home');
  await expect(page.getByText('of 2, 2 free')).toBeVisible();
  await inspect(page, 'overview-provider');
  await page.goto(`${site.url}/dashboard#/providers`);
  await page.getByLabel('Filter providers').fill('lab');
  await expect(page.getByRole('heading', { name: 'lab' })).toBeVisible();
  await expect(page.getByRole('heading', { name: 'home' })).toHaveCount(0);
});

test('machine is added to the selected provider', async ({ page }) => {
  await logIn(page, site, '/setup');
  await page.getByLabel('Provider', { exact: true }).selectOption('lab');
  expect(await copied(page, 'Start the worker')).toContain('PROVIDER_NAME=lab');
});

test('key is limited to a provider', async ({ page }) => {
  await logIn(page, site, '/dashboard#/keys');
  await page.getByRole('button', { name: 'New key' }).click();
  await page.getByLabel('Name').fill('for the lab');
  await page.getByRole('checkbox', { name: 'lab' }).check();
  await inspect(page, 'key-form-providers');
  await page.getByRole('button', { name: 'Create the key' }).click();
  await page.getByRole('button', { name: 'I have copied it' }).click();
  await expect(page.getByRole('row').filter({ hasText: 'for the lab' })).toContainText('all models of lab');
  expect((await site.admin('GET', '/admin/keys')).keys[0].providers).toEqual(['lab']);
});
