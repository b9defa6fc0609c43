// Days in UTC, as the usage ledger counts them, and their time axis in charts.

export const DAY_MS = 86_400_000;

const SHORTEST_DAYS = 6;
const MOST_TICKS = 6;

/** "2026-11-25", from a time in milliseconds. */
export const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);

const label = (at) => new Date(at).toLocaleDateString('en-GB', { day: 'numeric', month: 'short', timeZone: 'UTC' });

/** The time axis of charts with one point per day. */
export const DAYS = {
  words: 'per day',
  column: 'Day',
  now: (point) => (point ? label(point.at) : ''),
  range: (begin, end) => Math.max(SHORTEST_DAYS * DAY_MS, end - begin),
  ticks(end, range) {
    const days = Math.max(1, Math.ceil(range / DAY_MS / MOST_TICKS));
    const ticks = [];
    for (let at = end; at >= end - range; at -= days * DAY_MS) ticks.push(at);
    return ticks;
  },
  label,
  moment: label,
  step: () => 1,
};

/** Returns one point per day from `first` to `last` (texts), each with the rows of its day. */
export function perDay(rows, first, last) {
  const points = new Map();
  for (let at = Date.parse(first); at <= Date.parse(last); at += DAY_MS) points.set(dayOf(at), { at, rows: [] });
  for (const row of rows) points.get(row.day)?.rows.push(row);
  return [...points.values()];
}
