// Providers: their workers and models, and their totals since the start.

import { h, setHidden, setList, setText } from './dom.js';
import { count, milliseconds, NOTHING } from './format.js';
import { icon } from './icons.js';
import { fact, loadBar, page, pill, setPill } from './parts.js';
import { dataTable } from './table.js';

export function providersView({ store }) {
  const filter = h('input', { type: 'search', placeholder: 'Filter providers', 'aria-label': 'Filter providers', oninput: () => update(store) });
  const list = h('div', { class: 'stack' });
  const intro = h('p', { class: 'intro' }, 'Each provider has its own queue, workers and secret. Totals are since the relay started.');
  const node = page('Providers', intro, h('div', { class: 'table-tools' }, h('label', { class: 'search' }, icon('search'), filter)), list);
  function update(now) {
    const words = filter.value.toLowerCase();
    const chosen = [...now.providers.values()].filter((provider) => provider.name.toLowerCase().includes(words));
    setList(list, chosen, (provider) => provider.name, providerCard, (card, provider) => card.update(provider));
  }
  return { node, update };
}

const MODELS = [
  { key: 'name', title: 'Model', heading: true, sort: (m) => m.id, text: (m) => m.id },
  { key: 'waiting', title: 'Waiting', end: true, sort: (m) => m.waiting, text: (m) => count(m.waiting) },
  { key: 'flight', title: 'In flight', end: true, sort: (m) => m.in_flight, text: (m) => count(m.in_flight) },
  { key: 'open', title: 'Workers', end: true, sort: (m) => m.workers, text: (m) => (m.open_workers === m.workers ? count(m.workers) : `${count(m.open_workers)} of ${count(m.workers)}`) },
];

function providerCard(provider) {
  const state = pill();
  const [load, queue] = [loadBar(), loadBar()];
  const facts = {
    load: fact('Slots in use'), queue: fact('Queue'), workers: fact('Workers'), flight: fact('In flight'),
    wait: fact('Wait in queue', 'Median, and 95th percentile'), ttft: fact('First token', 'Median, and 95th percentile'),
    input: fact('Input tokens'), output: fact('Output tokens'), requeues: fact('Requeued', 'Requests requeued after the loss of a worker'),
  };
  facts.load.value.append(load.node);
  facts.queue.value.append(queue.node);
  const outcomes = h('ul', { class: 'chips' });
  const models = dataTable(MODELS, {
    name: `Models of ${provider.name}`,
    noun: 'model',
    key: (m) => m.id,
    words: (m) => m.id,
    sort: ['flight', true],
    empty: () => [h('p', {}, 'No models are served or requested.')],
  });
  const more = h('p', { class: 'hint', hidden: true });
  const node = h(
    'section',
    { class: 'card' },
    h('div', { class: 'queue-head' }, h('h2', {}, provider.name), state),
    h('dl', { class: 'facts' }, Object.values(facts).map((one) => one.node)),
    h('h3', {}, 'Completed requests'),
    outcomes,
    h('h3', {}, 'Models'),
    models.node,
    more,
  );
  node.update = (now) => {
    setPill(state, now.enabled ? 'Enabled' : 'Disabled', now.enabled ? 'ok' : 'bad');
    load.set(now.load, now.capacity);
    queue.set(now.queue_depth, now.queue_capacity);
    facts.workers.set(now.draining_workers ? `${count(now.workers)} (${count(now.draining_workers)} draining)` : count(now.workers));
    facts.flight.set(count(now.in_flight));
    facts.wait.set(quantiles(now.totals.queue_wait_ms));
    facts.ttft.set(quantiles(now.totals.ttft_ms));
    facts.input.set(count(now.totals.tokens.input));
    facts.output.set(count(now.totals.tokens.output));
    facts.requeues.set(count(now.totals.requeues));
    const ended = Object.entries(now.totals.requests).filter(([, number]) => number > 0);
    setList(outcomes, ended.length ? ended : [['none yet', null]], ([name]) => name, ([name]) => h('li', {}, h('span', {}, name.replaceAll('_', ' ')), ' ', h('strong')), (item, [, number]) => {
      setText(item.lastChild, number === null ? '' : count(number));
    });
    models.update(now.models);
    setHidden(more, now.models_total <= now.models.length);
    setText(more, `The ${now.models.length} busiest of ${count(now.models_total)} models.`);
  };
  return node;
}

function quantiles({ count: measured, p50, p95 }) {
  if (!measured || p50 === undefined || p50 === null) return NOTHING;
  return `${milliseconds(p50)} (95 %: ${milliseconds(p95)})`;
}
