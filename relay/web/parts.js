// Small elements that several views share.

import { h, setAttribute, setText } from './dom.js';
import { count } from './format.js';

export function page(title, intro, ...content) {
  return h('div', { class: 'view' }, h('div', { class: 'view-head' }, h('h1', {}, title), intro), content);
}

/** The used part of a limit, as a bar and in words. */
export function loadBar() {
  const fill = h('span', { class: 'bar-fill' });
  const words = h('span', { class: 'bar-words' });
  const node = h('span', { class: 'bar-cell' }, h('span', { class: 'bar', 'aria-hidden': 'true' }, fill), words);
  return {
    node,
    set(used, whole) {
      const share = whole ? Math.min(1, used / whole) : 0;
      const width = `${(100 * share).toFixed(1)}%`;
      if (fill.style.width !== width) fill.style.width = width;
      setAttribute(fill, 'data-full', share >= 1 ? 'yes' : null);
      setText(words, `${count(used)} / ${count(whole)}`);
    },
  };
}

/** A state in a word, with a dot; `tone`: ok, busy, warn, bad, idle. */
export function setPill(node, words, tone) {
  setAttribute(node, 'class', `pill ${tone}`);
  setText(node, words);
}

export function pill(words = '', tone = 'idle') {
  return h('span', { class: `pill ${tone}` }, words);
}

/** A label with a value below it; `update` sets the current value. */
export function fact(label, title) {
  const value = h('dd');
  const node = h('div', { class: 'fact', title: title ?? null }, h('dt', {}, label), value);
  return { node, value, set: (text) => setText(value, text) };
}

export const workerLink = (id) => `#/workers/${encodeURIComponent(id)}`;

/** The names of the first models, and the number of the others. */
export function modelsInWords(models, total, most = 2) {
  if (!total) return 'none';
  const shown = models.slice(0, most).join(', ');
  return total > most ? `${shown} + ${total - Math.min(most, models.length)}` : shown;
}

export function workerState(worker) {
  if (worker.draining) return ['Draining', 'warn'];
  if (!worker.models_total) return ['No models', 'warn'];
  if (worker.failing_models.length) return ['Failing', 'bad'];
  if (worker.in_flight > 0 || worker.load > 0) return worker.load >= worker.capacity ? ['Full', 'busy'] : ['Busy', 'busy'];
  return ['Idle', 'ok'];
}
