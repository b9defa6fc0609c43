// A first request to the new worker's model, sent as a client sends it.

import { h, setHidden, setList, setText } from './dom.js';
import { temporaryKey } from './temporary-key.js';
import { tryBox } from './try-box.js';

export function testStep(session, onPassed) {
  const model = h('select', { id: 'test-model' });
  const field = h('div', { class: 'field' }, h('label', { for: 'test-model' }, 'Model'), model);
  const later = h('p', { class: 'hint' }, 'Available once the worker is connected.');
  const next = h('p', { hidden: true }, 'It works. ', h('a', { href: 'integrate' }, 'Connect a client'), ', or set up the worker as a service below.');
  const box = tryBox({ prompt: 'Say hello in one sentence.', label: 'Send a test request', given, onDone });
  const ready = h('div', { class: 'stack', hidden: true }, field, box.node);
  const step = { node: h('div', { class: 'stack' }, later, ready, next), passed: false, update };

  async function given() {
    const chosen = { model: model.value };
    return session.require_api_keys ? { ...chosen, ...(await temporaryKey('Test of a new machine')) } : chosen;
  }
  function onDone(result) {
    step.passed = result.pieces > 0;
    setHidden(next, !step.passed);
    onPassed();
  }
  function update(store, worker) {
    const models = worker?.models ?? [];
    setHidden(ready, models.length === 0 && !step.passed);
    setHidden(later, !ready.hidden);
    setText(later, worker ? 'Available once the worker has a model.' : 'Available once the worker is connected.');
    setList(model, models, (id) => id, (id) => h('option', { value: id }, id));
    box.setEnabled(models.length > 0);
  }
  return step;
}
