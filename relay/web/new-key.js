// The dialogs for a new API key: its form, and its secret, which is shown once.

import { codeBlock } from './copying.js';
import { h } from './dom.js';
import { openDialog } from './dialogs.js';
import { keyForm } from './key-form.js';
import { post } from './api.js';

/** Resolves to true if a key was created. */
export async function newKey(store) {
  const send = (fields) => post('admin/keys', fields);
  const created = await openDialog('New API key', (close) => keyForm({ store, action: 'Create the key', send, close }));
  if (!created) return false;
  await openDialog(`Key “${created.name}” is ready`, (close) => secret(created, close));
  return true;
}

function secret(created, close) {
  const block = codeBlock('API key');
  block.set(created.secret);
  return [
    h('p', {}, 'Copy the key now. ', h('strong', {}, 'It is shown only once'), ': the relay stores only its hash. If you lose the key, revoke it and create another.'),
    block.node,
    h('div', { class: 'actions' }, h('button', { type: 'button', class: 'primary', onclick: () => close(true) }, 'I have copied it')),
  ];
}
