// One worker: its properties, models and requests, and the commands to it.

import { age, setAge } from './clock.js';
import { confirmed } from './dialogs.js';
import { h, setHidden, setList, setText } from './dom.js';
import { bytes, count, milliseconds, NOTHING, percent, some } from './format.js';
import { icon } from './icons.js';
import { notice, orSay } from './notices.js';
import { fact, loadBar, pill, setPill, workerState } from './parts.js';
import { post, workerPath } from './api.js';
import { requestsTable } from './view-requests.js';
import { slotCards } from './slots.js';

export function workerView(context, id) {
  const title = h('h1');
  const state = pill();
  const gone = h('p', { class: 'empty', hidden: true }, 'This worker is not connected. ', h('a', { href: '#/workers' }, 'All workers'));
  const drain = h('button', { type: 'button', class: 'danger', onclick: () => askDrain(context.store.workers.get(id)) }, 'Drain');
  const refresh = h('button', { type: 'button', onclick: () => askRefresh(id) }, 'Refresh models');
  const about = facts();
  const models = h('ul', { class: 'chips' });
  const more = h('p', { class: 'hint', hidden: true });
  const slots = slotCards(context, id);
  const requests = requestsTable(context, 'No running requests.');
  const body = h(
    'div',
    { class: 'view' },
    about.node,
    slots.node,
    h('section', { class: 'card' }, h('h2', {}, 'Models'), models, more),
    h('section', {}, h('h2', {}, 'Requests'), requests.node),
  );
  const node = h(
    'div',
    { class: 'view' },
    h('a', { class: 'back', href: '#/workers' }, icon('back'), 'Workers'),
    h('div', { class: 'view-head' }, title, state, h('div', { class: 'actions' }, refresh, drain)),
    gone,
    body,
  );
  setText(title, id);

  function update(store) {
    const worker = store.workers.get(id);
    for (const part of [body, state, drain.parentNode]) setHidden(part, !worker);
    setHidden(gone, Boolean(worker));
    if (!worker) return;
    setText(title, worker.name);
    setPill(state, ...workerState(worker));
    drain.disabled = worker.draining;
    about.update(worker);
    slots.update(worker);
    setList(models, worker.models, (model) => model, (model) => h('li', {}, model));
    setHidden(more, worker.models_total <= worker.models.length);
    setText(more, `and ${worker.models_total - worker.models.length} more`);
    requests.update([...store.requests.values()].filter((request) => request.worker === id));
  }
  return { node, update };
}

function facts() {
  const bar = loadBar();
  const since = age(null);
  const all = {
    load: fact('Load'),
    flight: fact('In flight', 'Requests of this relay; the load includes those of other relays'),
    backlog: fact('Backlog', 'Size of the requests sent to it whose response has not begun'),
    trust: fact('Cache trust', 'Share of the prompts expected in its cache that were there'),
    hits: fact('Cache hits', 'Share of the prompts that came from its cache since it connected, as far as its backend reports it'),
    rtt: fact('Round trip'),
    provider: fact('Provider'),
    pool: fact('Pool'),
    cluster: fact('Cluster'),
    zone: fact('Zone'),
    address: fact('Address'),
    version: fact('Version'),
    since: fact('Connected for'),
    id: fact('Id'),
  };
  all.load.value.append(bar.node);
  all.since.value.append(since);
  return {
    node: h('dl', { class: 'facts card' }, Object.values(all).map((one) => one.node)),
    update(worker) {
      bar.set(worker.load, worker.capacity);
      all.flight.set(count(worker.in_flight));
      all.backlog.set(bytes(worker.backlog_bytes));
      all.trust.set(percent(worker.cache_trust, 1));
      all.hits.set(worker.cache_hit_rate === null ? NOTHING : percent(worker.cache_hit_rate, 1));
      all.rtt.set(milliseconds(worker.rtt_ms));
      all.provider.set(worker.provider);
      all.pool.set(worker.pool ?? '');
      setHidden(all.pool.node, !worker.pool);
      for (const place of ['cluster', 'zone']) {
        all[place].set(worker[place] ?? '');
        setHidden(all[place].node, !worker[place]);
      }
      all.address.set(worker.address);
      all.version.set(worker.version);
      setAge(since, worker.connected_at);
      all.id.set(worker.worker_id);
    },
  };
}

async function askDrain(worker) {
  if (!worker) return;
  const running = worker.in_flight ? `It finishes ${some(worker.in_flight, 'running request')}, accepts no new ones ` : 'It accepts no new requests ';
  const words = `${running}and stays disconnected until it is restarted on its machine.`;
  if (!(await confirmed(`Drain ${worker.name}?`, words, 'Drain worker'))) return;
  await orSay(async () => {
    await post(workerPath(worker.worker_id, 'drain'));
    notice(`${worker.name} is draining.`);
  });
}

async function askRefresh(id) {
  await orSay(async () => {
    await post(workerPath(id, 'refresh'));
    notice('Model refresh requested.');
  });
}

