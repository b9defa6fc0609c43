// Creates and updates nodes. Text is always set as text, because names of workers, clients and models are untrusted.

const SVG = 'http://www.w3.org/2000/svg';

/** Creates an element: h('button', {class: 'primary', onclick: save}, 'Save'). Children may be nodes, texts, lists, and nothing. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** Creates an element inside an <svg>. */
export function s(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name in PROPERTIES) node[name] = value;
    else setAttribute(node, name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// These properties differ from their attributes after user input.
const PROPERTIES = { value: true, checked: true, selected: true, disabled: true, hidden: true, indeterminate: true };

/** Writes only changes: an untouched node keeps focus, selection and layout. */
export function setText(node, text) {
  const words = text === null || text === undefined ? '' : String(text);
  if (node.textContent !== words) node.textContent = words;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else {
    const words = value === true ? '' : String(value);
    if (node.getAttribute(name) !== words) node.setAttribute(name, words);
  }
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/**
 * Gives `parent` one child per item, in order. Nodes are kept by key, so that an update only moves and fills changed ones; the focused node
 * keeps the focus.
 */
export function setList(parent, items, key, make, fill) {
  const known = (parent.listed ??= new Map());
  const wanted = new Map();
  for (const item of items) {
    const id = key(item);
    const node = known.get(id) ?? make(item);
    fill?.(node, item);
    wanted.set(id, node);
  }
  for (const [id, node] of known) if (!wanted.has(id)) node.remove();
  parent.listed = wanted;
  let place = parent.firstElementChild;
  for (const node of wanted.values()) {
    if (node === place) place = place.nextElementSibling;
    else move(parent, node, place);
  }
}

function move(parent, node, before) {
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  parent.insertBefore(node, before);
  focused?.focus({ preventScroll: true });
}

/** Calls `work` once at the next frame, regardless of the number of calls: a burst of changes is rendered once. */
export function oncePerFrame(work) {
  let scheduled = false;
  return () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      work();
    });
  };
}
