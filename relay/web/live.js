// The one stream of events, kept open: it is dialled again when it breaks, closed while nobody looks, and a login that is over ends it.

import { get } from './api.js';
import { setRelayTime } from './clock.js';

/** The relay says something at least each 15 s; a stream without a word for longer is dead, whatever the browser thinks. */
const SILENCE_MS = 40_000;
/** A page in the background keeps one of the few connections that a browser has for a host. */
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

  /** `on.change()` after each event, `on.state('live' | 'lost')` when that changes, `on.over()` when the login is over. */
  constructor(store, on) {
    this.#store = store;
    this.#on = on;
    document.addEventListener('visibilitychange', () => this.#seen());
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

  // The browser's own retries cannot tell an ended login from a relay that restarts; so each is made here, after asking.
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

  #seen() {
    clearTimeout(this.#hidden);
    if (this.#stopped) return;
    if (document.hidden) this.#hidden = setTimeout(() => this.#close(), HIDDEN_MS);
    else if (!this.#source) this.#open();
  }
}
