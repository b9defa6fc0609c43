// The dashboard with three machines: the shown data, and every command that it offers.

import { expect, expectNoSidewaysScroll, inspect, logIn, test } from './lib/test.js';
import { Site } from './lib/site.js';

const VIEWS = [
  ['#/', 'Overview'], ['#/workers', 'Workers'], ['#/queue', 'Queue'], ['#/requests', 'Requests'],
  ['#/providers', 'Providers'], ['#/journal', 'Event log'], ['#/keys', 'API keys'], ['#/usage', 'Usage'],
];

let site;

test.beforeAll(async () => {
  site = await Site.start({ QUEUE_TIMEOUT_SECS: '300' });
  await Promise.all([site.worker('tower'), site.worker('attic', 'demo', { MAX_CONCURRENCY: '2' })]);
  site.swappingWorker('swapper', ['coder', 'writer']);
});

test.afterAll(() => site.close());

const row = (page, name) => page.getByRole('row').filter({ has: page.getByRole('rowheader', { name }) });

test('worker list follows connects and disconnects', async ({ page }) => {
  await logIn(page, site, '/dashboard#/workers');
  for (const name of ['tower', 'attic', 'swapper']) await expect(row(page, name)).toBeVisible();
  await expect(row(page, 'tower')).toContainText('demo');
  const [hand] = await site.hands(1, () => ({ name: 'guest', models: ['borrowed'] }));
  await expect(row(page, 'guest')).toContainText('borrowed');
  hand.close();
  await expect(row(page, 'guest')).toHaveCount(0);
});

test('each view has its heading, no barrier, and fits a phone', async ({ page }) => {
  await logIn(page, site);
  for (const scheme of ['light', 'dark']) {
    await page.emulateMedia({ colorScheme: scheme });
    for (const [hash, heading] of VIEWS) {
      await page.goto(`${site.url}/dashboard${hash}`);
      await expect(page.getByRole('heading', { level: 1, name: heading, exact: true })).toBeVisible();
      await inspect(page, `${heading.toLowerCase().replace(' ', '-')}-${scheme}`);
    }
  }
  await page.setViewportSize({ width: 360, height: 780 });
  for (const [hash, heading] of VIEWS) {
    await page.goto(`${site.url}/dashboard${hash}`);
    await expect(page.getByRole('heading', { level: 1, name: heading, exact: true })).toBeVisible();
    await expectNoSidewaysScroll(page);
    await inspect(page, `${heading.toLowerCase().replace(' ', '-')}-phone`);
  }
});

test('slot operation is shown until done', async ({ page }) => {
  await logIn(page, site, '/dashboard#/workers');
  await row(page, 'swapper').getByRole('link', { name: 'swapper' }).click();
  await expect(page.getByRole('heading', { level: 1, name: 'swapper' })).toBeVisible();
  await page.getByRole('button', { name: 'Load coder in gpu0' }).click();
  const coder = page.getByRole('listitem').filter({ hasText: /^coder/ });
  await expect(coder.filter({ hasText: 'resident' })).toContainText('Load: done');
  await page.getByRole('button', { name: 'Pin coder in gpu0' }).click();
  await expect(coder.filter({ hasText: 'pinned' })).toContainText('Pin: done');
  await inspect(page, 'worker-light');
  // The slot keeps the pinned model: the worker refuses, and the page shows the reason.
  await page.getByRole('button', { name: 'Load writer in gpu0' }).click();
  await expect(page.getByRole('listitem').filter({ hasText: /^writer/ }).filter({ hasText: /Load: .*pinned/ })).toBeVisible();
  await page.getByRole('button', { name: 'Unpin coder in gpu0' }).click();
  await expect(page.getByRole('button', { name: 'Pin coder in gpu0' })).toBeVisible();
  await page.getByRole('button', { name: 'Unload coder in gpu0' }).click();
  await expect(page.getByText('no model loaded')).toBeVisible();
});

test('worker shows its pool, cluster and zone', async ({ page }) => {
  const worker = await site.worker('placed', 'elsewhere', { WORKER_POOL: 'spare', CLUSTER: 'home', ZONE: 'cellar' });
  await logIn(page, site, '/dashboard#/workers');
  await expect(row(page, 'placed')).toContainText('local · spare · home/cellar');
  await page.getByLabel('Filter workers').fill('home/cellar');
  await expect(row(page, 'tower')).toHaveCount(0);
  await page.getByRole('link', { name: 'placed' }).click();
  for (const label of ['spare', 'home', 'cellar']) await expect(page.getByRole('definition').filter({ hasText: label })).toBeVisible();
  worker.kill();
});

test('worker is refreshed and, after confirmation, drained', async ({ page }) => {
  await site.worker('leaver');
  await logIn(page, site, '/dashboard#/workers');
  await page.getByRole('link', { name: 'leaver' }).click();
  await page.getByRole('button', { name: 'Refresh models' }).click();
  await expect(page.getByText('Model refresh requested.')).toBeVisible();
  await page.getByRole('button', { name: 'Drain', exact: true }).click();
  const dialog = page.getByRole('dialog', { name: 'Drain leaver?' });
  await dialog.getByRole('button', { name: 'Go back' }).click();
  await expect(dialog).toBeHidden();
  await page.getByRole('button', { name: 'Drain', exact: true }).click();
  await inspect(page, 'drain-dialog');
  await dialog.getByRole('button', { name: 'Drain worker' }).click();
  await expect(page.getByText('This worker is not connected.')).toBeVisible();
});

test('queue shows why requests wait and cancels one', async ({ page }) => {
  const [hand, left] = await site.hands(2, (number) => [
    { name: 'slow', models: ['slow-model'] },
    { name: 'left', models: ['nowhere'] },
  ][number]);
  // A request for a model that no worker ever had is rejected at once; one for a model whose worker has disconnected waits.
  left.close();
  await expect.poll(async () => (await site.admin('GET', '/admin/workers')).workers.map(({ name }) => name)).not.toContain('left');
  const first = site.chat('slow-model');
  const second = site.chat('slow-model');
  const third = site.chat('nowhere');
  await logIn(page, site, '/dashboard#/queue');
  const waits = (model) => page.getByRole('listitem').filter({ has: page.getByRole('heading', { name: model }) });
  await expect(waits('slow-model')).toContainText('Its only worker slot is busy.');
  await expect(waits('nowhere')).toContainText('No connected worker serves this model.');
  await inspect(page, 'queue-waiting');
  await page.goto(`${site.url}/dashboard#/`);
  await expect(page.getByRole('list', { name: 'Needs attention' })).toContainText('1 request for nowhere waits.');

  await page.goto(`${site.url}/dashboard#/requests`);
  await expect(row(page, 'slow-model')).toHaveCount(2);
  const place = (model, state) => row(page, model).filter({ hasText: state }).getByRole('cell').nth(1);
  await expect(place('slow-model', 'queued')).toHaveText('1');
  await expect(place('slow-model', 'dispatched')).toHaveText('');
  await inspect(page, 'requests-waiting');
  // The page of the worker shows that the request runs there.
  await row(page, 'slow-model').getByRole('link', { name: 'slow', exact: true }).click();
  await expect(page.getByRole('heading', { name: 'slow', exact: true })).toBeVisible();
  await expect(row(page, 'slow-model')).toHaveCount(1);
  await page.goBack();
  await row(page, 'slow-model').filter({ hasText: 'dispatched' }).getByRole('button').click();
  await page.getByRole('dialog').getByRole('button', { name: 'Cancel the request' }).click();
  const answers = await Promise.race([first, second]);
  expect(answers.status).toBe(503);
  expect((await answers.json()).error.code).toBe('cancelled_by_admin');
  await expect(row(page, 'slow-model')).toHaveCount(1);
  hand.close();
  await row(page, 'nowhere').getByRole('button').click();
  await page.getByRole('dialog').getByRole('button', { name: 'Cancel the request' }).click();
  expect((await third).status).toBe(503);
});

test('a key is made with all its limits, shown once, and revoked', async ({ page, context }) => {
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  await logIn(page, site, '/dashboard#/keys');
  await page.getByRole('button', { name: 'New key' }).click();
  const form = page.getByRole('dialog', { name: 'New API key' });
  await form.getByLabel('Name').fill('laptop');
  await form.getByLabel('Models').fill('demo, coder');
  await form.getByLabel('Expires').selectOption({ label: 'In 30 days' });
  await form.getByLabel('Concurrent requests').fill('4');
  await form.getByLabel('Share of the queue, %').fill('25');
  await inspect(page, 'key-form');
  await form.getByRole('button', { name: 'Create the key' }).click();
  const shown = page.getByRole('dialog', { name: 'Key “laptop” is ready' });
  await expect(shown).toContainText('It is shown only once');
  await inspect(page, 'key-shown');
  await shown.getByRole('button', { name: 'Copy API key' }).click();
  await expect(shown.getByText('Copied', { exact: true })).toBeVisible();
  const secret = await page.evaluate(() => navigator.clipboard.readText());
  expect(secret).toMatch(/^mr-/);
  await shown.getByRole('button', { name: 'I have copied it' }).click();
  await expect(page.getByText(secret)).toHaveCount(0);
  const { keys } = await site.admin('GET', '/admin/keys');
  expect(keys).toMatchObject([{ name: 'laptop', models: ['demo', 'coder'], max_in_flight: 4, max_queue_percent: 25 }]);
  expect(Date.parse(keys[0].expires_at) - Date.now()).toBeGreaterThan(29 * 86_400_000);
  await page.getByRole('button', { name: 'Revoke laptop' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Revoke the key' }).click();
  await expect(row(page, 'laptop')).toHaveCount(0);
  await page.getByLabel('Which keys').selectOption({ label: 'All, including revoked and expired' });
  await expect(row(page, 'laptop')).toContainText('Revoked');
  expect((await site.admin('GET', '/admin/keys')).keys[0].revoked).toBe(true);
});

test.describe('with a rejected change', () => {
  test.use({ expected: ['status of 400'] });

  test('a key is changed, and a wrong value is explained', async ({ page }) => {
    const made = await site.admin('POST', '/admin/keys', { name: 'phone', models: ['demo'], expires_at: '2099-01-01T00:00:00Z', max_queue_percent: 25 });
    await logIn(page, site, '/dashboard#/keys');
    await page.getByRole('button', { name: 'Edit phone' }).click();
    const form = page.getByRole('dialog', { name: 'Edit “phone”' });
    await expect(form.getByLabel('Models')).toHaveValue('demo');
    await expect(form.getByLabel('Share of the queue, %')).toHaveValue('25');
    await inspect(page, 'key-edit');
    await form.getByLabel('Models').fill('x'.repeat(257));
    await form.getByRole('button', { name: 'Save' }).click();
    await expect(form.getByRole('alert')).toContainText('models: must be a list of 1 to 256 names');
    await form.getByLabel('Name').fill('tablet');
    await form.getByLabel('Models').fill('');
    await form.getByLabel('Concurrent requests').fill('8');
    await form.getByLabel('Class').selectOption('batch');
    await form.getByLabel('Weight').fill('0.5');
    await form.getByRole('button', { name: 'Save' }).click();
    await expect(row(page, 'tablet')).toContainText('0 of 8');
    await expect(row(page, 'tablet')).toContainText('batch, weight 0.5');
    await expect(row(page, 'tablet')).toContainText('all models');
    await expect(row(page, 'phone')).toHaveCount(0);
    const changed = (await site.admin('GET', '/admin/keys')).keys.find((key) => key.id === made.id);
    expect(changed).toMatchObject({ name: 'tablet', expires_at: '2099-01-01T00:00:00.000Z', max_in_flight: 8, max_queue_percent: 25, class: 'batch', weight: 0.5 });
    expect(changed.models).toBeUndefined();
  });
});

test('the event log is filtered by level and words', async ({ page }) => {
  const refused = await site.bareWorker('stranger', { WORKER_SECRET: 'wrong', BACKEND_URL: 'http://127.0.0.1:9' });
  await logIn(page, site, '/dashboard#/journal');
  const events = page.getByRole('main').getByRole('listitem');
  await expect(events.filter({ hasText: 'worker authentication failed' }).first()).toBeVisible();
  refused.kill();
  await expect(events.filter({ hasText: 'tower' }).first()).toBeVisible();
  await page.getByLabel('Level').selectOption({ label: 'Warnings and errors' });
  await expect(events.filter({ hasText: 'tower' })).toHaveCount(0);
  await page.getByLabel('Level').selectOption({ label: 'All events' });
  await page.getByLabel('Filter events').fill('tower registered');
  await expect(events.filter({ hasText: 'attic' })).toHaveCount(0);
  await expect(events.first()).toContainText('tower');
});

test('charts are read by keys, and as a table', async ({ page }) => {
  await site.chat('demo').then((answer) => answer.text());
  await logIn(page, site);
  const chart = page.getByRole('figure').filter({ hasText: 'Requests and errors' });
  const plot = chart.getByRole('slider');
  await expect(plot).toHaveAttribute('aria-valuetext', /Requests\/s [0-9.]+, Errors\/s/);
  await plot.focus();
  await page.keyboard.press('Home');
  await expect(chart).toContainText(/\d\d:\d\d:\d\d/);
  await page.keyboard.press('Escape');
  await expect(chart).toContainText('now');
  await chart.getByText('As a table').click();
  await expect(chart.getByRole('columnheader', { name: 'Errors/s' })).toBeVisible();
});

test('an update keeps the focus, the filter, and the row that the pointer is on', async ({ page }) => {
  await logIn(page, site, '/dashboard#/workers');
  await page.getByLabel('Filter workers').fill('tow');
  await expect(page.getByText('1 of 3 workers')).toBeVisible();
  const link = page.getByRole('link', { name: 'tower' });
  await link.focus();
  const [hand] = await site.hands(1, () => ({ name: 'tow-truck', models: ['demo'] }));
  await expect(page.getByText('2 of 4 workers')).toBeVisible();
  await expect(link).toBeFocused();
  await expect(page.getByLabel('Filter workers')).toHaveValue('tow');
  hand.close();
  await expect(page.getByText('1 of 3 workers')).toBeVisible();
  await expect(link).toBeFocused();
});
