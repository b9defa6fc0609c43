// Lists the tests that failed and passed on their second try in the file that scripts/suites.py names.

const fs = require('node:fs');

module.exports = class {
  onTestEnd(test) {
    const listed = process.env.MODELRELAY_FLAKY;
    if (listed && test.outcome() === 'flaky') fs.appendFileSync(listed, `${test.titlePath().filter(Boolean).join(' › ')}\n`);
  }

  printsToStdio() {
    return false;
  }
};
