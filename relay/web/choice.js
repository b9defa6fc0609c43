// One of a few, as cards: radio buttons underneath, so that keys and screen readers work as everywhere.

import { h } from './dom.js';
import { icon } from './icons.js';

/** `options`: [{id, name, detail?, icon?}]. */
export function choice(name, legend, options, chosen, onChange) {
  const inputs = options.map((option) => h('input', {
    type: 'radio', name, value: option.id, checked: option.id === chosen, onchange: () => onChange(option.id),
  }));
  return h('fieldset', { class: 'choices' }, h('legend', { class: 'visually-hidden' }, legend), options.map((option, i) => h(
    'label',
    { class: 'option' },
    inputs[i],
    option.icon && icon(option.icon),
    h('span', { class: 'option-name' }, option.name),
    option.detail && h('span', { class: 'option-detail' }, option.detail),
  )));
}
