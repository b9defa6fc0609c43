// Sums over rows of the usage ledger, and the rows as CSV. Pure.

/** Stands for requests without a key; ids of keys are longer. */
export const NO_KEY = '-';

const COUNTS = ['answered', 'failed', 'cancelled', 'refused'];
const NUMBERS = [
  'input_tokens', 'cached_tokens', 'output_tokens', 'estimated_input_tokens', 'estimated_output_tokens', 'slot_seconds', 'wait_seconds',
];

export const keyName = (row) => row.key ?? row.key_id ?? 'Without a key';

export const unanswered = (row) => row.requests.failed + row.requests.cancelled + row.requests.refused;

export const total = (rows, value) => rows.reduce((sum, row) => sum + value(row), 0);

/** Returns one row per key and model, with an `id`. */
export function perKeyAndModel(rows) {
  const sums = new Map();
  for (const row of rows) {
    const id = JSON.stringify([row.key_id, row.model]);
    const sum = sums.get(id);
    if (!sum) {
      sums.set(id, { ...row, requests: { ...row.requests }, id });
      continue;
    }
    // A later row has the newer name.
    sum.key = row.key;
    for (const name of COUNTS) sum.requests[name] += row.requests[name];
    for (const name of NUMBERS) sum[name] += row[name];
  }
  return [...sums.values()];
}

/** Returns the rows as the command `usage --output csv` prints them. */
export function csvOf(rows) {
  const lines = rows.map((row) => [
    ...[row.day, row.key_id, row.key, row.model].map((text) => cell(text ?? '')),
    ...COUNTS.map((name) => row.requests[name]),
    ...NUMBERS.map((name) => row[name]),
  ]);
  return [['day', 'key_id', 'key', 'model', ...COUNTS, ...NUMBERS], ...lines].map((line) => `${line.join(',')}\r\n`).join('');
}

// A spreadsheet would take a text that begins like a formula for one.
function cell(text) {
  const safe = /^[=+\-@]/.test(text) ? `'${text}` : text;
  return /[",]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
