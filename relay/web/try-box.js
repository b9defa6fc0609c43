// A box that sends a prompt to a model and shows the response as it arrives.

import { h, setAttribute, setHidden, setText } from './dom.js';
import { count, milliseconds, rate } from './format.js';
import { streamChat } from './chat.js';

/**
 * `given()` returns {model, key, done?} or a promise of it; `done` is always called at the end. `onDone(result)` follows a complete
 * response.
 */
export function tryBox({ prompt, label, given, onDone }) {
  const input = h('textarea', { rows: 2, 'aria-label': 'Prompt', value: prompt });
  const send = h('button', { type: 'submit', class: 'primary' }, label);
  const stop = h('button', { type: 'button', hidden: true, onclick: () => running?.abort() }, 'Stop');
  const answer = h('div', { class: 'answer', hidden: true, tabindex: '0', role: 'group', 'aria-label': 'Response' });
  const figures = h('p', { class: 'figures', role: 'status' });
  const node = h('form', { class: 'try', onsubmit: submit }, input, h('div', { class: 'actions' }, send, stop, figures), answer);
  let running = null;
  let able = true;

  async function submit(event) {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    begin();
    let done;
    try {
      const target = await given();
      done = target.done;
      const result = await streamChat({ ...target, prompt: input.value, signal: running.signal, onText });
      setText(figures, inWords(result));
      setAttribute(node, 'data-state', result.stopped ? 'stopped' : 'done');
      if (!result.stopped) onDone?.(result);
    } catch (error) {
      setAttribute(node, 'data-state', 'failed');
      setText(figures, error.message);
    }
    running = null;
    setHidden(stop, true);
    send.disabled = !able;
    done?.();
  }
  function begin() {
    setAttribute(node, 'data-state', 'running');
    setHidden(answer, false);
    setHidden(stop, false);
    send.disabled = true;
    answer.replaceChildren();
    setText(figures, 'Sent; waiting for the first token …');
  }
  function onText(piece) {
    if (!answer.hasChildNodes()) setText(figures, 'Receiving …');
    answer.append(piece);
    answer.scrollTop = answer.scrollHeight;
  }
  function setEnabled(enabled) {
    able = enabled;
    send.disabled = !enabled || running !== null;
  }
  return { node, setEnabled };
}

function inWords(result) {
  const parts = [];
  if (result.firstMs !== null) parts.push(`first token after ${milliseconds(result.firstMs)}`);
  const number = result.tokens ?? result.pieces;
  parts.push(`${count(number)} ${result.tokens === null ? 'pieces' : 'tokens'} in ${milliseconds(result.totalMs)}`);
  const seconds = (result.totalMs - (result.firstMs ?? 0)) / 1000;
  if (number > 1 && seconds > 0.05) parts.push(`${rate((number - 1) / seconds)} per second`);
  return `${result.stopped ? 'Stopped: ' : ''}${parts.join(' · ')}`;
}
