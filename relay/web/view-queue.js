// Queue: the models that requests wait for, how long they wait, and why.

import { age, setAge, setCountdown } from './clock.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { count, some } from './format.js';
import { icon } from './icons.js';
import { loadBar, page } from './parts.js';
import { providersWorkers } from './concerns.js';
import { whyWaiting, workersByModel } from './reasons.js';

export function queueView({ store }) {
  const filter = h('input', { type: 'search', placeholder: 'Filter models', 'aria-label': 'Filter models', oninput: () => update(store) });
  const list = h('div', { class: 'stack' });
  const intro = h('p', { class: 'intro' }, 'Requests wait here until a worker with their model is free. API keys share the workers; requests of one key are sent in order of arrival.');
  const node = page('Queue', intro, h('div', { class: 'table-tools' }, h('label', { class: 'search' }, icon('search'), filter)), list);
  function update(now) {
    const words = filter.value.toLowerCase();
    setList(list, [...now.providers.values()], (provider) => provider.name, providerQueue, (card, provider) => card.update(now, provider, words));
  }
  return { node, update };
}

function providerQueue(provider) {
  const bar = loadBar();
  const oldest = age(null);
  const oldestLine = h('p', { class: 'hint' }, 'the oldest for ', oldest);
  const models = h('ul', { class: 'waiting-models' });
  const nothing = h('p', { class: 'hint' });
  const node = h(
    'section',
    { class: 'card' },
    h('div', { class: 'queue-head' }, h('h2', {}, provider.name), h('div', { class: 'queue-depth' }, bar.node, oldestLine)),
    nothing,
    models,
  );
  node.update = (store, now, words) => {
    bar.set(now.queue_depth, now.queue_capacity);
    setHidden(oldestLine, now.oldest_at === null);
    if (now.oldest_at !== null) setAge(oldest, now.oldest_at);
    const waiting = now.models.filter((model) => model.waiting > 0 && model.id.toLowerCase().includes(words));
    waiting.sort((a, b) => (a.oldest_at ?? Infinity) - (b.oldest_at ?? Infinity));
    setHidden(nothing, waiting.length > 0);
    setText(nothing, nothingInWords(now));
    // Without waiting requests, the fleet need not be searched.
    const serving = waiting.length ? workersByModel(providersWorkers(store, now), waiting.map((model) => model.id)) : new Map();
    setList(models, waiting, (model) => model.id, modelQueue, (row, model) => row.update(model, whyWaiting(now, model, serving.get(model.id))));
  };
  return node;
}

function nothingInWords(provider) {
  if (provider.queue_depth) return 'No requests wait for a model with that name.';
  return provider.workers ? 'The queue is empty: every request was dispatched immediately.' : 'The queue is empty.';
}

function modelQueue(model) {
  const waiting = h('strong');
  const oldest = age(null);
  const reason = h('p', { class: 'reason' });
  const words = h('span');
  const left = h('span', { class: 'hint' });
  const help = h('a');
  reason.append(words, ' ', left, ' ', help);
  const detail = h('p', { class: 'hint' });
  const node = h('li', {}, h('div', { class: 'waiting-head' }, h('h3', {}, model.id), h('span', {}, waiting, ' waiting, the oldest for ', oldest)), reason, detail);
  node.update = (now, why) => {
    setText(waiting, count(now.waiting));
    setAge(oldest, now.oldest_at);
    setAttribute(reason, 'data-tone', why.tone);
    setText(words, why.words);
    setHidden(left, !why.until);
    if (why.until) setCountdown(left, why.until);
    setHidden(help, !why.help);
    if (why.help) {
      setText(help, why.help.words);
      setAttribute(help, 'href', why.help.href);
    }
    setText(detail, `${count(now.in_flight)} in flight${now.workers ? ` · loaded on ${count(now.open_workers)} of ${some(now.workers, 'worker')}` : ''}`);
  };
  return node;
}
