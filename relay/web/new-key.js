// The form for a new API key, and its secret, which is shown once.

import { codeBlock } from './copying.js';
import { h, setText } from './dom.js';
import { openDialog } from './dialogs.js';
import { post } from './api.js';

const DAY_MS = 86_400_000;
const LIFETIMES = [['', 'Never'], ['7', 'In 7 days'], ['30', 'In 30 days'], ['90', 'In 90 days'], ['365', 'In a year'], ['date', 'At a date …']];

/** Resolves to true if a key was created. */
export async function newKey(store) {
  const created = await openDialog('New API key', (close) => form(store, close));
  if (!created) return false;
  await openDialog(`Key “${created.name}” is ready`, (close) => secret(created, close));
  return true;
}

function form(store, close) {
  const providers = [...store.providers.keys()];
  const fields = {
    name: h('input', { id: 'key-name', required: true, maxlength: 128, autocomplete: 'off', autofocus: true }),
    models: h('input', { id: 'key-models', autocomplete: 'off', list: 'key-known-models', placeholder: 'all models', 'aria-describedby': 'key-models-hint' }),
    providers: providers.map((name) => h('input', { type: 'checkbox', value: name })),
    lifetime: h('select', { id: 'key-lifetime', onchange: () => showDate() }, LIFETIMES.map(([value, words]) => h('option', { value }, words))),
    date: h('input', { id: 'key-date', type: 'datetime-local' }),
    flight: h('input', { id: 'key-flight', type: 'number', min: 1, max: 1_000_000, inputmode: 'numeric', placeholder: 'no limit' }),
    share: h('input', { id: 'key-share', type: 'number', min: 1, max: 100, inputmode: 'numeric', placeholder: 'no limit' }),
  };
  const date = h('div', { class: 'field', hidden: true }, h('label', { for: 'key-date' }, 'Date and time'), fields.date);
  const problem = h('p', { class: 'problem', role: 'alert' });
  function showDate() {
    date.hidden = fields.lifetime.value !== 'date';
    fields.date.required = !date.hidden;
  }
  async function submit(event) {
    event.preventDefault();
    setText(problem, '');
    try {
      close(await post('admin/keys', requestBody(fields)));
    } catch (error) {
      setText(problem, error.message);
    }
  }
  return h(
    'form',
    { onsubmit: submit },
    field('key-name', 'Name', fields.name, 'Owner or purpose of the key'),
    h('div', { class: 'field' }, h('label', { for: 'key-models' }, 'Models'), fields.models,
      h('p', { class: 'hint', id: 'key-models-hint' }, 'Separated by commas; leave empty for all'),
      h('datalist', { id: 'key-known-models' }, store.models().map((model) => h('option', { value: model.id })))),
    providers.length > 1 && h('fieldset', { class: 'field' }, h('legend', {}, 'Providers'),
      fields.providers.map((box) => h('label', { class: 'check' }, box, box.value)), h('p', { class: 'hint' }, 'Select none to allow all')),
    h('div', { class: 'field' }, h('label', { for: 'key-lifetime' }, 'Expires'), fields.lifetime),
    date,
    h('div', { class: 'pair' },
      field('key-flight', 'Concurrent requests', fields.flight, 'Waiting or running'),
      field('key-share', 'Share of the queue, %', fields.share, 'Limit for its waiting requests')),
    problem,
    h('div', { class: 'actions' },
      h('button', { type: 'button', onclick: () => close() }, 'Cancel'),
      h('button', { type: 'submit', class: 'primary' }, 'Create the key')),
  );
}

function field(id, label, input, hint) {
  input.setAttribute('aria-describedby', `${id}-hint`);
  return h('div', { class: 'field' }, h('label', { for: id }, label), input, h('p', { class: 'hint', id: `${id}-hint` }, hint));
}

/** A limit that was left empty is left out, which means no limit. */
function requestBody(fields) {
  const body = { name: fields.name.value.trim() };
  const models = fields.models.value.split(',').map((model) => model.trim()).filter(Boolean);
  if (models.length) body.models = models;
  const providers = fields.providers.filter((box) => box.checked).map((box) => box.value);
  if (providers.length) body.providers = providers;
  const lifetime = fields.lifetime.value;
  if (lifetime === 'date') body.expires_at = new Date(fields.date.value).toISOString();
  else if (lifetime) body.expires_at = new Date(Date.now() + Number(lifetime) * DAY_MS).toISOString();
  if (fields.flight.value) body.max_in_flight = Number(fields.flight.value);
  if (fields.share.value) body.max_queue_percent = Number(fields.share.value);
  return body;
}

function secret(created, close) {
  const block = codeBlock('API key');
  block.set(created.secret);
  return [
    h('p', {}, 'Copy the key now. ', h('strong', {}, 'It is shown only once'), ': the relay stores only its hash. If you lose the key, revoke it and create another.'),
    block.node,
    h('div', { class: 'actions' }, h('button', { type: 'button', class: 'primary', onclick: () => close(true) }, 'I have copied it')),
  ];
}
