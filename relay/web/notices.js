// Recent events, in a corner and for screen readers. The page has one polite live region; ticking values are not announced.

import { h } from './dom.js';
import { icon } from './icons.js';

const SHOWN_MS = 6000;
const region = h('div', { class: 'notices', role: 'status' });

export function noticeRegion() {
  return region;
}

export function notice(words, level = 'ok') {
  const node = h(
    'div',
    { class: `notice ${level}` },
    icon(level === 'error' ? 'error' : 'check'),
    h('span', {}, words),
  );
  region.append(node);
  setTimeout(() => node.remove(), level === 'error' ? 2 * SHOWN_MS : SHOWN_MS);
}

/** Runs an action and shows its failure to the user; resolves to undefined after a failure. */
export async function orSay(action) {
  try {
    return await action();
  } catch (error) {
    notice(error.message, 'error');
  }
}
