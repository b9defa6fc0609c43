// One option of a few, as cards. They are radio buttons, so that keys and screen readers work as usual.

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
