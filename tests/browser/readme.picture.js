// The picture in the README: a fleet that has worked for some minutes. Not a test: `make picture` updates it.

import path from 'node:path';

import { logIn, test } from './lib/test.js';
import { Site } from './lib/site.js';

const MINUTES = 6;
const FILE = path.resolve(__dirname, '../../docs/pictures/dashboard.png');

test.setTimeout((MINUTES + 1) * 60_000);
test.use({ viewport: { width: 1280, height: 860 }, deviceScaleFactor: 1 });

test('the overview of a fleet at work', async ({ page }) => {
  const site = await Site.start();
  try {
    for (const [name, model] of [['gaming-pc', 'qwen3-8b'], ['lab-1', 'llama-3.3-70b'], ['lab-2', 'llama-3.3-70b']]) await site.worker(name, model);
    await logIn(page, site);
    const end = Date.now() + MINUTES * 60_000;
    for (let tick = 0; Date.now() < end; tick += 1) {
      // The changes of load over an hour, in minutes.
      const rate = 1 + Math.round(3 * Math.abs(Math.sin(tick / 70)));
      for (let i = 0; i < rate; i += 1) {
        const content = 'Tell me about relays. '.repeat(1 + ((tick * 7 + i * 3) % 6));
        const answer = site.chat(i % 3 ? 'llama-3.3-70b' : 'qwen3-8b', { stream: true, stream_options: { include_usage: true }, messages: [{ role: 'user', content }] });
        answer.then((response) => response.text()).catch(() => {});
      }
      await page.waitForTimeout(1000);
    }
    await page.screenshot({ path: FILE });
  } finally {
    await page.close();
    await site.close();
  }
});
