// /setup: adds a machine, up to a first response from it. All steps are shown at once; each is ticked when it is done.

import { bringing, connecting, lasting, lookAround, starting } from './commands.js';
import { choice } from './choice.js';
import { codeBlock } from './copying.js';
import { get, relayAddress } from './api.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { BACKENDS, isLoopback, likelySystem, SYSTEMS } from './machines.js';
import { orSay } from './notices.js';
import { page } from './parts.js';
import { testStep } from './setup-test.js';
import { waitStep } from './setup-wait.js';
import { WorkerSecret } from './secret.js';
import { start } from './shell.js';

const settings = { system: likelySystem(), relay: relayAddress(), listenWith: 'LISTEN_ADDR=0.0.0.0:8080', provider: 'local', backend: BACKENDS[0], atOnce: BACKENDS[0].atOnce, name: '' };
let secret = new WorkerSecret();

let wait;
let test;
let redraw = () => {};

start({
  mount(main, context) {
    main.replaceChildren(build(context));
    orSay(async () => filled(await get('admin/setup')));
  },
  update(store) {
    wait?.update(store);
    test?.update(store, wait.found);
  },
});

function build({ session }) {
  // Nothing of a previous login is kept.
  secret = new WorkerSecret();
  redrawers.length = 0;
  const steps = [];
  const step = (title, ...content) => {
    const node = h('li', { class: 'step' }, h('h2', {}, title), content);
    steps.push(node);
    return node;
  };
  wait = waitStep(settings, () => markSteps(steps));
  test = testStep(session, () => markSteps(steps));
  const list = h(
    'ol',
    { class: 'steps' },
    step('Where does the model run?', choice('system', 'Operating system of the machine', SYSTEMS, settings.system, (id) => set({ system: id }))),
    step('Which inference server runs it?', backendStep()),
    step('Start a worker on that machine', commandStep()),
    step('Wait for the worker to connect', wait.node),
    step('Test the model', test.node),
    step('Run it as a service', lastingStep()),
  );
  markSteps(steps);
  redraw();
  const intro = h('p', { class: 'intro' }, 'A small worker next to your inference server connects to this relay. No port is opened on that machine.');
  return page('Add a machine', intro, list);
}

/** The first three steps are choices with a good default; the later ones are done when their event has happened. */
function markSteps(steps) {
  const done = [true, true, Boolean(wait.found), Boolean(wait.found), test.passed, false];
  const current = done.indexOf(false);
  steps.forEach((step, i) => {
    setAttribute(step, 'data-state', done[i] ? 'done' : i === current || (i === 3 && current === 2) ? 'current' : 'later');
    setAttribute(step, 'aria-current', i === current ? 'step' : null);
  });
}

const redrawers = [];
function set(changed) {
  Object.assign(settings, changed);
  redraw();
}
redraw = () => redrawers.forEach((draw) => draw());

let setup = { providers: [] };
function filled(answer) {
  setup = answer;
  const first = answer.providers.find((provider) => provider.name === 'local') ?? answer.providers[0];
  set({ relay: answer.worker_url, listenWith: answer.listen_with ?? settings.listenWith, provider: first?.name ?? 'local' });
}

function backendStep() {
  const listing = codeBlock('List the servers on that machine');
  const hint = h('p', { class: 'hint' });
  const url = h('input', { id: 'backend-url', type: 'url', spellcheck: false, autocomplete: 'off', oninput: () => set({ url: url.value.trim() }) });
  const atOnce = h('input', { id: 'at-once', type: 'number', min: 1, max: 10_000, inputmode: 'numeric', oninput: () => set({ atOnce: Math.max(1, Number(atOnce.value) || 1) }) });
  const atOnceHint = h('p', { class: 'hint', id: 'at-once-hint' });
  atOnce.setAttribute('aria-describedby', 'at-once-hint');
  const options = BACKENDS.map((backend) => ({ id: backend.id, name: backend.name, detail: backend.id === 'other' ? 'OpenAI-compatible' : `port ${backend.port}` }));
  const choose = (id) => {
    const backend = BACKENDS.find((one) => one.id === id);
    set({ backend, atOnce: backend.atOnce, url: undefined });
    url.value = backendUrl();
    atOnce.value = settings.atOnce;
  };
  url.value = backendUrl();
  atOnce.value = settings.atOnce;
  redrawers.push(() => {
    listing.set(lookAround(settings.system));
    const { begin, flag } = settings.backend;
    setText(hint, begin ? `Not started yet? For example: ${begin}` : 'Any server with /v1/models and /v1/chat/completions.');
    setText(atOnceHint, `The number that the server runs in parallel: ${flag}`);
  });
  return [
    choice('backend', 'Inference server', options, settings.backend.id, choose),
    h('div', { class: 'pair' },
      h('div', { class: 'field' }, h('label', { for: 'backend-url' }, 'Server address, seen from that machine'), url, hint),
      h('div', { class: 'field' }, h('label', { for: 'at-once' }, 'Concurrent requests'), atOnce, atOnceHint)),
    listing.node,
  ];
}

function backendUrl() {
  return settings.url || `http://127.0.0.1:${settings.backend.port}`;
}

function commandStep() {
  const relay = h('input', { id: 'relay-url', type: 'url', spellcheck: false, autocomplete: 'off', value: settings.relay, oninput: () => set({ relay: relay.value.trim() }) });
  const provider = h('select', { id: 'provider', onchange: () => set({ provider: provider.value }) });
  const providerField = h('div', { class: 'field', hidden: true }, h('label', { for: 'provider' }, 'Provider'), provider);
  const name = h('input', { id: 'worker-name', autocomplete: 'off', placeholder: 'its host name', maxlength: 64, oninput: () => set({ name: name.value.trim() }) });
  const use = h('button', { type: 'button', class: 'small', onclick: () => set({ relay: setup.network_url }) });
  const listenWith = h('code', {});
  const warning = h('div', { class: 'banner warn', hidden: true },
    h('p', {}, 'This is a loopback address: another machine would connect to itself. Enter this machine’s name or address in the network, and start the relay with ', listenWith, ' if it listens on 127.0.0.1 only.'), use);
  const blocks = h('div', { class: 'stack' });
  const noSecret = h('p', { class: 'banner warn', hidden: true }, 'This relay cannot show the secret of that provider. Insert the secret into the command.');
  const unsupported = h('p', { class: 'hint', hidden: true });
  const show = h('button', { type: 'button', class: 'small', onclick: () => orSay(flip) }, 'Show the secret');
  async function flip() {
    if (secret.shown) secret.hide();
    else await secret.show(settings.provider);
    redraw();
  }
  redrawers.push(() => {
    if (document.activeElement !== relay) relay.value = settings.relay;
    setList(provider, setup.providers, (one) => one.name, (one) => h('option', { value: one.name }, one.name));
    provider.value = settings.provider;
    setHidden(providerField, setup.providers.length < 2);
    setText(listenWith, settings.listenWith);
    setHidden(warning, !isLoopback(settings.relay));
    setHidden(use, !setup.network_url);
    setText(use, `Use ${setup.network_url}`);
    setHidden(noSecret, setup.providers.find((one) => one.name === settings.provider)?.has_secret ?? true);
    setText(show, secret.shown ? 'Hide the secret' : 'Show the secret');
    setText(unsupported, { macos: 'macOS is untested.', windows: 'Tested under Wine, not on Windows yet.' }[settings.system] ?? '');
    setHidden(unsupported, !unsupported.textContent);
    drawBlocks(blocks, (given) => [...bringing(given.system), ...connecting(given), ...starting(given)]);
  });
  return [
    h('div', { class: 'pair' },
      h('div', { class: 'field' }, h('label', { for: 'relay-url' }, 'Relay address, seen from that machine'), relay),
      providerField,
      h('div', { class: 'field' }, h('label', { for: 'worker-name' }, 'Worker name (optional)'), name)),
    warning,
    noSecret,
    blocks,
    h('div', { class: 'actions start' }, show, h('span', { class: 'hint' }, 'Copied commands include the secret.'), unsupported),
  ];
}

function lastingStep() {
  const blocks = h('div', { class: 'stack' });
  redrawers.push(() => drawBlocks(blocks, lasting));
  return [h('p', {}, 'To start the worker automatically after a restart of that machine:'), blocks];
}

/** `texts(settings)` makes the shown text, with a masked secret, and the copied one, with the secret. */
function drawBlocks(parent, texts) {
  const at = (word) => ({ ...settings, secret: word, backend: { ...settings.backend, url: backendUrl() } });
  const shown = texts(at(secret.visible(settings.provider)));
  setList(parent, shown, (block) => `${settings.system} ${block.title}`, makeBlock, (node, block) => {
    const copied = async () => {
      const word = await orSay(() => secret.fetch(settings.provider));
      return word && texts(at(word)).find((one) => one.title === block.title).text;
    };
    node.block.set(block.text, block.text.includes(secret.visible(settings.provider)) ? copied : block.text);
  });
}

function makeBlock(block) {
  const code = codeBlock(block.title);
  const node = h('div', { class: 'noted' }, block.note && h('p', { class: 'hint' }, block.note), code.node);
  node.block = code;
  return node;
}
