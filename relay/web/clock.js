// Ages that tick. One timer updates all of them, but only those in the document: of a list of thousands, a few dozen.

import { h, setAttribute, setText } from './dom.js';
import { absolute, duration } from './format.js';

// The relay's clock minus this browser's, which may be off by minutes: ages are relative to the relay's clock.
let ahead = 0;

export function setRelayTime(ms) {
  ahead = ms - Date.now();
}

export function now() {
  return Date.now() + ahead;
}

/** `suffix` follows the duration: "12 s" or "12 s ago". */
export function age(at, suffix = '') {
  return setAge(h('time', { 'data-suffix': suffix }), at);
}

export function setAge(node, at) {
  if (at === null || at === undefined) {
    node.removeAttribute('data-at');
    setText(node, '–');
    return node;
  }
  if (node.dataset.at !== String(at)) {
    node.dataset.at = at;
    setAttribute(node, 'datetime', new Date(at).toISOString());
    setAttribute(node, 'title', absolute(at));
  }
  tick(node);
  return node;
}

/** Counts down to a time; a text marks the end. */
export function setCountdown(node, at) {
  node.dataset.until = at;
  tick(node);
}

/** Fills a <progress> from one time to another, to at most 98 %: only its owner marks it as done. */
export function setProgress(node, from, until) {
  node.dataset.from = from;
  node.dataset.until = until;
  tick(node);
}

function tick(node) {
  if (node.dataset.from) {
    const share = (now() - Number(node.dataset.from)) / Math.max(1, Number(node.dataset.until) - Number(node.dataset.from));
    node.value = Math.max(0.02, Math.min(0.98, share));
    return;
  }
  if (node.dataset.until) {
    const left = Number(node.dataset.until) - now();
    setText(node, left > 0 ? `about ${duration(left)} left` : 'due now');
  } else if (node.dataset.at) {
    setText(node, duration(now() - Number(node.dataset.at)) + (node.dataset.suffix ?? ''));
  }
}

setInterval(() => {
  if (!document.hidden) document.querySelectorAll('time[data-at], [data-until]').forEach(tick);
}, 1000);
