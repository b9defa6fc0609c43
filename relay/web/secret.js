// The worker secret: fetched only when somebody wants to see or copy it, masked until then, and gone when the page is left.

import { post } from './api.js';

export const MASK = '••••••••';
const NONE = 'YOUR-WORKER-SECRET';

export class WorkerSecret {
  #known = new Map();
  #shown = false;

  /** What may stand on the screen now. */
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
    if (!this.#known.has(provider)) this.#known.set(provider, await asked(provider));
    return this.#known.get(provider);
  }
}

async function asked(provider) {
  try {
    return (await post('admin/setup/secret', { provider })).secret;
  } catch (error) {
    // It is kept as a digest, or nowhere: the one who set it up knows it.
    if (error.status === 409) return NONE;
    throw error;
  }
}
