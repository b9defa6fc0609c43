// Adding a machine: the commands copied from the page are run unchanged, and the page shows the result.

import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { copied, expect, expectNoSidewaysScroll, inspect, logIn, test } from './lib/test.js';
import { SECRET, Site } from './lib/site.js';

let site;

test.beforeEach(async ({}, info) => {
  site = await Site.start(info.title.includes('requires keys') ? { MODELRELAY_REQUIRE_API_KEYS: 'true' } : {});
});

// Closes the page first, because it reports an error when the relay stops.
test.afterEach(async ({ page }) => {
  await page.close();
  await site.close();
});

test.use({ permissions: ['clipboard-read', 'clipboard-write'] });

test('empty fleet opens the setup page', async ({ page }) => {
  await logIn(page, site);
  await inspect(page, 'overview-empty');
  await page.getByRole('main').getByRole('link', { name: 'Add a machine' }).click();
  await expect(page.getByRole('heading', { level: 1, name: 'Add a machine' })).toBeVisible();
  await inspect(page, 'setup-light');
  await page.setViewportSize({ width: 360, height: 780 });
  await expectNoSidewaysScroll(page);
  await page.emulateMedia({ colorScheme: 'dark' });
  await inspect(page, 'setup-phone-dark');
});

for (const keys of ['takes any client', 'requires keys']) {
  test(`from the page to an answer, on a relay that ${keys}`, async ({ page }) => {
    const demo = await site.worker('there-before');
    await expect.poll(async () => (await site.admin('GET', '/admin/workers')).workers.length).toBe(1);
    await logIn(page, site, '/setup');
    await page.getByRole('radio', { name: 'Other' }).check();
    const backend = await site.backend('fresh');
    await page.getByLabel('Server address, seen from that machine').fill(backend);
    await page.getByLabel('Worker name (optional)').fill('garage');
    await expect(page.getByText('Waiting for a new worker …')).toBeVisible();

    // The secret is shown only on request, and is always in the clipboard.
    const main = page.getByRole('main');
    await expect(main).not.toContainText(SECRET);
    const command = await copied(page, 'Start the worker');
    expect(command).toContain(SECRET);
    await expect(main).not.toContainText(SECRET);
    await page.getByRole('button', { name: 'Show the secret' }).click();
    await expect(main).toContainText(SECRET);
    await page.getByRole('button', { name: 'Hide the secret' }).click();
    await expect(main).not.toContainText(SECRET);

    site.line(command);
    await expect(page.getByText('garage is connected.')).toBeVisible();
    await expect(page.getByText('It serves fresh.')).toBeVisible();
    await page.getByRole('button', { name: 'Send a test request' }).click();
    await expect(page.getByRole('status').filter({ hasText: 'first token after' })).toBeVisible();
    await expect(page.getByRole('group', { name: 'Response' })).toContainText('Say hello');
    await inspect(page, `setup-done-${keys.split(' ')[0]}`);
    if (keys === 'requires keys') {
      // The key of the test request is revoked afterwards.
      await expect.poll(async () => (await site.admin('GET', '/admin/keys')).keys.every((key) => key.revoked)).toBe(true);
      expect((await site.admin('GET', '/admin/keys')).keys).toHaveLength(1);
    }
    await page.getByRole('link', { name: 'Show worker' }).click();
    await expect(page.getByRole('heading', { level: 1, name: 'garage' })).toBeVisible();
    expect(demo.log).not.toContain('refused');
  });
}

test('shortest command needs only the required answers', async ({ page }) => {
  await logIn(page, site, '/setup');
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  const title = 'Start the worker interactively';
  // The worker finds the server by itself, unless its address was entered.
  expect(await copied(page, title)).not.toContain('BACKEND_URL');
  await page.getByLabel('Server address, seen from that machine').fill(await site.backend('fresh'));
  await page.getByLabel('Worker name (optional)').fill('garage');
  const command = await copied(page, title);
  expect(command).toContain(SECRET);
  await expect(page.getByRole('main')).not.toContainText(SECRET);
  // Stands in for a user who accepts the proposed settings.
  const worker = site.line(`${command} --yes`);
  await expect(page.getByText('garage is connected.')).toBeVisible();
  await expect(page.getByText('It serves fresh.')).toBeVisible();
  expect(worker.log).toContain('wrote worker.yaml');
  await page.getByRole('radio', { name: 'Kubernetes' }).check();
  await expect(page.getByText(title)).toHaveCount(0);
});

test('wrong secret is reported at the first rejection', async ({ page }) => {
  await logIn(page, site, '/setup');
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  site.bareWorker('typo', { WORKER_SECRET: 'not it', BACKEND_URL: 'http://127.0.0.1:9' });
  await expect(page.getByText(/was rejected: wrong secret/)).toBeVisible();
});

test('hints appear while no worker connects', async ({ page }) => {
  await page.clock.install();
  await logIn(page, site, '/setup');
  await expect(page.getByText('Waiting for a new worker …')).toBeVisible();
  await expect(page.getByText('No worker yet?')).toBeHidden();
  await page.clock.fastForward(21_000);
  await expect(page.getByText('No worker yet?')).toBeVisible();
  await expect(page.getByText(`curl -m 5 ${site.url}/health`)).toBeVisible();
  await inspect(page, 'setup-hints');
});

test('loopback address is replaced with a reachable one', async ({ page }) => {
  // The real address differs between machines, so this part of the relay's response is made up.
  await page.route('**/admin/setup', async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, json: { ...await response.json(), network_url: 'http://192.168.1.5:8080' } });
  });
  await logIn(page, site, '/setup');
  const warning = page.getByText('another machine would connect to itself');
  await expect(warning).toBeVisible();
  await inspect(page, 'setup-loopback');
  await page.getByRole('button', { name: 'Use http://192.168.1.5:8080' }).click();
  await expect(warning).toBeHidden();
  expect(await copied(page, 'Start the worker')).toContain('PROXY_URL=http://192.168.1.5:8080');
});

test('Windows service gets a valid worker.yaml', async ({ page }) => {
  await logIn(page, site, '/setup');
  await page.getByRole('radio', { name: 'Windows' }).check();
  await page.getByRole('radio', { name: 'Ollama' }).check();
  await page.getByLabel('Worker name (optional)').fill("Ann’s 'box' $PATH");
  expect(await copied(page, 'Start the worker interactively')).toContain(`\n.\\modelrelay-worker.exe connect '${site.url}' --run`);
  expect(await copied(page, 'Start the worker')).toContain("$env:WORKER_NAME = 'Ann’’s ''box'' $PATH'\n.\\modelrelay-worker.exe");
  const text = await copied(page, 'Windows service, in an administrator PowerShell');
  expect(text).toContain(`worker.secret" '${SECRET}'\n`);
  // Pasting the commands again applies changes, and access to an existing folder is restricted before anything is put into it.
  const order = ['service uninstall', 'New-Item', '/setowner', 'Remove-Item', '/reset', '/inheritance:r', 'Copy-Item', 'Set-Content', 'service install'];
  expect(order.toSorted((one, other) => text.indexOf(one) - text.indexOf(other))).toEqual(order);
  expect(order.filter((words) => !text.includes(words))).toEqual([]);
  const folder = mkdtempSync(join(tmpdir(), 'windows-'));
  try {
    // As written by Windows PowerShell: with a byte order mark and CRLF line ends.
    const yaml = text.match(/@'\n([^]*?)\n'@/)[1];
    writeFileSync(join(folder, 'worker.yaml'), `\ufeff${yaml.replaceAll('\n', '\r\n')}\r\n`);
    writeFileSync(join(folder, 'worker.secret'), `${SECRET}\r\n`);
    const output = execFileSync(`${process.env.MODELRELAY_BIN_DIR}/modelrelay-worker`, ['check', '--config', 'worker.yaml'], { cwd: folder, env: {}, encoding: 'utf8' });
    expect(output).toContain("Ann’s 'box' $PATH, with the worker secret in worker.secret");
    expect(output).toContain('backend: http://127.0.0.1:11434 (ollama)');
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test('every installation method shows its commands', async ({ page }) => {
  await logIn(page, site, '/setup');
  const ways = {
    Linux: 'systemd service', macOS: 'Start it at login', Windows: 'Windows service, in an administrator PowerShell',
    Container: 'compose.yaml', Kubernetes: 'With the operator',
  };
  for (const [system, block] of Object.entries(ways)) {
    await page.getByRole('radio', { name: system }).check();
    const text = await copied(page, block);
    expect(text).not.toContain('•');
    expect(text).not.toContain('undefined');
  }
  await expect(page.getByText('another machine would connect to itself')).toBeVisible();
});
