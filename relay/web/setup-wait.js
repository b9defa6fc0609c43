// Waits for a worker that was not connected when the page was opened, and shows likely problems if none connects.

import { age, now } from './clock.js';
import { codeBlock } from './copying.js';
import { h, setAttribute, setHidden, setText } from './dom.js';
import { isLoopback } from './machines.js';
import { modelsInWords, workerLink } from './parts.js';
import { shell } from './quoting.js';

const PATIENCE_MS = 20_000;

/** `found` is the new worker; `onFound` is called when it connects and when it changes. */
export function waitStep(settings, onFound) {
  const words = h('p', { class: 'wait-words', role: 'status' }, 'Waiting for a new worker …');
  const models = h('p', { class: 'hint', hidden: true });
  const link = h('a', { hidden: true }, 'Show worker');
  const refused = h('p', { class: 'banner bad', hidden: true });
  const hints = hintList(settings);
  const node = h('div', { class: 'wait', 'data-state': 'waiting' }, h('div', { class: 'wait-line' }, h('span', { class: 'pulse', 'aria-hidden': 'true' }), words, link), models, refused, hints.node);
  const step = { node, found: null, update };
  let before = null;
  let since = null;
  setTimeout(() => step.found || hints.show(), PATIENCE_MS);

  function update(store) {
    before ??= new Set(store.workers.keys());
    since ??= now();
    const found = newest(store, before);
    tellRefusal(refused, found ? null : refusal(store.journal, since));
    if (!found && step.found && !store.workers.has(step.found.worker_id)) lost();
    if (!found || found === step.found) return;
    step.found = found;
    hints.hide();
    setAttribute(node, 'data-state', 'found');
    setText(words, `${found.name} is connected.`);
    setHidden(models, false);
    setText(models, found.models_total
      ? `It serves ${modelsInWords(found.models, found.models_total, 5)}.`
      : 'It has no model yet: its server is still starting, or the address above is wrong. See the worker’s log.');
    setHidden(link, false);
    setAttribute(link, 'href', `dashboard${workerLink(found.worker_id)}`);
    onFound();
  }
  function lost() {
    setAttribute(node, 'data-state', 'waiting');
    setText(words, `${step.found.name} disconnected. Waiting for it …`);
    setHidden(models, true);
    setHidden(link, true);
    step.found = null;
    onFound();
  }
  return step;
}

/** Returns the last of the new workers, with workers that serve a model before others. */
function newest(store, before) {
  const fresh = [...store.workers.values()].filter((worker) => !before.has(worker.worker_id));
  return fresh.sort((a, b) => Boolean(b.models_total) - Boolean(a.models_total) || b.connected_at - a.connected_at)[0] ?? null;
}

/** Returns the relay's latest log entry about a rejected worker since then. */
function refusal(journal, since) {
  for (let i = journal.length - 1; i >= 0 && journal[i].at >= since; i -= 1) {
    const { level, message } = journal[i];
    if (level !== 'info' && /authentication|refused|locked|secret/i.test(message)) return journal[i];
  }
  return null;
}

function tellRefusal(node, event) {
  setHidden(node, !event);
  if (!event || node.dataset.seq === String(event.seq)) return;
  node.dataset.seq = event.seq;
  const from = event.fields?.address ? ` from ${event.fields.address}` : '';
  const why = /authentication/.test(event.message) ? 'wrong secret. Copy the command again, including the secret.' : event.fields?.reason ?? event.message;
  node.replaceChildren(h('span', {}, `A worker${from} was rejected: ${why} `), age(event.at, ' ago'));
}

function hintList(settings) {
  const reach = codeBlock('Check that the machine reaches this relay');
  const local = h('li', {});
  const node = h(
    'div',
    { class: 'hints', hidden: true },
    h('h3', {}, 'No worker yet?'),
    reach.node,
    h('ul', {},
      h('li', {}, 'No response: a firewall blocks the connection, or the address is not this machine’s address in the network.'),
      local,
      h('li', {}, 'A response, but no worker: see the last line of the worker’s log.'),
      h('li', {}, 'A worker with a wrong secret is reported here.')),
  );
  return {
    node,
    show() {
      reach.set(`curl -m 5 ${shell(`${settings.relay}/health`)}`);
      setText(local, isLoopback(settings.relay) ? 'The address above is a loopback address, which other machines cannot reach.' : `Connection refused: the relay listens on 127.0.0.1 only. ${settings.listenWith} changes that.`);
      setHidden(node, false);
    },
    hide: () => setHidden(node, true),
  };
}
