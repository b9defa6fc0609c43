// Overview: the fleet now and in the last hour, and its problems.

import { age, setAge } from './clock.js';
import { h, setAttribute, setHidden, setList, setText } from './dom.js';
import { count, milliseconds, NOTHING, percent, rate, some } from './format.js';
import { icon } from './icons.js';
import { lineChart } from './chart.js';
import { concerns } from './concerns.js';
import { pill, setPill } from './parts.js';
import { combined, lastMinute, totals } from './summary.js';

const PHASES = {
  running: ['Running', 'ok'],
  grace: ['Shutting down', 'warn'],
  draining: ['Draining', 'warn'],
  leaving: ['Shutting down', 'warn'],
  stopping: ['Stopping', 'bad'],
};

export function overviewView({ store }) {
  const phase = pill();
  const relayWords = h('span');
  const uptime = age(null);
  const provider = h('select', { 'aria-label': 'Provider', onchange: () => update(store) });
  const choice = h('label', { class: 'choice', hidden: true }, 'Provider', provider);
  const head = h(
    'div',
    { class: 'view-head' },
    h('h1', {}, 'Overview'),
    h('p', { class: 'relay-line' }, phase, relayWords, h('span', {}, 'up for ', uptime)),
    choice,
  );
  const attention = h('ul', { class: 'concerns', 'aria-label': 'Needs attention' });
  const welcome = firstSteps();
  const tiles = figures();
  const charts = hourCharts();
  const node = h('div', { class: 'view' }, head, attention, welcome, tiles.node, h('h2', { class: 'visually-hidden' }, 'The last hour'), charts.node);

  function update(now) {
    const { relay } = now;
    setPill(phase, ...(PHASES[relay.phase] ?? [relay.phase, 'warn']));
    setText(relayWords, `version ${relay.version}`);
    setAge(uptime, relay.started_at);
    const names = [...now.providers.keys()];
    setHidden(choice, names.length < 2);
    setList(provider, ['', ...names], (name) => name, (name) => h('option', { value: name }, name || 'All providers'));
    const only = now.providers.has(provider.value) ? provider.value : null;
    const chosen = only ? [now.providers.get(only)] : [...now.providers.values()];
    const points = now.points.map((point) => combined(point, only));
    const fresh = now.workers.size === 0 && points.every((point) => point.requests === 0);
    // Zeros and empty charts do not help on a first visit.
    for (const part of [tiles.node, charts.node]) setHidden(part, fresh);
    setHidden(welcome, now.workers.size > 0);
    setHidden(attention, !showConcerns(attention, concerns(now)));
    tiles.update(totals(chosen), lastMinute(points, now.intervalMs));
    charts.update(points, now.intervalMs);
  }
  return { node, update };
}

function firstSteps() {
  return h(
    'section',
    { class: 'card welcome', hidden: true },
    h('h2', {}, 'No machines connected'),
    h('p', {}, 'The relay is running. Add a machine with a model: this takes two commands on that machine and no open port.'),
    h('a', { class: 'button primary', href: 'setup' }, icon('setup'), 'Add a machine'),
  );
}

function showConcerns(list, all) {
  setList(list, all, (one) => one.key, () => h('li', {}, icon('warn'), h('span'), h('a', {})), (item, one) => {
    const [, words, link] = item.children;
    setAttribute(item, 'class', one.tone);
    setText(words, one.words);
    setText(link, one.link ?? '');
    setHidden(link, !one.link);
    setAttribute(link, 'href', one.href ?? null);
  });
  return all.length > 0;
}

function figures() {
  const made = {};
  const tile = (key, label, title) => {
    const value = h('dd', { class: 'tile-value' });
    const detail = h('dd', { class: 'tile-detail' });
    made[key] = { value, detail };
    return h('div', { class: 'tile', title: title ?? null }, h('dt', {}, label), value, detail);
  };
  const slots = h('span', { class: 'bar-fill' });
  const slotsTile = tile('slots', 'Slots in use', 'Running requests, and the maximum that workers can run concurrently');
  slotsTile.append(h('dd', { class: 'bar', 'aria-hidden': 'true' }, slots));
  const node = h(
    'dl',
    { class: 'tiles' },
    slotsTile,
    tile('workers', 'Workers'),
    tile('queue', 'Waiting in queue'),
    tile('flight', 'In flight'),
    tile('requests', 'Requests per second', 'Over the last minute'),
    tile('errors', 'Errors', 'Share of the requests of the last minute'),
    tile('ttft', 'First token, median', 'In the last minute; several providers are weighted by their requests. The 95th percentile is that of the slowest provider'),
    tile('tokens', 'Tokens per second', 'Output tokens, over the last minute'),
  );
  function update(sum, minute) {
    fill(made.slots, count(sum.load), `of ${count(sum.capacity)}, ${count(Math.max(0, sum.capacity - sum.load))} free`);
    slots.style.width = sum.capacity ? `${Math.min(100, (100 * sum.load) / sum.capacity).toFixed(1)}%` : '0';
    setAttribute(slots, 'data-full', sum.capacity && sum.load >= sum.capacity ? 'yes' : null);
    fill(made.workers, count(sum.workers), sum.draining ? `${count(sum.draining)} draining` : 'connected');
    fill(made.queue, count(sum.queued), `room for ${count(sum.queueCapacity)}`);
    fill(made.flight, count(sum.inFlight), 'at workers');
    fill(made.requests, rate(minute.requestsPerSecond), 'last minute');
    fill(made.errors, minute.requests ? percent(minute.errors, minute.requests) : NOTHING, minute.errors ? some(minute.errors, 'error') : 'none in the last minute');
    setAttribute(made.errors.value, 'data-tone', minute.errors ? 'bad' : null);
    fill(made.ttft, milliseconds(minute.p50), minute.p95 === null ? 'no data' : `95 % within ${milliseconds(minute.p95)}`);
    fill(made.tokens, rate(minute.tokensPerSecond), 'written');
  }
  return { node, update };
}

function fill(tile, value, detail) {
  setText(tile.value, value);
  setText(tile.detail, detail);
}

function hourCharts() {
  const perSecond = (field) => (point) => point[field] / seconds;
  let seconds = 10;
  const charts = [
    lineChart('Requests and errors', [
      { name: 'Requests/s', tone: 'one', value: perSecond('requests'), format: rate, axis: axisNumber },
      { name: 'Errors/s', tone: 'bad', value: perSecond('errors'), format: rate },
    ], { floor: 0.5 }),
    lineChart('Time to first token', [
      { name: 'Median', tone: 'one', value: (point) => point.p50, format: milliseconds, axis: axisTime },
      { name: '95th percentile', tone: 'two', value: (point) => point.p95, format: milliseconds },
    ], { floor: 50 }),
    lineChart('Queue and in flight', [
      { name: 'In flight', tone: 'one', value: (point) => point.inFlight, format: count },
      { name: 'Waiting', tone: 'warn', value: (point) => point.queued, format: count },
    ], { floor: 3 }),
    lineChart('Tokens', [
      { name: 'Written/s', tone: 'one', value: perSecond('tokensOut'), format: rate, axis: axisNumber },
      { name: 'Read/s', tone: 'two', value: perSecond('tokensIn'), format: rate },
    ], { floor: 5, empty: 'No token counts in the last hour: streams include them only if clients set include_usage' }),
  ];
  const node = h('div', { class: 'charts' }, charts.map((chart) => chart.node));
  return {
    node,
    update(points, interval) {
      seconds = interval / 1000;
      for (const chart of charts) chart.update(points, interval);
    },
  };
}

function axisNumber(value) {
  return value < 1000 ? String(value) : count(value);
}

function axisTime(ms) {
  if (ms === 0) return '0';
  return ms < 1000 ? `${Math.round(ms)} ms` : `${+(ms / 1000).toPrecision(2)} s`;
}
