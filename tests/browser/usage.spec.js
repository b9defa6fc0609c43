// The usage of API keys: charts per day, sums, and the file for spreadsheets.

import { readFileSync } from 'node:fs';

import { csvOf, perKeyAndModel, unanswered } from '../../relay/web/usage-sums.js';
import { DAYS, dayOf, perDay } from '../../relay/web/days.js';
import { expect, inspect, logIn, test } from './lib/test.js';
import { Site } from './lib/site.js';

const FILE = 'usage.jsonl';

let site;

// Closes the page first, because it reports an error when the relay stops.
test.afterEach(async ({ page }) => {
  await page.close();
  await site?.close();
  site = null;
});

function line(day, [keyId, key], model, answered, input) {
  return {
    day, key_id: keyId, key, model,
    requests: { answered, failed: 1, cancelled: 2, refused: 3 },
    input_tokens: input, cached_tokens: 5, output_tokens: 6, estimated_input_tokens: 0, estimated_output_tokens: 7,
    slot_seconds: 90.5, wait_seconds: 0.25,
  };
}

const daysAgo = (days) => dayOf(Date.now() - days * 86_400_000);

test('usage is shown per key, per day, and as a file', async ({ page }) => {
  const rows = [
    line(daysAgo(20), ['k1', 'laptop'], 'qwen', 100, 4000),
    line(daysAgo(2), ['k1', 'laptop'], 'qwen', 200, 8000),
    line(daysAgo(2), ['k2', '=phone'], 'qwen', 300, 9000),
    line(daysAgo(1), [null, null], 'small', 1, 50),
  ];
  site = await Site.start({ USAGE_FILE: FILE }, null, { [FILE]: rows.map((row) => `${JSON.stringify(row)}\n`).join('') });
  await logIn(page, site, '/dashboard#/usage');
  const row = (name) => page.getByRole('row').filter({ has: page.getByRole('rowheader', { name }) });
  await expect(row('laptop')).toContainText('300');
  await expect(row('laptop')).toContainText('12,000');
  await expect(row('Without a key')).toContainText('small');
  await inspect(page, 'usage-filled');

  await page.getByLabel('Period').selectOption({ label: 'Last 7 days' });
  await expect(row('laptop')).toContainText('8,000');
  const chart = page.getByRole('slider', { name: 'Tokens, per day' });
  await chart.focus();
  await page.keyboard.press('ArrowLeft');
  await page.keyboard.press('ArrowLeft');
  await expect(chart).toHaveAttribute('aria-valuetext', /Input 17,000, Output 26/);

  await page.getByLabel('API key', { exact: true }).selectOption({ label: '=phone' });
  await expect(row('laptop')).toHaveCount(0);
  const downloading = page.waitForEvent('download');
  await page.getByRole('link', { name: 'Download CSV' }).click();
  const text = readFileSync(await (await downloading).path(), 'utf8');
  expect(text.split('\r\n')).toEqual([
    'day,key_id,key,model,answered,failed,cancelled,refused,input_tokens,cached_tokens,output_tokens,'
      + 'estimated_input_tokens,estimated_output_tokens,slot_seconds,wait_seconds',
    `${daysAgo(2)},k2,'=phone,qwen,300,1,2,3,9000,5,6,0,7,90.5,0.25`,
    '',
  ]);
});

test('usage in memory is shown as such', async ({ page }) => {
  site = await Site.start();
  await logIn(page, site, '/dashboard#/usage');
  await expect(page.getByText('Kept in memory only')).toBeVisible();
  await expect(page.getByText('No requests in this period.')).toBeVisible();
});

test('rows are summed per key and model', () => {
  const rows = [line('2026-11-25', ['k1', 'old'], 'm', 1, 10), line('2026-11-26', ['k1', 'new'], 'm', 2, 20), line('2026-11-26', ['k1', 'new'], 'n', 4, 40)];
  const [first, second] = perKeyAndModel(rows);
  expect(first).toMatchObject({ key: 'new', model: 'm', input_tokens: 30, requests: { answered: 3, refused: 6 } });
  expect([second.input_tokens, unanswered(second)]).toEqual([40, 6]);
  // The rows themselves stay as they are.
  expect(rows[0].requests.answered).toBe(1);
  expect(csvOf([line('2026-11-25', ['k', 'a,"b"'], 'm', 1, 2)])).toContain('\r\n2026-11-25,k,"a,""b""",m,1,');
});

test('days without requests have points', () => {
  const points = perDay([{ day: '2026-11-26' }, { day: '2026-12-09' }], '2026-11-25', '2026-11-27');
  expect(points.map((point) => point.rows.length)).toEqual([0, 1, 0]);
  const { at } = points[2];
  expect([DAYS.label(at), DAYS.range(points[0].at, at) / 86_400_000]).toEqual(['27 Nov', 6]);
  expect(DAYS.ticks(at, DAYS.range(0, 90 * 86_400_000)).length).toBe(7);
});
