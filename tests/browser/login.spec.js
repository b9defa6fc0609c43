// Login, logout, and the behaviour of a page when the login or the relay is gone.

import { expect, inspect, logIn, test } from './lib/test.js';
import { Site, TOKEN } from './lib/site.js';

const REFUSED = ['403', '429'];
const GONE = ['ERR_CONNECTION_REFUSED', 'ERR_INCOMPLETE_CHUNKED_ENCODING', 'ERR_CONNECTION_RESET', 'ERR_EMPTY_RESPONSE'];

let site;

test.beforeEach(async () => {
  site = await Site.start();
});

// Closes the page first, because it reports an error when the relay stops.
test.afterEach(async ({ page }) => {
  await page.close();
  await site.close();
});

test('root address redirects to the dashboard', async ({ page }) => {
  await page.goto(site.url);
  await expect(page).toHaveURL(`${site.url}/dashboard`);
  await expect(page.getByRole('heading', { name: 'Log in' })).toBeVisible();
  await inspect(page, 'login');
});

test.describe('with wrong tokens', () => {
  test.use({ expected: REFUSED });
  test('wrong token is rejected, right token is accepted', async ({ page }) => {
    await page.goto(`${site.url}/dashboard`);
    await page.getByLabel('Admin token').fill('guess');
    await page.keyboard.press('Enter');
    await expect(page.getByRole('alert')).toContainText('Wrong admin token.');
    await page.getByLabel('Admin token').fill(TOKEN);
    await page.keyboard.press('Enter');
    await expect(page.getByRole('heading', { name: 'Overview' })).toBeVisible();
  });
  test('repeated wrong tokens show a waiting time', async ({ page }) => {
    await page.goto(`${site.url}/dashboard`);
    for (let i = 0; i < 6; i += 1) {
      await page.getByLabel('Admin token').fill(`guess ${i}`);
      const answered = page.waitForResponse('**/dashboard/login');
      await page.getByRole('button', { name: 'Log in' }).click();
      await answered;
      await expect(page.getByRole('button', { name: 'Log in' })).toBeEnabled();
    }
    await expect(page.getByRole('alert')).toContainText(/Too many wrong tokens. Try again in \d+ s/);
  });
});

test('logout hides all data', async ({ page }) => {
  await logIn(page, site);
  await page.getByRole('button', { name: 'Log out' }).click();
  await expect(page.getByRole('heading', { name: 'Log in' })).toBeVisible();
  await expect(page.getByText('Requests per second')).toHaveCount(0);
});

test.describe('when the login ends elsewhere', () => {
  test.use({ expected: REFUSED });
  test('the next action shows the login form', async ({ page, context }) => {
    await logIn(page, site, '/dashboard#/keys');
    await context.clearCookies();
    await page.getByRole('button', { name: 'New key' }).click();
    await page.getByLabel('Name').fill('late');
    await page.getByRole('button', { name: 'Create the key' }).click();
    await expect(page.getByRole('heading', { name: 'Log in' })).toBeVisible();
    await page.getByLabel('Admin token').fill(TOKEN);
    await page.getByRole('button', { name: 'Log in' }).click();
    await expect(page.getByRole('heading', { name: 'API keys' })).toBeVisible();
  });
});

test.describe('when the relay is gone', () => {
  test.use({ expected: GONE });
  test('page reports the loss and resumes after the restart', async ({ page }) => {
    await logIn(page, site);
    site.relay.kill();
    await site.relay.ended;
    await expect(page.getByText('Connection lost, reconnecting …')).toBeVisible();
    await site.startRelay(new URL(site.url).host);
    await expect(page.getByText('Live', { exact: true })).toBeVisible();
    await site.hands(1, () => ({ name: 'after-all', models: ['m'] }));
    await page.goto(`${site.url}/dashboard#/workers`);
    await expect(page.getByRole('link', { name: 'after-all' })).toBeVisible();
  });
});

test('theme switch persists', async ({ page }) => {
  await page.emulateMedia({ colorScheme: 'light' });
  await logIn(page, site);
  const background = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
  const light = await background();
  await page.getByRole('button', { name: 'Switch to dark colours' }).click();
  expect(await background()).not.toBe(light);
  const dark = await background();
  await page.reload();
  expect(await background()).toBe(dark);
});

test('keyboard reaches every control', async ({ page }) => {
  await logIn(page, site);
  await page.goto(`${site.url}/dashboard#/keys`);
  await expect(page.getByRole('heading', { name: 'API keys' })).toBeVisible();
  await page.reload();
  await expect(page.getByRole('heading', { name: 'API keys' })).toBeVisible();
  await page.keyboard.press('Tab');
  await expect(page.getByRole('link', { name: 'Skip to content' })).toBeFocused();
  await page.keyboard.press('Enter');
  await page.keyboard.press('Tab');
  await expect(page.getByRole('button', { name: 'New key' })).toBeFocused();
  await page.keyboard.press('Enter');
  const dialog = page.getByRole('dialog', { name: 'New API key' });
  await expect(dialog.getByLabel('Name')).toBeFocused();
  // The focus stays inside the dialog, however often it moves.
  for (let i = 0; i < 12; i += 1) {
    await page.keyboard.press('Tab');
    expect(await dialog.evaluate((node) => node.contains(document.activeElement) || document.activeElement === document.body)).toBe(true);
  }
  await page.keyboard.press('Escape');
  await expect(dialog).toBeHidden();
  await expect(page.getByRole('button', { name: 'New key' })).toBeFocused();
});

test('relay without admin token shows instructions', async ({ page }) => {
  const bare = await Site.start({ MODELRELAY_ADMIN_TOKEN: '' });
  await page.goto(`${bare.url}/dashboard`);
  await expect(page.getByRole('heading', { name: 'No admin token' })).toBeVisible();
  await inspect(page, 'no-token');
  await bare.close();
});
