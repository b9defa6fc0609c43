// /dashboard: shows the view that the address names, drawn from the store at most once per frame.

import { h } from './dom.js';
import { journalView } from './view-journal.js';
import { keysView } from './view-keys.js';
import { overviewView } from './view-overview.js';
import { providersView } from './view-providers.js';
import { queueView } from './view-queue.js';
import { requestsView } from './view-requests.js';
import { start } from './shell.js';
import { usageView } from './view-usage.js';
import { workerView } from './view-worker.js';
import { workersView } from './view-workers.js';

const VIEWS = {
  '': ['Overview', overviewView],
  workers: ['Workers', workersView],
  queue: ['Queue', queueView],
  requests: ['Requests', requestsView],
  providers: ['Providers', providersView],
  journal: ['Event log', journalView],
  keys: ['API keys', keysView],
  usage: ['Usage', usageView],
};

let main;
let context;
let view;

start({
  mount(into, given) {
    main = into;
    context = given;
    show();
  },
  update(store) {
    if (view && main.isConnected) view.update(store);
  },
});

addEventListener('hashchange', () => {
  if (!main) return;
  show();
  // As on any new page, reading and tabbing start at the top.
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});

/** A view is created by a function of the context (and the rest of the route), and has {node, update(store)}. */
function show() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, '').split('/').map(decoded);
  const [title, make] = name === 'workers' && rest[0] ? ['Worker', workerView] : VIEWS[name] ?? VIEWS[''];
  document.title = `${title} · ModelRelay`;
  view = make(context, ...rest);
  main.replaceChildren(view.node);
  if (context.store.known) view.update(context.store);
  else if (!view.instant) main.append(h('p', { class: 'waiting', 'aria-hidden': 'true' }));
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
