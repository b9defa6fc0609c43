// Copying, and blocks of text that are made to be copied.

import { h, setAttribute, setText } from './dom.js';
import { icon } from './icons.js';

const SAID_MS = 2000;

/** `text` is asked for when it is needed: it may have to be fetched first. */
export function copyButton(text, what) {
  const label = h('span', {}, 'Copy');
  const button = h('button', { type: 'button', class: 'copy', 'aria-label': `Copy ${what}` }, icon('copy'), label);
  let timer;
  button.addEventListener('click', async () => {
    const words = await text();
    // Who gives nothing has said why.
    if (typeof words !== 'string') return;
    const done = await copied(words);
    say(done ? 'Copied' : 'Select it and copy by hand', done);
    clearTimeout(timer);
    timer = setTimeout(() => say('Copy', false), SAID_MS);
  });
  function say(said, done) {
    setText(label, said);
    setAttribute(button, 'aria-label', `${said} ${what}`);
    setAttribute(button, 'data-done', done);
  }
  return button;
}

/** A relay at home has no certificate, and browsers give pages over plain HTTP no clipboard: the old way works there. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedTheOldWay(text);
  }
}

function copiedTheOldWay(text) {
  const field = h('textarea', { class: 'visually-hidden', 'aria-hidden': 'true', tabindex: '-1' });
  // Inside an open dialog nothing outside of it can have the focus.
  const parent = document.querySelector('dialog[open]') ?? document.body;
  const before = document.activeElement;
  field.value = text;
  parent.append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  before?.focus({ preventScroll: true });
  return done;
}

/**
 * A block of text with its title and a button. `shown` may hide what `copied` has: a secret stays masked on the screen.
 * `set` changes both.
 */
export function codeBlock(title) {
  let whole = '';
  const code = h('code');
  const node = h(
    'div',
    { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, title), copyButton(() => (typeof whole === 'function' ? whole() : whole), title)),
    // Long lines scroll, and what scrolls has to be reachable by keyboard.
    h('pre', { tabindex: '0', role: 'group', 'aria-label': title }, code),
  );
  return {
    node,
    set(shown, copied = shown) {
      whole = copied;
      setText(code, shown);
    },
  };
}
