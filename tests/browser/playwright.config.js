// For one machine with few cores: one test at a time, so that no test waits because of another one.

const root = require('node:path').resolve(__dirname, '../..');

module.exports = {
  testDir: __dirname,
  testMatch: process.env.MODELRELAY_PICTURE ? '*.picture.js' : '*.spec.js',
  outputDir: `${root}/target/browser/failures`,
  workers: 1,
  timeout: 180_000,
  expect: { timeout: 15_000 },
  retries: 1,
  reporter: [['list'], [`${__dirname}/lib/flaky.js`]],
  use: {
    browserName: 'chromium',
    viewport: { width: 1440, height: 900 },
    trace: 'retain-on-failure',
    launchOptions: {
      executablePath: process.env.CHROMIUM,
      // Chromium's sandbox does not run as root, and a container's /dev/shm is small.
      args: process.getuid() === 0 ? ['--no-sandbox', '--disable-dev-shm-usage'] : [],
    },
  },
};
