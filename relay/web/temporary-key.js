// A key for one request of this page, if the relay requires keys: it expires after at most ten minutes, and is revoked after its use.

import { post, remove } from './api.js';

const LIFETIME_MS = 10 * 60_000;

/** Resolves to {key, done}; `done` revokes the key. */
export async function temporaryKey(name) {
  const made = await post('admin/keys', { name, expires_at: new Date(Date.now() + LIFETIME_MS).toISOString() });
  return {
    key: made.secret,
    // If revoking fails, the key still expires soon.
    done: () => remove(`admin/keys/${encodeURIComponent(made.id)}`).catch(() => {}),
  };
}
