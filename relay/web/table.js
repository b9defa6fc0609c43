// A table that stays fast with thousands of entries: filtered, sorted, with one page of rows in the document, updated in place.

import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { icon } from './icons.js';
import { count, some } from './format.js';

const PER_PAGE = 50;

/**
 * `columns`: [{key, title, sort?(row), text?(row) | fill?(cell, row), make?(row), end?, minor?, label?}]: `minor` ones are hidden first on
 * a narrow screen, `end` ones are numbers; `options`: {name, noun, key(row), words(row), sort: [key, descending], empty, filters?}.
 */
export function dataTable(columns, options) {
  const table = new DataTable(columns, options);
  return { node: table.node, update: (rows) => table.update(rows), refresh: () => table.refresh() };
}

class DataTable {
  #columns;
  #options;
  #rows = [];
  #words = [];
  #sort;
  #page = 0;
  #order = [];
  #held = false;

  constructor(columns, options) {
    this.#columns = columns;
    this.#options = options;
    const [key, descending] = options.sort;
    this.#sort = { key, descending };
    this.#build();
  }

  #build() {
    const { name, noun, filters = [] } = this.#options;
    this.filter = h('input', { type: 'search', placeholder: `Filter ${noun}s`, 'aria-label': `Filter ${noun}s`, oninput: () => this.#filtered() });
    this.summary = h('span', { class: 'table-count' });
    this.heads = this.#columns.map((column) => this.#head(column));
    this.body = h('tbody');
    this.table = h('table', { 'aria-label': name }, h('thead', {}, h('tr', {}, this.heads)), this.body);
    this.empty = h('div', { class: 'empty', hidden: true });
    this.previous = h('button', { type: 'button', onclick: () => this.#turn(-1) }, 'Previous');
    this.next = h('button', { type: 'button', onclick: () => this.#turn(1) }, 'Next');
    this.where = h('span', { class: 'table-count' });
    this.pager = h('nav', { class: 'pager', 'aria-label': `Pages of ${name}` }, this.previous, this.where, this.next);
    this.scroll = h('div', { class: 'table-scroll' }, this.table);
    this.node = h(
      'div',
      { class: 'data' },
      h('div', { class: 'table-tools' }, h('label', { class: 'search' }, icon('search'), this.filter), filters, this.summary),
      this.scroll,
      this.empty,
      this.pager,
    );
    this.#hold();
  }

  #head(column) {
    const attributes = { scope: 'col', class: classOf(column) };
    if (!column.sort) return h('th', attributes, column.title || h('span', { class: 'visually-hidden' }, column.label));
    return h('th', attributes, h('button', { type: 'button', class: 'sort', onclick: () => this.#sortBy(column) }, column.title));
  }

  // Keeps the order of the rows while the pointer or the focus is in them, so that they do not move away.
  #hold() {
    const release = () => {
      const over = this.table.matches(':hover') || this.body.contains(document.activeElement);
      if (this.#held && !over) {
        this.#held = false;
        this.refresh();
      }
    };
    this.body.addEventListener('pointerenter', () => (this.#held = true));
    this.body.addEventListener('focusin', () => (this.#held = true));
    this.body.addEventListener('pointerleave', () => setTimeout(release));
    this.body.addEventListener('focusout', () => setTimeout(release));
  }

  update(rows) {
    this.#rows = rows;
    this.refresh();
  }

  refresh() {
    const found = this.#found();
    const ordered = this.#held ? this.#asBefore(found) : this.#sorted(found);
    this.#order = ordered.map(this.#options.key);
    const pages = Math.max(1, Math.ceil(ordered.length / PER_PAGE));
    this.#page = Math.min(this.#page, pages - 1);
    const from = this.#page * PER_PAGE;
    this.#fill(ordered.slice(from, from + PER_PAGE));
    this.#showCounts(found.length, from, pages);
  }

  #found() {
    if (!this.#words.length) return this.#rows;
    return this.#rows.filter((row) => {
      const text = this.#options.words(row).toLowerCase();
      return this.#words.every((word) => text.includes(word));
    });
  }

  #sorted(rows) {
    const { key, descending } = this.#sort;
    const column = this.#columns.find((one) => one.key === key);
    const id = this.#options.key;
    const sign = descending ? -1 : 1;
    return [...rows].sort((a, b) => sign * compare(column.sort(a), column.sort(b)) || compare(id(a), id(b)));
  }

  #asBefore(rows) {
    const byKey = new Map(rows.map((row) => [this.#options.key(row), row]));
    const kept = this.#order.filter((key) => byKey.has(key));
    const known = new Set(kept);
    return [...kept.map((key) => byKey.get(key)), ...rows.filter((row) => !known.has(this.#options.key(row)))];
  }

  #fill(rows) {
    const make = (row) => h('tr', {}, this.#columns.map((column) => {
      const tag = column.heading ? 'th' : 'td';
      const cell = h(tag, { class: classOf(column), 'data-title': column.title || null, scope: column.heading ? 'row' : null });
      const content = column.make?.(row, cell);
      if (content) cell.append(...[content].flat());
      return cell;
    }));
    setList(this.body, rows, this.#options.key, make, (node, row) => {
      this.#columns.forEach((column, i) => {
        if (column.text) setText(node.cells[i], column.text(row));
        else column.fill?.(node.cells[i], row);
      });
    });
  }

  #showCounts(found, from, pages) {
    const { noun, empty } = this.#options;
    const all = this.#rows.length;
    setText(this.summary, found === all ? some(all, noun) : `${count(found)} of ${some(all, noun)}`);
    this.#columns.forEach((column, i) => {
      const sorted = column.key === this.#sort.key && column.sort;
      setAttribute(this.heads[i], 'aria-sort', sorted ? (this.#sort.descending ? 'descending' : 'ascending') : null);
    });
    setHidden(this.scroll, found === 0);
    setHidden(this.empty, found !== 0);
    if (found === 0) this.#showEmpty(all === 0 ? empty() : [`No ${noun} matches “${this.filter.value}”.`]);
    setHidden(this.pager, pages === 1);
    setText(this.where, `${count(from + 1)} to ${count(Math.min(found, from + PER_PAGE))} of ${count(found)}`);
    this.previous.disabled = this.#page === 0;
    this.next.disabled = this.#page === pages - 1;
  }

  // Updated only if the text changes, because a link in it may have the focus.
  #showEmpty(content) {
    const words = content.map((part) => part.textContent ?? part).join('');
    if (this.empty.textContent !== words) this.empty.replaceChildren(...content);
  }

  #sortBy(column) {
    const again = this.#sort.key === column.key;
    this.#sort = { key: column.key, descending: again ? !this.#sort.descending : Boolean(column.end) };
    this.#page = 0;
    this.#held = false;
    this.refresh();
  }

  #filtered() {
    this.#words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.#page = 0;
    this.refresh();
  }

  #turn(by) {
    this.#page += by;
    this.#held = false;
    this.refresh();
    this.scroll.scrollIntoView({ block: 'nearest' });
  }
}

function classOf(column) {
  return [`col-${column.key}`, column.end && 'end', column.minor && `minor-${column.minor}`].filter(Boolean).join(' ');
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b;
}
