// /integrate: shows how to connect a client, with address, key and model filled in. It needs no login if clients use this address, too: it
// also serves users who have a key, or whose relay requires none.

import { ApiError, fetchAsClient, get, post, problem, relayAddress } from './api.js';
import { choice } from './choice.js';
import { CLIENTS } from './snippets.js';
import { codeBlock } from './copying.js';
import { h, setHidden, setList, setText } from './dom.js';
import { notice, orSay } from './notices.js';
import { page } from './parts.js';
import { MASK } from './secret.js';
import { start } from './shell.js';
import { tryBox } from './try-box.js';

/** The key that clients send if none is required: most clients refuse to start without one. */
const ANY = 'any';
const NO_MODEL = 'YOUR-MODEL';

const state = { base: relayAddress(), key: '', model: '', client: 'curl', shown: false, models: [] };
let parts;
let session;

start({
  open: true,
  mount(main, context) {
    session = context.session;
    main.replaceChildren(build(context));
    draw();
    listModels();
    if (session.logged_in) orSay(async () => {
      state.base = (await get('admin/setup')).relay_url ?? state.base;
      parts.base.value = state.base;
      draw();
    });
  },
  // Models appear and disappear with their workers.
  update(store) {
    const served = store.models().filter((model) => model.workers > 0).map((model) => model.id);
    if (served.length && served.join() !== state.models.join()) show(served);
  },
});

function build({ login }) {
  const settings = connection(login);
  const snippets = h('div', { class: 'stack' });
  const note = h('p', { class: 'hint' });
  const clients = choice('client', 'Client', CLIENTS, state.client, (id) => {
    state.client = id;
    draw();
  });
  const box = tryBox({ prompt: 'Write a haiku about a relay.', label: 'Send', given: () => ({ model: state.model, key: state.key || null }) });
  parts = { ...settings, snippets, note, box };
  return page(
    'Connect a client',
    h('p', { class: 'intro' }, 'Any client for the OpenAI or Anthropic API works. It needs this address, a model name, and an API key if the relay requires one.'),
    h('section', { class: 'card' }, h('h2', {}, 'Model and key'), settings.node),
    h('section', { class: 'card' }, h('h2', {}, 'Client'), clients, note, snippets),
    h('section', { class: 'card' }, h('h2', {}, 'Try it now'), box.node),
  );
}

function connection(login) {
  const base = h('input', { id: 'base', type: 'url', spellcheck: false, autocomplete: 'off', value: state.base, oninput: () => change({ base: base.value.trim().replace(/\/+$/, '') }) });
  const model = h('select', { id: 'model', onchange: () => change({ model: model.value }) });
  const named = h('input', { id: 'model-name', autocomplete: 'off', spellcheck: false, hidden: true, placeholder: NO_MODEL, 'aria-label': 'Model name', oninput: () => change({ model: named.value.trim() }) });
  const modelHint = h('p', { class: 'hint' });
  const key = h('input', { id: 'key', type: 'password', autocomplete: 'off', spellcheck: false, oninput: () => change({ key: key.value.trim() }), onchange: () => listModels() });
  const keyHint = h('p', { class: 'hint' });
  const make = h('button', { type: 'button', onclick: () => makeKey(key, make) }, 'Create a key');
  const enter = h('button', { type: 'button', onclick: login }, 'Log in to create one');
  const show = h('button', { type: 'button', 'aria-pressed': 'false', onclick: () => {
    state.shown = !state.shown;
    key.type = state.shown ? 'text' : 'password';
    show.setAttribute('aria-pressed', state.shown);
    draw();
  } }, 'Show');
  setHidden(make, !session.logged_in);
  setHidden(enter, session.logged_in || !session.admin_enabled);
  setText(keyHint, session.require_api_keys ? 'This relay requires a key.' : 'This relay requires no key; for clients that need one, enter any text.');
  const node = h('div', { class: 'stack' },
    h('div', { class: 'pair' },
      h('div', { class: 'field' }, h('label', { for: 'model' }, 'Model'), model, named, modelHint),
      h('div', { class: 'field' }, h('label', { for: 'base' }, 'Address of this relay'), base, h('p', { class: 'hint' }, 'As seen from the clients'))),
    h('div', { class: 'field' }, h('label', { for: 'key' }, 'API key'), h('div', { class: 'joined' }, key, show, make, enter), keyHint));
  return { node, base, model, named, modelHint };
}

function change(changed) {
  Object.assign(state, changed);
  draw();
}

function draw() {
  const client = CLIENTS.find((one) => one.id === state.client);
  const model = state.model || NO_MODEL;
  const real = state.key || (session.require_api_keys ? 'YOUR-KEY' : ANY);
  const shown = state.key && !state.shown ? MASK : real;
  const make = (key) => client.make({ base: state.base, key, model });
  const whole = make(real);
  setText(parts.note, client.note ?? '');
  setHidden(parts.note, !client.note);
  setList(parts.snippets, make(shown), (block) => `${client.id} ${block.title}`, (block) => {
    const code = codeBlock(block.title);
    code.node.block = code;
    return code.node;
  }, (node, block) => node.block.set(block.text, whole.find((one) => one.title === block.title).text));
  parts.box.setEnabled(Boolean(state.model));
}

async function listModels() {
  try {
    const response = await fetchAsClient('v1/models', state.key);
    if (!response.ok) throw await problem(response);
    show((await response.json()).data.map((model) => model.id));
  } catch (error) {
    if (state.models.length) return;
    show([]);
    const wanted = error instanceof ApiError && error.status === 401;
    setText(parts.modelHint, wanted ? 'Enter a key to list the models.' : error.message);
  }
}

function show(models) {
  state.models = models;
  const none = models.length === 0;
  setHidden(parts.model, none);
  setHidden(parts.named, !none);
  setList(parts.model, models, (id) => id, (id) => h('option', { value: id }, id));
  if (!none && !models.includes(state.model)) state.model = models[0];
  parts.model.value = state.model;
  parts.modelHint.replaceChildren(none ? h('span', {}, 'No model is available now. ', h('a', { href: 'setup' }, 'Add a machine')) : `${models.length} available now`);
  draw();
}

async function makeKey(input, button) {
  button.disabled = true;
  await orSay(async () => {
    const name = `${CLIENTS.find((one) => one.id === state.client).name}, ${new Date().toISOString().slice(0, 10)}`;
    const made = await post('admin/keys', { name });
    input.value = made.secret;
    change({ key: made.secret });
    notice(`Key “${name}” is filled in. It is shown only on this page: copy what you need before you leave.`);
    await listModels();
  });
  button.disabled = false;
}
