// Copy buttons, and blocks of text to copy.

import { h, setAttribute, setText } from './dom.js';
import { icon } from './icons.js';

const SHOWN_MS = 2000;

/** `text` is called when the button is pressed, because the text may have to be fetched first. */
export function copyButton(text, what) {
  const label = h('span', {}, 'Copy');
  const button = h('button', { type: 'button', class: 'copy', 'aria-label': `Copy ${what}` }, icon('copy'), label);
  let timer;
  button.addEventListener('click', async () => {
    const words = await text();
    // A caller that returns no text has already shown the reason.
    if (typeof words !== 'string') return;
    const done = await copied(words);
    show(done ? 'Copied' : 'Select the text and copy it manually', done);
    clearTimeout(timer);
    timer = setTimeout(() => show('Copy', false), SHOWN_MS);
  });
  function show(caption, done) {
    setText(label, caption);
    setAttribute(button, 'aria-label', `${caption} ${what}`);
    setAttribute(button, 'data-done', done);
  }
  return button;
}

/** Browsers disable the clipboard API on pages over plain HTTP, such as those of a relay without a certificate; the older method works. */
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
  // While a dialog is open, nothing outside of it can have the focus.
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
 * A block of text with a title and a copy button. `shown` may hide parts of `copied`: a secret stays masked on the screen. `set` changes
 * both.
 */
export function codeBlock(title) {
  let whole = '';
  const code = h('code');
  const node = h(
    'div',
    { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, title), copyButton(() => (typeof whole === 'function' ? whole() : whole), title)),
    // Long lines scroll, and a scrollable element must be reachable by keyboard.
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
