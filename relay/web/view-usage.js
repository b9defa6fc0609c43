// Usage: requests, tokens and times of each API key, per day and as sums.

import { get } from './api.js';
import { lineChart } from './chart.js';
import { DAY_MS, dayOf, DAYS, perDay } from './days.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { absolute, count, duration } from './format.js';
import { orSay } from './notices.js';
import { page } from './parts.js';
import { dataTable } from './table.js';
import { csvOf, keyName, NO_KEY, perKeyAndModel, total, unanswered } from './usage-sums.js';

const ASK_AGAIN_MS = 60_000;
const HOUR_MS = 3_600_000;
const PERIODS = [['7', 'Last 7 days'], ['30', 'Last 30 days'], ['90', 'Last 90 days'], ['400', 'Last 400 days']];

export function usageView() {
  const period = h('select', { 'aria-label': 'Period', onchange: load }, PERIODS.map(([days, words]) => h('option', { value: days }, words)));
  period.value = '30';
  const key = h('select', { 'aria-label': 'API key', onchange: show });
  const download = h('a', { class: 'button', download: 'usage.csv', href: '' }, 'Download CSV');
  const since = h('p', { class: 'banner', hidden: true });
  const charts = dayCharts();
  const table = dataTable(columns(), {
    name: 'Usage by key and model',
    noun: 'row',
    key: (row) => row.id,
    words: (row) => `${keyName(row)} ${row.key_id ?? ''} ${row.model}`,
    sort: ['output', true],
    empty: () => [h('p', {}, 'No requests in this period.')],
  });
  const tools = h('div', { class: 'actions' }, h('label', { class: 'choice' }, 'Period', period), h('label', { class: 'choice' }, 'API key', key), download);
  const node = page('Usage', tools, since, h('h2', { class: 'visually-hidden' }, 'Per day'), charts.node, table.node);
  let usage = [];
  let first = '';
  let last = '';

  async function load() {
    last = dayOf(Date.now());
    first = dayOf(Date.now() - (Number(period.value) - 1) * DAY_MS);
    const answer = await orSay(() => get(`admin/usage?since=${first}`));
    if (!answer) return;
    usage = answer.usage;
    setHidden(since, answer.stored);
    setText(since, `Kept in memory only, since ${absolute(Date.parse(answer.since))}. USAGE_FILE stores it across restarts.`);
    const names = new Map(usage.map((row) => [row.key_id ?? NO_KEY, keyName(row)]));
    const sorted = [...names].sort(([, a], [, b]) => a.localeCompare(b, 'en', { numeric: true }));
    setList(key, [['', 'All keys'], ...sorted], ([id]) => id, ([id]) => h('option', { value: id }), (option, [, name]) => setText(option, name));
    show();
  }
  function show() {
    const rows = key.value ? usage.filter((row) => (row.key_id ?? NO_KEY) === key.value) : usage;
    charts.update(perDay(rows, first, last));
    table.update(perKeyAndModel(rows));
    URL.revokeObjectURL(download.href);
    setAttribute(download, 'href', URL.createObjectURL(new Blob([csvOf(rows)], { type: 'text/csv' })));
  }
  load();
  // The stream has no events for usage.
  const timer = setInterval(() => (node.isConnected ? document.hidden || load() : clearInterval(timer)), ASK_AGAIN_MS);
  return { node, instant: true, update() {} };
}

function dayCharts() {
  const sum = (value) => (point) => total(point.rows, value);
  const hours = { format: (value) => duration(value * HOUR_MS), axis: (value) => `${value} h` };
  const options = { scale: DAYS, empty: 'No requests in this period', floor: 10 };
  const tokens = lineChart('Tokens', [
    { name: 'Input', tone: 'one', value: sum((row) => row.input_tokens + row.estimated_input_tokens), format: count },
    { name: 'Output', tone: 'two', value: sum((row) => row.output_tokens + row.estimated_output_tokens), format: count },
  ], options);
  const requests = lineChart('Requests', [
    { name: 'Answered', tone: 'one', value: sum((row) => row.requests.answered), format: count },
    { name: 'Not answered', tone: 'bad', value: sum(unanswered), format: count },
  ], options);
  const slots = lineChart('Worker slots held', [
    { name: 'Time', tone: 'one', value: sum((row) => row.slot_seconds / 3600), ...hours },
  ], { ...options, floor: 0.1 });
  const wait = lineChart('Waiting in the queue', [
    { name: 'Time', tone: 'warn', value: sum((row) => row.wait_seconds / 3600), ...hours },
  ], { ...options, floor: 0.1 });
  const all = [tokens, requests, slots, wait];
  return {
    node: h('div', { class: 'charts' }, all.map((chart) => chart.node)),
    update: (points) => all.forEach((chart) => chart.update(points, DAY_MS)),
  };
}

function columns() {
  const number = (key, title, value, minor, text = count) => ({ key, title, end: true, minor, sort: value, text: (row) => text(value(row)) });
  const time = (seconds) => duration(seconds * 1000);
  return [
    {
      key: 'key',
      title: 'Key',
      heading: true,
      sort: keyName,
      make: () => [h('span'), h('span', { class: 'sub mono' })],
      fill: (cell, row) => {
        setText(cell.children[0], keyName(row));
        setText(cell.children[1], row.key_id ?? '');
      },
    },
    { key: 'model', title: 'Model', sort: (row) => row.model, text: (row) => row.model },
    number('answered', 'Answered', (row) => row.requests.answered),
    number('others', 'Not answered', unanswered, 2),
    number('input', 'Input tokens', (row) => row.input_tokens + row.estimated_input_tokens, 2),
    number('cached', 'Cached', (row) => row.cached_tokens, 3),
    number('output', 'Output tokens', (row) => row.output_tokens + row.estimated_output_tokens),
    number('estimated', 'Estimated', (row) => row.estimated_input_tokens + row.estimated_output_tokens, 3),
    number('slots', 'Worker slots held', (row) => row.slot_seconds, 2, time),
    number('wait', 'Waited', (row) => row.wait_seconds, 3, time),
  ];
}
