// The event stream of a page. It is reconnected when it breaks, closed while the page is hidden, and ended when the login expires.

import { get } from './api.js';
import { setRelayTime } from './clock.js';

/** The relay sends a message at least every 15 s; a stream that is silent for longer is dead, even if the browser has not noticed. */
const SILENCE_MS = 40_000;
/** A page in the background would keep one of the few connections that a browser has for a host. */
const HIDDEN_MS = 60_000;
const LONGEST_PAUSE_MS = 15_000;

export class Live {
  #store;
  #on;
  #source = null;
  #watchdog = null;
  #again = null;
  #pause = 1000;
  #hidden = null;
  #stopped = true;

  /** `on.change()` is called after each event, `on.state('live' | 'lost')` on changes of state, `on.over()` when the login has expired. */
  constructor(store, on) {
    this.#store = store;
    this.#on = on;
    document.addEventListener('visibilitychange', () => this.#onVisibility());
  }

  start() {
    this.#stopped = false;
    this.#open();
  }

  stop() {
    this.#stopped = true;
    this.#close();
  }

  #open() {
    this.#close();
    const source = new EventSource('admin/live');
    this.#source = source;
    source.addEventListener('snapshot', (event) => this.#take(event, (data) => this.#store.replace(data)));
    source.addEventListener('change', (event) => this.#take(event, (data) => this.#store.change(data)));
    source.addEventListener('error', () => this.#lost());
    this.#watch();
  }

  #take(event, apply) {
    const data = JSON.parse(event.data);
    setRelayTime(data.at);
    apply(data);
    this.#pause = 1000;
    this.#watch();
    this.#on.state('live');
    this.#on.change();
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#lost(), SILENCE_MS);
  }

  // The browser's own retries cannot distinguish an expired login from a restarting relay, so each retry checks the login first.
  #lost() {
    this.#close();
    if (this.#stopped) return;
    this.#on.state('lost');
    this.#again = setTimeout(() => this.#retry(), this.#pause * (0.7 + 0.6 * Math.random()));
    this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
  }

  async #retry() {
    try {
      const session = await get('dashboard/session');
      if (this.#stopped) return;
      if (session.logged_in) this.#open();
      else this.#on.over();
    } catch {
      this.#lost();
    }
  }

  #close() {
    clearTimeout(this.#watchdog);
    clearTimeout(this.#again);
    this.#source?.close();
    this.#source = null;
  }

  #onVisibility() {
    clearTimeout(this.#hidden);
    if (this.#stopped) return;
    if (document.hidden) this.#hidden = setTimeout(() => this.#close(), HIDDEN_MS);
    else if (!this.#source) this.#open();
  }
}
