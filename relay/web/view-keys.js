// API keys: the clients that may use the relay, and their limits. Tenants act as keys, but only the configuration changes them.

import { age, setAge } from './clock.js';
import { confirmed } from './dialogs.js';
import { get, remove } from './api.js';
import { h, setAttribute, setHidden, setText } from './dom.js';
import { editKey } from './edit-key.js';
import { absolute, count } from './format.js';
import { icon } from './icons.js';
import { newKey } from './new-key.js';
import { notice, orSay } from './notices.js';
import { page, pill, setPill } from './parts.js';
import { dataTable } from './table.js';

const ASK_AGAIN_MS = 5000;

export function keysView({ store, session }) {
  const create = h('button', { type: 'button', class: 'primary', onclick: make }, icon('setup'), 'New key');
  const open = h('p', { class: 'banner', hidden: session.require_api_keys },
    'This relay accepts clients without a key. To require a key, start it with ', h('code', {}, 'MODELRELAY_REQUIRE_API_KEYS=true'), '.');
  let keys = [];
  const which = h('select', { 'aria-label': 'Which keys', onchange: show },
    h('option', { value: 'current' }, 'Active'), h('option', { value: 'all' }, 'All, including revoked and expired'));
  const table = dataTable(columns(edit, revoke), {
    name: 'API keys',
    noun: 'key',
    key: (k) => k.id,
    words: (k) => `${k.name} ${k.prefix ?? k.id} ${(k.models ?? []).join(' ')} ${(k.providers ?? []).join(' ')} ${state(k)[0]}`,
    sort: ['name', false],
    filters: [which],
    empty: () => [h('p', {}, keys.length ? 'No active keys.' : 'No keys yet. Create a separate key for each person or program, so that each can be revoked.')],
  });
  const node = page('API keys', create, open, table.node);

  async function load() {
    const answer = await orSay(() => get('admin/keys'));
    if (!answer) return;
    keys = [...answer.keys, ...answer.tenants];
    show();
  }
  function show() {
    table.update(which.value === 'all' ? keys : keys.filter((k) => ['Active', 'Tenant'].includes(state(k)[0])));
  }
  async function make() {
    if (await newKey(store)) await load();
  }
  async function edit(key) {
    if (await editKey(store, key)) await load();
  }
  async function revoke(key) {
    const words = `Requests with ${key.name} (${key.prefix}…) will be rejected from now on. This cannot be undone.`;
    if (!(await confirmed('Revoke this key?', words, 'Revoke the key'))) return;
    await orSay(async () => {
      await remove(`admin/keys/${encodeURIComponent(key.id)}`);
      notice(`${key.name} was revoked.`);
    });
    await load();
  }
  load();
  // The stream has no events for keys. Their usage changes slowly and matters only while it is shown.
  const timer = setInterval(() => (node.isConnected ? document.hidden || load() : clearInterval(timer)), ASK_AGAIN_MS);
  return { node, instant: true, update() {} };
}

function columns(edit, revoke) {
  return [
    {
      key: 'name',
      title: 'Key',
      heading: true,
      sort: (k) => k.name,
      make: () => [h('span'), h('span', { class: 'sub mono' })],
      fill: (cell, k) => {
        setText(cell.children[0], k.name);
        setText(cell.children[1], isTenant(k) ? k.id : `${k.prefix}…`);
      },
    },
    { key: 'state', title: 'State', sort: (k) => state(k)[0], make: () => pill(), fill: (cell, k) => setPill(cell.firstChild, ...state(k)) },
    { key: 'scope', title: 'May use', minor: 2, sort: scope, text: scope },
    { key: 'flight', title: 'In flight', end: true, minor: 3, sort: (k) => k.in_flight, text: (k) => (k.max_in_flight ? `${count(k.in_flight)} of ${count(k.max_in_flight)}` : count(k.in_flight)) },
    { key: 'share', title: 'Queue share', end: true, minor: 3, sort: (k) => k.max_queue_percent ?? 100, text: (k) => (k.max_queue_percent ? `${k.max_queue_percent} %` : 'no limit') },
    { key: 'class', title: 'Class', minor: 3, sort: (k) => k.class, text: (k) => (k.weight === 1 ? k.class : `${k.class}, weight ${k.weight}`) },
    { key: 'expires', title: 'Expires', end: true, minor: 3, sort: (k) => k.expires_at ?? '~', text: (k) => (k.expires_at ? absolute(Date.parse(k.expires_at)) : 'never') },
    { key: 'used', title: 'Last used', end: true, minor: 2, sort: (k) => k.last_used_at ?? 0, make: () => age(null, ' ago'), fill: (cell, k) => setAge(cell.firstChild, k.last_used ? Date.parse(k.last_used) : null) },
    {
      key: 'act',
      title: '',
      label: 'Actions',
      make: (k, cell) => h('div', { class: 'actions' },
        h('button', { type: 'button', class: 'small', onclick: () => edit(cell.row) }, 'Edit'),
        h('button', { type: 'button', class: 'small danger', onclick: () => revoke(cell.row) }, 'Revoke')),
      fill: (cell, k) => {
        cell.row = k;
        setHidden(cell.firstChild, k.revoked || isTenant(k));
        for (const button of cell.firstChild.children) setAttribute(button, 'aria-label', `${button.textContent} ${k.name}`);
      },
    },
  ];
}

const isTenant = (key) => Boolean(key.namespace);

function state(key) {
  if (isTenant(key)) return ['Tenant', 'ok'];
  if (key.revoked) return ['Revoked', 'idle'];
  if (key.expires_at && Date.parse(key.expires_at) <= Date.now()) return ['Expired', 'warn'];
  return ['Active', 'ok'];
}

function scope(key) {
  const models = key.models?.length ? key.models.join(', ') : 'all models';
  return key.providers?.length ? `${models} of ${key.providers.join(', ')}` : models;
}
