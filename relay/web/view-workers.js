// Workers: the whole fleet in one list.

import { age, setAge } from './clock.js';
import { h, setAttribute, setText } from './dom.js';
import { count, milliseconds } from './format.js';
import { icon } from './icons.js';
import { loadBar, modelsInWords, page, pill, setPill, workerLink, workerState } from './parts.js';
import { dataTable } from './table.js';

const COLUMNS = [
  {
    key: 'name',
    title: 'Worker',
    heading: true,
    sort: (w) => w.name,
    make: () => [h('a', {}), h('span', { class: 'sub' })],
    fill: (cell, w) => {
      setText(cell.children[0], w.name);
      setAttribute(cell.children[0], 'href', workerLink(w.worker_id));
      setText(cell.children[1], [w.provider, w.pool, place(w)].filter(Boolean).join(' · '));
    },
  },
  { key: 'state', title: 'State', sort: (w) => workerState(w)[0], make: () => pill(), fill: (cell, w) => setPill(cell.firstChild, ...workerState(w)) },
  { key: 'models', title: 'Models', minor: 2, sort: (w) => w.models_total, text: (w) => modelsInWords(w.models, w.models_total) },
  {
    key: 'load',
    title: 'Load',
    end: true,
    sort: (w) => (w.capacity ? w.load / w.capacity : -1),
    make: (_, cell) => (cell.bar = loadBar()).node,
    fill: (cell, w) => cell.bar.set(w.load, w.capacity),
  },
  { key: 'flight', title: 'In flight', end: true, minor: 3, sort: (w) => w.in_flight, text: (w) => count(w.in_flight) },
  { key: 'slots', title: 'Slots', minor: 3, sort: (w) => w.slots?.length ?? 0, text: slotsInWords },
  { key: 'rtt', title: 'Round trip', end: true, minor: 3, sort: (w) => w.rtt_ms, text: (w) => milliseconds(w.rtt_ms) },
  { key: 'version', title: 'Version', minor: 4, sort: (w) => w.version, text: (w) => w.version },
  { key: 'address', title: 'Address', minor: 4, sort: (w) => w.address, text: (w) => w.address },
  { key: 'since', title: 'Connected', end: true, minor: 3, sort: (w) => -w.connected_at, make: () => age(null), fill: (cell, w) => setAge(cell.firstChild, w.connected_at) },
];

export function workersView() {
  const table = dataTable(COLUMNS, {
    name: 'Workers',
    noun: 'worker',
    key: (w) => w.worker_id,
    words: (w) => `${w.name} ${w.provider} ${w.pool ?? ''} ${place(w)} ${w.address} ${w.version} ${workerState(w)[0]} ${w.models.join(' ')}`,
    sort: ['name', false],
    empty: () => [
      h('p', {}, 'No machines connected. A worker connects from the machine with the GPU; no port is opened there.'),
      h('a', { class: 'button primary', href: 'setup' }, icon('setup'), 'Add a machine'),
    ],
  });
  const node = page('Workers', h('a', { class: 'button', href: 'setup' }, icon('setup'), 'Add a machine'), table.node);
  return { node, update: (store) => table.update([...store.workers.values()]) };
}

// Its cluster and zone, if it has them.
function place(worker) {
  return [worker.cluster, worker.zone].filter(Boolean).join('/');
}

function slotsInWords(worker) {
  if (!worker.slots?.length) return '–';
  const moving = worker.slots.find((slot) => slot.target);
  if (moving) return `${moving.id} → ${moving.target}`;
  return worker.slots.map((slot) => slot.resident ?? slot.state).join(', ');
}
