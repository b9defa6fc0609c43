// The slots of a worker that loads and unloads models: the model of each, its transition, and commands to it.

import { age, setAge, setCountdown, setProgress } from './clock.js';
import { get, post, workerPath } from './api.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { icon } from './icons.js';
import { notice } from './notices.js';
import { pill, setPill } from './parts.js';

const ASK_AGAIN_MS = 700;
const STATES = {
  ready: 'ok', empty: 'idle', loading: 'busy', draining: 'warn', severing: 'warn', evicting: 'warn',
  rolling_back: 'warn', backoff: 'warn', quarantined: 'bad', stopping: 'warn',
};
const STATUSES = { resident: 'ok', sleeping: 'idle', unloaded: 'idle', loading: 'busy', failed: 'bad' };

export function slotCards(context, workerId) {
  const list = h('div', { class: 'slots' });
  const node = h('section', { hidden: true }, h('h2', {}, 'Slots'), list);
  return {
    node,
    update(worker) {
      const slots = worker.slots ?? [];
      setHidden(node, slots.length === 0);
      setList(list, slots, (slot) => slot.id, () => slotCard(workerId), (card, slot) => card.update(slot));
    },
  };
}

function slotCard(workerId) {
  const name = h('h3');
  const state = pill();
  const resident = h('p', { class: 'slot-resident' });
  const since = age(null);
  const swap = swapProgress();
  const failure = h('p', { class: 'problem', hidden: true });
  const models = h('ul', { class: 'slot-models' });
  const node = h('article', { class: 'card slot' }, h('div', { class: 'slot-head' }, name, state, h('span', { class: 'slot-since' }, 'for ', since)), resident, swap.node, failure, models);
  node.update = (slot) => {
    setText(name, slot.id);
    setPill(state, slot.state.replaceAll('_', ' '), STATES[slot.state] ?? 'warn');
    setAge(since, slot.since);
    setText(resident, slot.resident ?? 'no model loaded');
    setAttribute(resident, 'data-empty', slot.resident ? null : 'yes');
    swap.update(slot);
    const failed = slot.last_failure;
    setHidden(failure, !failed);
    if (failed) setText(failure, `${failed.model} was not loaded: ${failed.message ?? failed.code}`);
    setList(models, slot.models, (model) => model.id, (model) => modelRow(workerId, slot.id, model.id), (row, model) => row.update(model));
  };
  return node;
}

/** The slot's transition from one model to another, with the worker's estimate of its end. */
function swapProgress() {
  const words = h('span');
  const left = h('span', { class: 'hint' });
  const bar = h('progress');
  const node = h('div', { class: 'swap', hidden: true }, h('div', {}, words, left), bar);
  let began = null;
  function update(slot) {
    setHidden(node, !slot.target);
    if (!slot.target) {
      began = null;
      return;
    }
    if (began?.target !== slot.target) began = { target: slot.target, at: slot.since };
    setText(words, slot.resident && slot.resident !== slot.target ? `${slot.resident} → ${slot.target}` : `Loading ${slot.target}`);
    setAttribute(bar, 'aria-label', `Progress of ${slot.target}`);
    setHidden(left, slot.eta === null);
    if (slot.eta === null) {
      for (const name of ['value', 'data-from', 'data-until']) bar.removeAttribute(name);
      return;
    }
    setCountdown(left, slot.eta);
    setProgress(bar, began.at, slot.eta);
  }
  return { node, update };
}

function modelRow(workerId, slotId, model) {
  const status = pill();
  const pinned = h('span', { class: 'tag', hidden: true }, icon('pin'), 'pinned');
  const wanted = h('span', { class: 'tag', hidden: true }, 'wanted');
  const message = h('span', { class: 'hint' });
  const outcome = h('span', { class: 'outcome' });
  const order = (command, label) => h('button', {
    type: 'button', class: 'small', 'aria-label': `${label} ${model} in ${slotId}`,
    onclick: () => carryOut({ command, model, slot: slotId }, label),
  }, label);
  const [load, unload, pin, unpin] = [order('load', 'Load'), order('unload', 'Unload'), order('pin', 'Pin'), order('unpin', 'Unpin')];
  const buttons = [load, unload, pin, unpin];
  const node = h(
    'li',
    {},
    h('div', { class: 'slot-model' }, h('span', { class: 'slot-model-name' }, model), status, pinned, wanted),
    h('div', { class: 'actions' }, buttons),
    message,
    outcome,
  );
  let busy = false;
  async function carryOut(body, label) {
    busy = true;
    setAttribute(outcome, 'data-tone', 'busy');
    setText(outcome, `${label}: in progress …`);
    for (const button of buttons) button.disabled = true;
    const done = await followed(workerId, body);
    setAttribute(outcome, 'data-tone', done.ok ? 'ok' : 'bad');
    setText(outcome, done.ok ? `${label}: done` : `${label}: ${done.error}`);
    notice(done.ok ? `${label} ${model}: done` : `${label} ${model}: ${done.error}`, done.ok ? 'ok' : 'error');
    busy = false;
    for (const button of buttons) button.disabled = false;
  }
  node.update = (report) => {
    setPill(status, report.status, STATUSES[report.status] ?? 'warn');
    setHidden(pinned, !report.pinned);
    setHidden(wanted, !report.wanted || report.status === 'resident');
    setText(message, report.message ?? '');
    setHidden(message, !report.message);
    if (busy) return;
    setHidden(load, report.status === 'resident' || report.status === 'loading');
    setHidden(unload, report.status !== 'resident');
    setHidden(pin, report.pinned);
    setHidden(unpin, !report.pinned);
  };
  return node;
}

/** Sends a command and polls until the worker has reported its result. */
async function followed(workerId, body) {
  try {
    const { op_id } = await post(workerPath(workerId, 'command'), body);
    for (;;) {
      const operation = await get(`admin/ops/${encodeURIComponent(op_id)}`);
      if (operation.done) return { ok: operation.ok, error: operation.error ?? 'no reason reported' };
      await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MS));
    }
  } catch (error) {
    return { ok: false, error: error.message };
  }
}
