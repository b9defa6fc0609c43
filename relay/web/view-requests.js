// Requests that have not ended, without their content.

import { age, setAge } from './clock.js';
import { confirmed } from './dialogs.js';
import { h, setAttribute, setHidden, setText } from './dom.js';
import { bytes, count, some } from './format.js';
import { notice, orSay } from './notices.js';
import { page, pill, setPill, workerLink } from './parts.js';
import { post } from './api.js';
import { dataTable } from './table.js';

const STATES = { queued: 'warn', dispatched: 'busy', streaming: 'ok', ending: 'idle' };

function columns({ store }, mayWait) {
  const all = [
    {
      key: 'model',
      title: 'Model',
      heading: true,
      sort: (r) => r.model,
      make: () => [h('span'), h('span', { class: 'sub' })],
      fill: (cell, r) => {
        setText(cell.children[0], r.model);
        setText(cell.children[1], r.endpoint);
      },
    },
    { key: 'state', title: 'State', sort: (r) => r.state, make: () => pill(), fill: (cell, r) => setPill(cell.firstChild, r.state, STATES[r.state] ?? 'idle') },
    mayWait && place(store),
    { key: 'age', title: 'Age', end: true, sort: (r) => -r.received_at, make: () => age(null), fill: (cell, r) => setAge(cell.firstChild, r.received_at) },
    {
      key: 'worker',
      title: 'Worker',
      minor: 2,
      sort: (r) => (r.worker ? store.workerName(r.worker) : ''),
      make: () => h('a'),
      fill: (cell, r) => {
        setText(cell.firstChild, r.worker ? store.workerName(r.worker) : '');
        setAttribute(cell.firstChild, 'href', r.worker ? workerLink(r.worker) : null);
      },
    },
    { key: 'placement', title: 'Placement', minor: 3, sort: (r) => r.placement ?? '', text: (r) => r.placement ?? '' },
    { key: 'attempts', title: 'Attempts', end: true, minor: 3, sort: (r) => r.attempts, text: (r) => count(r.attempts) },
    { key: 'size', title: 'Size', end: true, minor: 3, sort: (r) => r.request_bytes, text: (r) => bytes(r.request_bytes) },
    { key: 'provider', title: 'Provider', minor: 4, sort: (r) => r.provider, text: (r) => r.provider },
    { key: 'id', title: 'Request', minor: 4, sort: (r) => r.request_id, text: (r) => r.request_id },
    {
      key: 'act',
      title: '',
      label: 'Actions',
      make: (r) => h('button', { type: 'button', class: 'small danger', 'aria-label': `Cancel ${r.request_id}`, onclick: () => cancel(r) }, 'Cancel'),
    },
  ];
  return all.filter(Boolean);
}

/** The place of a waiting request among those for its model. */
function place(store) {
  const position = (r) => store.positions[r.request_id];
  return { key: 'place', title: 'Place', end: true, sort: (r) => -(position(r) ?? Number.MAX_VALUE), text: (r) => (position(r) ? count(position(r)) : '') };
}

export function requestsTable(context, empty, mayWait = false) {
  return dataTable(columns(context, mayWait), {
    name: 'Requests',
    noun: 'request',
    key: (r) => r.request_id,
    words: (r) => `${r.model} ${r.state} ${r.provider} ${r.endpoint} ${r.request_id} ${r.worker ? context.store.workerName(r.worker) : ''}`,
    sort: ['age', true],
    empty: () => [h('p', {}, empty)],
  });
}

export function requestsView(context) {
  const table = requestsTable(context, 'No running or waiting requests.', true);
  const more = h('p', { class: 'hint', hidden: true });
  const node = page('Requests', h('a', { class: 'button', href: 'integrate' }, 'Connect a client'), more, table.node);
  function update(store) {
    setHidden(more, store.requestsTotal <= store.requests.size);
    setText(more, `The ${count(store.requests.size)} oldest of ${some(store.requestsTotal, 'request')} are listed.`);
    table.update([...store.requests.values()]);
  }
  return { node, update };
}

async function cancel(request) {
  const words = `The client receives the error “cancelled_by_admin”. Request ${request.request_id}, for ${request.model}.`;
  if (!(await confirmed('Cancel this request?', words, 'Cancel the request'))) return;
  await orSay(async () => {
    await post(`admin/requests/${encodeURIComponent(request.request_id)}/cancel`);
    notice('The request was cancelled.');
  });
}
