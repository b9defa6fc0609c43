// Human-readable numbers and times. Pure, so that all pages format them in the same way.

const INTEGER = new Intl.NumberFormat('en');
const COMPACT = new Intl.NumberFormat('en', { notation: 'compact', maximumFractionDigits: 1 });

export const NOTHING = '–';

export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  return Math.abs(value) < 100_000 ? INTEGER.format(value) : COMPACT.format(value);
}

/** "1 worker", "2 workers". */
export function some(value, word, plural = `${word}s`) {
  return `${count(value)} ${value === 1 ? word : plural}`;
}

/** Formats a rate per second, rounded to about two digits. */
export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return '0';
  return value < 10 ? value.toFixed(value < 0.1 ? 2 : 1) : count(Math.round(value));
}

export function percent(part, whole) {
  if (!whole) return NOTHING;
  const share = (100 * part) / whole;
  if (share === 0) return '0 %';
  return share < 1 ? '< 1 %' : `${share < 10 ? share.toFixed(1) : Math.round(share)} %`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return value < 60_000 ? `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s` : duration(value);
}

/** A duration, in its two largest units. */
export function duration(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return two(minutes, 'min', seconds % 60, 's', minutes < 10);
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return two(hours, 'h', minutes % 60, 'min', true);
  return two(Math.floor(hours / 24), 'd', hours % 24, 'h', hours < 240);
}

function two(large, largeUnit, small, smallUnit, both) {
  return both && small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function absolute(ms) {
  return new Date(ms).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' });
}

export function clockTime(ms) {
  return new Date(ms).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' });
}
