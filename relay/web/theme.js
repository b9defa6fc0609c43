// Light or dark: the system's until the user chooses one. early.js applies it before the first paint.

import { h, setAttribute, setText } from './dom.js';
import { icon } from './icons.js';

const KEY = 'modelrelay.theme';
const root = document.documentElement;

export function themeSwitch() {
  const label = h('span');
  const button = h('button', { type: 'button', class: 'quiet', onclick: flip }, icon('theme'), label);
  const next = () => (root.dataset.theme === 'dark' ? 'light' : 'dark');
  function show() {
    setText(label, next() === 'dark' ? 'Dark' : 'Light');
    setAttribute(button, 'aria-label', `Switch to ${next()} colours`);
  }
  function flip() {
    root.dataset.theme = next();
    root.dataset.chosen = 'yes';
    keep(root.dataset.theme);
  }
  new MutationObserver(show).observe(root, { attributeFilter: ['data-theme'] });
  show();
  return button;
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // Without storage, the choice applies to this page only.
  }
}
