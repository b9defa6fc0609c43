// A key for one request of this page, where the relay wants one: it lives ten minutes at most, and is revoked as soon as it was used.

import { post, remove } from './api.js';

const LIFETIME_MS = 10 * 60_000;

/** {key, done}: `done` revokes it. */
export async function temporaryKey(name) {
  const made = await post('admin/keys', { name, expires_at: new Date(Date.now() + LIFETIME_MS).toISOString() });
  return {
    key: made.secret,
    // Should this fail, its time is over soon.
    done: () => remove(`admin/keys/${encodeURIComponent(made.id)}`).catch(() => {}),
  };
}
