// The form with the name and the limits of an API key, for a new key and for an existing one.

import { absolute } from './format.js';
import { h, setText } from './dom.js';

const DAY_MS = 86_400_000;
const LIFETIMES = [['', 'Never'], ['7', 'In 7 days'], ['30', 'In 30 days'], ['90', 'In 90 days'], ['365', 'In a year'], ['date', 'At a date …']];
const KEEP = 'keep';
const CLASSES = [['interactive', 'Interactive: a person waits'], ['normal', 'Normal'], ['batch', 'Batch: may come late']];

/**
 * `key`: its present fields, none for a new key; `send` gets the wanted fields and resolves to the relay's answer, with which the form
 * calls `close`. An error of `send` is shown in the form.
 */
export function keyForm({ store, key = {}, action, send, close }) {
  const fields = inputs(store, key);
  const date = h('div', { class: 'field', hidden: true }, h('label', { for: 'key-date' }, 'Date and time'), fields.date);
  const problem = h('p', { class: 'problem', role: 'alert' });
  fields.lifetime.addEventListener('change', () => {
    date.hidden = fields.lifetime.value !== 'date';
    fields.date.required = !date.hidden;
  });
  async function submit(event) {
    event.preventDefault();
    setText(problem, '');
    try {
      close(await send(wanted(fields)));
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
    fields.providers.length > 1 && h('fieldset', { class: 'field' }, h('legend', {}, 'Providers'),
      fields.providers.map((box) => h('label', { class: 'check' }, box, box.value)), h('p', { class: 'hint' }, 'Select none to allow all')),
    h('div', { class: 'field' }, h('label', { for: 'key-lifetime' }, 'Expires'), fields.lifetime),
    date,
    h('div', { class: 'pair' },
      field('key-flight', 'Concurrent requests', fields.flight, 'Waiting or running'),
      field('key-share', 'Share of the queue, %', fields.share, 'Limit for its waiting requests')),
    h('div', { class: 'pair' },
      field('key-minute', 'Tokens per minute', fields.minute, 'Input and output together'),
      field('key-day', 'Tokens per day', fields.day, 'Input and output together')),
    h('div', { class: 'pair' },
      field('key-class', 'Class', fields.class, 'Higher classes are served first'),
      field('key-weight', 'Weight', fields.weight, 'Share among busy keys of its class')),
    problem,
    h('div', { class: 'actions' },
      h('button', { type: 'button', onclick: () => close() }, 'Cancel'),
      h('button', { type: 'submit', class: 'primary' }, action)),
  );
}

function inputs(store, key) {
  const providers = [...new Set([...store.providers.keys(), ...(key.providers ?? [])])];
  const lifetimes = key.expires_at ? [[KEEP, absolute(Date.parse(key.expires_at))], ...LIFETIMES] : LIFETIMES;
  return {
    name: h('input', { id: 'key-name', required: true, maxlength: 128, autocomplete: 'off', autofocus: true, value: key.name ?? '' }),
    models: h('input', { id: 'key-models', autocomplete: 'off', list: 'key-known-models', placeholder: 'all models', 'aria-describedby': 'key-models-hint', value: (key.models ?? []).join(', ') }),
    providers: providers.map((name) => h('input', { type: 'checkbox', value: name, checked: Boolean(key.providers?.includes(name)) })),
    lifetime: h('select', { id: 'key-lifetime' }, lifetimes.map(([value, words]) => h('option', { value }, words))),
    date: h('input', { id: 'key-date', type: 'datetime-local' }),
    flight: h('input', { id: 'key-flight', type: 'number', min: 1, max: 1_000_000, inputmode: 'numeric', placeholder: 'no limit', value: key.max_in_flight ?? '' }),
    share: h('input', { id: 'key-share', type: 'number', min: 1, max: 100, inputmode: 'numeric', placeholder: 'no limit', value: key.max_queue_percent ?? '' }),
    minute: h('input', { id: 'key-minute', type: 'number', min: 1, inputmode: 'numeric', placeholder: 'no limit', value: key.tokens_per_minute ?? '' }),
    day: h('input', { id: 'key-day', type: 'number', min: 1, inputmode: 'numeric', placeholder: 'no limit', value: key.tokens_per_day ?? '' }),
    class: h('select', { id: 'key-class' }, CLASSES.map(([value, words]) => h('option', { value, selected: value === (key.class ?? 'normal') }, words))),
    weight: h('input', { id: 'key-weight', type: 'number', min: 0.01, max: 100, step: 0.01, inputmode: 'decimal', required: true, value: key.weight ?? 1 }),
  };
}

function field(id, label, input, hint) {
  input.setAttribute('aria-describedby', `${id}-hint`);
  return h('div', { class: 'field' }, h('label', { for: id }, label), input, h('p', { class: 'hint', id: `${id}-hint` }, hint));
}

/** A limit that was left empty is null, which means no limit. An expiry to keep is left out. */
function wanted(fields) {
  const models = fields.models.value.split(',').map((model) => model.trim()).filter(Boolean);
  const providers = fields.providers.filter((box) => box.checked).map((box) => box.value);
  return {
    name: fields.name.value.trim(),
    models: models.length ? models : null,
    providers: providers.length ? providers : null,
    ...expiry(fields),
    max_in_flight: number(fields.flight),
    max_queue_percent: number(fields.share),
    tokens_per_minute: number(fields.minute),
    tokens_per_day: number(fields.day),
    class: fields.class.value,
    weight: number(fields.weight),
  };
}

function expiry({ lifetime, date }) {
  if (lifetime.value === KEEP) return {};
  if (lifetime.value === 'date') return { expires_at: new Date(date.value).toISOString() };
  return { expires_at: lifetime.value ? new Date(Date.now() + Number(lifetime.value) * DAY_MS).toISOString() : null };
}

const number = (input) => (input.value ? Number(input.value) : null);
