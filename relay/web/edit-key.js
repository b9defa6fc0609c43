// The dialog that changes an API key.

import { openDialog } from './dialogs.js';
import { keyForm } from './key-form.js';
import { notice } from './notices.js';
import { patch } from './api.js';

/** Resolves to true if the key was changed. */
export async function editKey(store, key) {
  const send = (fields) => patch(`admin/keys/${encodeURIComponent(key.id)}`, changes(key, fields));
  const changed = await openDialog(`Edit “${key.name}”`, (close) => keyForm({ store, key, action: 'Save', send, close }));
  if (changed) notice(`${changed.name} was changed.`);
  return Boolean(changed);
}

/** Fields that were not edited are left out, because another admin may have changed them meanwhile. */
function changes(key, fields) {
  const isEdited = ([name, value]) => JSON.stringify(value) !== JSON.stringify(key[name] ?? null);
  return Object.fromEntries(Object.entries(fields).filter(isEdited));
}
