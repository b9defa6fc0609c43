// Every test fails on errors that a user would not see: an error in the console, a request to another origin, a violation of the
// content policy, and, where a test checks for them, accessibility violations that axe finds.

import { AxeBuilder } from '@axe-core/playwright';
import { expect, test as base } from '@playwright/test';
import path from 'node:path';

import { TOKEN } from './site.js';

export { expect };

const PICTURES = path.resolve(__dirname, '../../../target/browser');

export const test = base.extend({
  /** Texts of console errors that the test provokes: a browser reports each failed request as one. */
  expected: [[], { option: true }],
  guarded: [
    async ({ page, expected }, use) => {
      const wrong = [];
      let origin = null;
      page.on('console', (message) => {
        if (message.type() !== 'error' && message.type() !== 'warning') return;
        if (!expected.some((words) => message.text().includes(words))) wrong.push(`console: ${message.text()}`);
      });
      page.on('pageerror', (error) => wrong.push(`exception: ${error.stack}`));
      page.on('request', (request) => {
        const url = new URL(request.url());
        if (url.protocol === 'data:') return;
        origin ??= url.origin;
        if (url.origin !== origin) wrong.push(`request off the origin: ${url}`);
      });
      await page.addInitScript(() => {
        addEventListener('securitypolicyviolation', (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
      });
      await use();
      expect(wrong).toEqual([]);
    },
    { auto: true },
  ],
});

export async function logIn(page, site, where = '/dashboard') {
  await page.goto(site.pages + where);
  // If clients use another address, the pages are for admins only.
  if (where === '/integrate' && site.pages === site.url) await page.getByRole('button', { name: 'Log in to create one' }).click();
  await page.getByLabel('Admin token').fill(TOKEN);
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByText('Live', { exact: true })).toBeAttached();
}

/** Creates a key on the page for clients, and waits until it is filled in. */
export async function createKey(page) {
  await page.getByRole('button', { name: 'Create a key' }).click();
  await expect(page.getByLabel('API key')).toHaveValue(/^mr-/);
}

/** Returns the text that the copy button of the block with this title copies. */
export async function copied(page, title) {
  await page.evaluate(() => navigator.clipboard.writeText(''));
  await page.getByRole('button', { name: `Copy ${title}`, exact: true }).click();
  const clipboard = () => page.evaluate(() => navigator.clipboard.readText());
  await expect.poll(clipboard).not.toBe('');
  return clipboard();
}

/** Checks the page for accessibility violations, and stores a screenshot of it. */
export async function inspect(page, name) {
  const { violations } = await new AxeBuilder({ page }).analyze();
  const words = violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 160)).join(' | ')}`);
  // In a screenshot of the whole page, fixed elements would otherwise be in its middle.
  await page.evaluate(() => scrollTo(0, 0));
  await page.screenshot({ path: `${PICTURES}/${name}.png`, fullPage: true });
  expect(words).toEqual([]);
}

export async function expectNoSidewaysScroll(page) {
  expect(await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth)).toBe(0);
}
