// Dialogs with <dialog>: the browser keeps the focus inside, closes on Escape and restores the focus.

import { h } from './dom.js';

/** Shows `content` until its `close` is called; resolves to the argument of that call. */
export function openDialog(title, build) {
  return new Promise((resolve) => {
    const id = `dialog-${Math.random().toString(36).slice(2)}`;
    const dialog = h('dialog', { 'aria-labelledby': id }, h('h2', { id }, title));
    let result;
    const close = (value) => {
      result = value;
      dialog.close();
    };
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(result);
    });
    dialog.append(...[build(close)].flat());
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Requests confirmation of an irreversible action; resolves to true if it was confirmed. */
export function confirmed(title, words, yes) {
  return openDialog(title, (close) => [
    h('p', {}, words),
    h(
      'div',
      { class: 'actions' },
      h('button', { type: 'button', autofocus: true, onclick: () => close(false) }, 'Go back'),
      h('button', { type: 'button', class: 'danger', onclick: () => close(true) }, yes),
    ),
  ]);
}
