// The worker secret: fetched only to be shown or copied, masked until then, and dropped when the user leaves the page.

import { post } from './api.js';

export const MASK = '••••••••';
const NONE = 'YOUR-WORKER-SECRET';

export class WorkerSecret {
  #known = new Map();
  #shown = false;

  /** The text that may be shown on the screen now. */
  visible(provider) {
    return (this.#shown && this.#known.get(provider)) || MASK;
  }

  get shown() {
    return this.#shown;
  }

  async show(provider) {
    await this.fetch(provider);
    this.#shown = true;
  }

  hide() {
    this.#shown = false;
  }

  async fetch(provider) {
    if (!this.#known.has(provider)) this.#known.set(provider, await fetchSecret(provider));
    return this.#known.get(provider);
  }
}

async function fetchSecret(provider) {
  try {
    return (await post('admin/setup/secret', { provider })).secret;
  } catch (error) {
    // The relay has only a digest of it, or nothing; the administrator who created it knows it.
    if (error.status === 409) return NONE;
    throw error;
  }
}
