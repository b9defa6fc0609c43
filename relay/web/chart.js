// Line charts of the last hour, or of days, in SVG. Values are read with the pointer, with the arrow keys, and in a table.

import { h, s, setAttribute, setHidden, setList, setText } from './dom.js';
import { clockTime } from './format.js';

const HEIGHT = 168;
const EDGE = { top: 10, right: 12, bottom: 22, left: 54 };
const MINUTE_MS = 60_000;
const LONGEST_MS = 60 * MINUTE_MS;
const SHORTEST_MS = 5 * MINUTE_MS;
const ROWS = 12;

/**
 * `series`: [{name, tone, value(point), format}]; `options`: {empty, floor, scale}: the text shown without data, the lowest upper end of the
 * axis, so that a single request does not look like a peak, and the time axis, by default the last hour.
 */
export function lineChart(title, series, options = {}) {
  const chart = new Chart(title, series, options);
  return { node: chart.node, update: (points, interval) => chart.update(points, interval) };
}

/** The time axis of the last hour. */
const HOUR = {
  words: 'over the last hour',
  now: () => 'now',
  range: timeRange,
  ticks: timeTicks,
  label: clockTime,
  moment: clockSeconds,
  /** The number of points per row of the table: one row per five minutes. */
  step: (interval) => Math.max(1, Math.round(LONGEST_MS / ROWS / interval)),
};

class Chart {
  #scale;
  #series;
  #options;
  #points = [];
  #interval = 10_000;
  #width = 0;
  #read = null;

  constructor(title, series, options) {
    this.#series = series;
    this.#options = options;
    this.#scale = options.scale ?? HOUR;
    this.title = title;
    this.#build();
    new ResizeObserver(() => this.#resized()).observe(this.plot);
  }

  #build() {
    this.grid = s('g', { class: 'grid' });
    this.lines = this.#series.map(({ tone }) => s('path', { class: `line ${tone}` }));
    this.areas = this.#series.map(({ tone }) => s('path', { class: `area ${tone}` }));
    this.cursor = s('line', { class: 'cursor', y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    this.dots = this.#series.map(({ tone }) => s('circle', { class: `dot ${tone}`, r: 3.5 }));
    this.marks = s('g', { class: 'marks', visibility: 'hidden' }, this.cursor, this.dots);
    this.svg = s('svg', { height: HEIGHT, 'aria-hidden': 'true', focusable: 'false' }, this.grid, this.areas, this.lines, this.marks);
    this.empty = h('p', { class: 'chart-empty', hidden: true }, this.#options.empty ?? 'No data in the last hour');
    this.plot = h(
      'div',
      { class: 'plot', tabindex: '0', role: 'slider', 'aria-label': `${this.title}, ${this.#scale.words}`, 'aria-valuemin': 0 },
      this.svg,
      this.empty,
    );
    this.plot.addEventListener('pointermove', (event) => this.#point(event));
    this.plot.addEventListener('pointerleave', () => this.#show(null));
    this.plot.addEventListener('keydown', (event) => this.#key(event));
    this.plot.addEventListener('blur', () => this.#show(null));
    this.when = h('span', { class: 'chart-when' }, 'now');
    this.values = this.#series.map(() => h('strong'));
    const legend = this.#series.map(({ name, tone }, i) =>
      h('li', {}, h('span', { class: `swatch ${tone}` }), `${name} `, this.values[i]),
    );
    this.table = h('div', { class: 'chart-table' });
    this.details = h('details', { ontoggle: () => this.#tabulate() }, h('summary', {}, 'As a table'), this.table);
    this.node = h(
      'figure',
      { class: 'chart card' },
      h('figcaption', {}, h('h3', {}, this.title), this.when),
      h('ul', { class: 'legend' }, legend),
      this.plot,
      this.details,
    );
  }

  update(points, interval) {
    this.#points = points;
    this.#interval = interval;
    if (this.#read !== null) this.#read = Math.min(this.#read, points.length - 1);
    this.#draw();
    this.#tabulate();
  }

  #resized() {
    const width = this.plot.clientWidth;
    if (width === this.#width) return;
    this.#width = width;
    setAttribute(this.svg, 'width', width);
    this.#draw();
  }

  #draw() {
    if (!this.#width) return;
    const points = this.#points;
    const end = points.at(-1)?.at ?? Date.now();
    const rows = this.#series.map(({ value }) => points.map((point) => value(point)));
    const highest = Math.max(this.#options.floor ?? 1, ...rows.flat().filter((value) => value !== null));
    const ticks = niceTicks(highest);
    const right = this.#width - EDGE.right;
    const range = this.#scale.range(points[0]?.at ?? end, end);
    this.x = (at) => right - ((end - at) / range) * (right - EDGE.left);
    this.y = (value) => HEIGHT - EDGE.bottom - (value / ticks.at(-1)) * (HEIGHT - EDGE.bottom - EDGE.top);
    this.rows = rows;
    this.#drawGrid(ticks, end, range);
    rows.forEach((row, i) => {
      const path = this.#path(row);
      setAttribute(this.lines[i], 'd', path.line);
      setAttribute(this.areas[i], 'd', i === 0 ? path.area : '');
    });
    setHidden(this.empty, rows.some((row) => row.some((value) => value)));
    setAttribute(this.plot, 'aria-valuemax', Math.max(0, points.length - 1));
    this.#show(this.#read);
  }

  #drawGrid(ticks, end, range) {
    const format = this.#series[0].axis ?? this.#series[0].format;
    const marks = ticks.map((value) => ({ key: `y${value}`, y: this.y(value), text: format(value) }));
    for (const at of this.#scale.ticks(end, range)) {
      if (this.x(at) > EDGE.left + 12) marks.push({ key: `x${at}`, x: this.x(at), text: this.#scale.label(at) });
    }
    setList(this.grid, marks, (mark) => mark.key, () => s('g', {}, s('line'), s('text')), (node, mark) => {
      const [line, text] = node.children;
      setText(text, mark.text);
      if (mark.y !== undefined) {
        place(line, { x1: EDGE.left, x2: this.#width - EDGE.right, y1: mark.y, y2: mark.y });
        place(text, { x: EDGE.left - 8, y: mark.y + 4, 'text-anchor': 'end' });
      } else {
        place(line, { x1: mark.x, x2: mark.x, y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom + 4 });
        const atEdge = mark.x > this.#width - EDGE.right - 16;
        place(text, { x: atEdge ? this.#width - EDGE.right : mark.x, y: HEIGHT - 5, 'text-anchor': atEdge ? 'end' : 'middle' });
      }
    });
  }

  // An unknown value leaves a gap, because a line across it would suggest a value.
  #path(row) {
    let line = '';
    let area = '';
    let from = null;
    const bottom = (HEIGHT - EDGE.bottom).toFixed(1);
    const close = (i) => {
      if (from !== null) area += `L${this.#at(i)} ${bottom}L${this.#at(from)} ${bottom}Z`;
      from = null;
    };
    row.forEach((value, i) => {
      const x = this.x(this.#points[i].at);
      if (value === null || x < EDGE.left) {
        close(i - 1);
        return;
      }
      const step = `${from === null ? 'M' : 'L'}${x.toFixed(1)} ${this.y(value).toFixed(1)}`;
      from ??= i;
      line += step;
      area += step;
      // A single value would be a line without length.
      if (row[i + 1] === null || row[i + 1] === undefined) line += 'h.1';
    });
    close(row.length - 1);
    return { line, area };
  }

  #at(i) {
    return this.x(this.#points[i].at).toFixed(1);
  }

  #point(event) {
    if (!this.#points.length || !this.x) return;
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    let nearest = 0;
    this.#points.forEach((point, i) => {
      if (Math.abs(this.x(point.at) - x) < Math.abs(this.x(this.#points[nearest].at) - x)) nearest = i;
    });
    this.#show(nearest);
  }

  #key(event) {
    const last = this.#points.length - 1;
    const at = this.#read ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 6, PageDown: at + 6, Home: 0, End: last }[event.key];
    if (event.key === 'Escape') this.#show(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#show(Math.max(0, Math.min(last, to)));
  }

  /** Shows the values of one point, or the latest ones without an index. */
  #show(index) {
    this.#read = index;
    const i = index ?? this.#points.length - 1;
    const point = this.#points[i];
    const words = this.#series.map(({ value, format }) => {
      const known = point ? value(point) : null;
      return known === null ? '–' : format(known);
    });
    words.forEach((text, n) => setText(this.values[n], text));
    setText(this.when, index === null ? this.#scale.now(point) : this.#scale.moment(point.at));
    setAttribute(this.plot, 'aria-valuenow', Math.max(0, i));
    setAttribute(this.plot, 'aria-valuetext', point ? `${this.#scale.label(point.at)}: ${this.#series.map(({ name }, n) => `${name} ${words[n]}`).join(', ')}` : 'no data yet');
    setAttribute(this.marks, 'visibility', index === null ? 'hidden' : 'visible');
    if (index !== null && this.x) this.#mark(i);
  }

  #mark(i) {
    const x = this.x(this.#points[i].at);
    place(this.cursor, { x1: x, x2: x });
    this.dots.forEach((dot, n) => {
      const value = this.rows[n][i];
      setAttribute(dot, 'visibility', value === null ? 'hidden' : 'inherit');
      if (value !== null) place(dot, { cx: x, cy: this.y(value) });
    });
  }

  // Built only while the table is open.
  #tabulate() {
    if (!this.details.open) return;
    const step = this.#scale.step(this.#interval);
    const chosen = [];
    for (let i = this.#points.length - 1; i >= 0; i -= step) chosen.push(this.#points[i]);
    const cell = ({ value, format }, point) => {
      const known = value(point);
      return h('td', {}, known === null ? '–' : format(known));
    };
    this.table.replaceChildren(h(
      'table',
      {},
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, this.#scale.column ?? 'Time'), this.#series.map(({ name }) => h('th', { scope: 'col' }, name)))),
      h('tbody', {}, chosen.map((point) => h('tr', {}, h('th', { scope: 'row' }, this.#scale.label(point.at)), this.#series.map((one) => cell(one, point))))),
    ));
  }
}

function place(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, typeof value === 'number' ? +value.toFixed(1) : value);
}

function clockSeconds(at) {
  return new Date(at).toLocaleTimeString('en-GB');
}

/** Returns ticks from zero to at least `highest`, in three or four steps of 1, 2 or 5. */
export function niceTicks(highest) {
  const rough = highest / 3;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((candidate) => candidate >= rough * 0.999);
  const ticks = [0];
  while (ticks.at(-1) < highest * 0.999) ticks.push(+(ticks.at(-1) + step).toPrecision(12));
  return ticks;
}

/** Returns the time range of a chart whose points start at `begin`, in milliseconds: at most an hour, less if there is less data. */
export function timeRange(begin, end) {
  return Math.min(LONGEST_MS, Math.max(SHORTEST_MS, end - begin));
}

/** Returns the times of the axis labels, newest first. */
export function timeTicks(end, range) {
  const step = [1, 2, 5, 15].map((minutes) => minutes * MINUTE_MS).find((step) => range / step <= 5);
  const ticks = [];
  for (let at = Math.floor(end / step) * step; at > end - range; at -= step) ticks.push(at);
  return ticks;
}
