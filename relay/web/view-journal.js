// Event log: recent events, newest first.

import { age, setAge } from './clock.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { icon } from './icons.js';
import { page } from './parts.js';

const LEVELS = [['info', 'All events'], ['warn', 'Warnings and errors'], ['error', 'Errors']];
const RANK = { info: 0, warn: 1, error: 2 };
const MOST = 200;

export function journalView({ store }) {
  const level = h('select', { 'aria-label': 'Level', onchange: () => update(store) }, LEVELS.map(([value, words]) => h('option', { value }, words)));
  const filter = h('input', { type: 'search', placeholder: 'Filter events', 'aria-label': 'Filter events', oninput: () => update(store) });
  const list = h('ol', { class: 'journal', reversed: true });
  const empty = h('p', { class: 'empty', hidden: true });
  const node = page('Event log', null, h('div', { class: 'table-tools' }, h('label', { class: 'search' }, icon('search'), filter), level), list, empty);
  function update(now) {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [];
    for (let i = now.journal.length - 1; i >= 0 && chosen.length < MOST; i -= 1) {
      const event = now.journal[i];
      if ((RANK[event.level] ?? 0) >= RANK[level.value] && matches(event, words)) chosen.push(event);
    }
    setList(list, chosen, (event) => event.seq, entry);
    setHidden(list, chosen.length === 0);
    setHidden(empty, chosen.length > 0);
    setText(empty, now.journal.length ? 'No event matches.' : 'No events since the relay started.');
  }
  return { node, update };
}

function matches(event, words) {
  if (!words.length) return true;
  const text = `${event.message} ${Object.entries(event.fields ?? {}).flat().join(' ')}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function entry(event) {
  const node = h(
    'li',
    {},
    icon(event.level === 'info' ? 'info' : event.level === 'warn' ? 'warn' : 'error'),
    h('span', { class: 'visually-hidden' }, `${event.level}: `),
    h('span', { class: 'journal-words' }, h('span', {}, event.message), ' ', h('span', { class: 'journal-fields' }, fields(event))),
    setAge(age(null, ' ago'), event.at),
  );
  setAttribute(node, 'data-level', event.level);
  return node;
}

/** Fields of the protocol, which do not help to understand an event; the filter still finds them. */
const TECHNICAL = new Set(['core1', 'slots1']);
/** These fields come first, the others in their own order. */
const FIRST = ['address', 'provider', 'worker'];

function fields(event) {
  const known = Object.entries(event.fields ?? {}).filter(([name]) => !TECHNICAL.has(name));
  known.sort(([a], [b]) => FIRST.indexOf(b) - FIRST.indexOf(a));
  return known.map(([name, value]) => h('span', {}, `${name} `, h('b', {}, String(value))));
}
