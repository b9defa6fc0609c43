// The frame of all pages: navigation, the state of the connection, login and logout. A page provides the content of `main`.

import { onLoginOver, post, session as askSession } from './api.js';
import { h, oncePerFrame, setAttribute, setHidden, setText } from './dom.js';
import { count } from './format.js';
import { icon, logo } from './icons.js';
import { Live } from './live.js';
import { loginForm } from './login.js';
import { noticeRegion, orSay } from './notices.js';
import { Store } from './store.js';
import { themeSwitch } from './theme.js';

const NAVIGATION = [
  ['Fleet', [
    ['dashboard#/', 'overview', 'Overview'],
    ['dashboard#/workers', 'workers', 'Workers'],
    ['dashboard#/queue', 'queue', 'Queue'],
    ['dashboard#/requests', 'requests', 'Requests'],
    ['dashboard#/providers', 'providers', 'Providers'],
    ['dashboard#/journal', 'journal', 'Event log'],
    ['dashboard#/keys', 'keys', 'API keys'],
    ['dashboard#/usage', 'usage', 'Usage'],
  ]],
  ['Get started', [
    ['setup', 'setup', 'Add a machine'],
    ['integrate', 'integrate', 'Connect a client'],
  ]],
];

/**
 * Builds the page around `page.mount(main, context)`, which is called once with `{store, session}`; `page.update(store)` is called after
 * each change, at most once per frame. A page with `open: true` is also shown without a login, except at an address for admins only.
 */
export async function start(page) {
  const store = new Store();
  const parts = frame();
  document.body.replaceChildren(parts.skip, parts.root, noticeRegion());
  markCurrent(parts);
  const update = oncePerFrame(() => {
    countBadges(parts, store);
    page.update(store);
  });
  const live = new Live(store, { change: update, state: (state) => connection(parts, state), over: () => enter() });
  onLoginOver(() => enter());
  parts.logout.addEventListener('click', () => orSay(async () => {
    await post('dashboard/logout');
    location.reload();
  }));

  let mounted = null;
  let entering = false;
  async function enter() {
    if (entering) return;
    entering = true;
    live.stop();
    try {
      const session = await sessionOrRetry(parts);
      setText(parts.version, session.version);
      setHidden(parts.logout, !session.logged_in);
      setHidden(parts.state, !session.logged_in);
      setAttribute(parts.root, 'data-login', session.logged_in ? 'in' : 'out');
      if (session.logged_in || (page.open && !session.clients_elsewhere)) {
        // Mounted again after a login or its end, because the page may offer other actions then.
        if (mounted !== session.logged_in) page.mount(parts.main, { store, session, login: () => showLogin(session) });
        mounted = session.logged_in;
      } else {
        showLogin(session);
      }
      if (session.logged_in) live.start();
    } finally {
      entering = false;
    }
  }
  function showLogin(session) {
    mounted = null;
    // All shown data requires the login and is removed with it. An open dialog would also block the form.
    document.querySelectorAll('dialog[open]').forEach((dialog) => dialog.close());
    parts.main.replaceChildren(loginForm(session, () => {
      parts.main.replaceChildren();
      enter();
    }));
  }
  // A page restored from the browser's cache may be from before a logout.
  addEventListener('pageshow', (event) => event.persisted && location.reload());
  await enter();
}

function frame() {
  const main = h('main', { id: 'main', tabindex: '-1' });
  const version = h('span', { class: 'version' });
  const state = h('span', { class: 'connection', 'data-state': 'connecting', role: 'status' }, 'Connecting …');
  const logout = h('button', { type: 'button', class: 'quiet', hidden: true, 'aria-label': 'Log out' }, icon('logout'), h('span', {}, 'Log out'));
  const links = new Map();
  const nav = h('nav', { 'aria-label': 'Main' }, NAVIGATION.map(([title, entries]) => section(title, entries, links)));
  const root = h(
    'div',
    { class: 'frame' },
    h(
      'header',
      { class: 'side' },
      h('a', { class: 'brand', href: 'dashboard#/' }, logo(), h('span', {}, 'ModelRelay'), version),
      nav,
      h('div', { class: 'side-foot' }, state, h('div', { class: 'side-buttons' }, themeSwitch(), logout)),
    ),
    main,
  );
  const skip = h('a', { class: 'skip', href: '#main', onclick: (event) => {
    // The hash is the dashboard's route: it must not become "#main".
    event.preventDefault();
    main.focus();
  } }, 'Skip to content');
  const parts = { skip, root, nav, main, version, state, logout, links };
  addEventListener('hashchange', () => markCurrent(parts));
  return parts;
}

function section(title, entries, links) {
  return h('div', { class: 'nav-section' }, h('p', { class: 'nav-title' }, title), h('ul', {}, entries.map(([href, name, words]) => {
    const badge = h('span', { class: 'badge', hidden: true });
    const link = h('a', { href }, icon(name), h('span', {}, words), badge);
    links.set(name, { link, badge });
    return h('li', {}, link);
  })));
}

function markCurrent(parts) {
  const view = `#/${location.hash.slice(2).split('/')[0]}`;
  for (const { link } of parts.links.values()) {
    const current = link.pathname === location.pathname && (!link.hash || link.hash === view);
    setAttribute(link, 'aria-current', current ? 'page' : null);
    // On a phone the entries are one scrollable row.
    if (current) parts.nav.scrollLeft = link.offsetLeft - parts.nav.clientWidth / 2;
  }
}

function countBadges(parts, store) {
  let waiting = 0;
  for (const provider of store.providers.values()) waiting += provider.queue_depth;
  badge(parts.links.get('workers').badge, store.workers.size);
  badge(parts.links.get('queue').badge, waiting);
  badge(parts.links.get('requests').badge, store.requestsTotal);
}

function badge(node, value) {
  setHidden(node, value === 0);
  setText(node, count(value));
}

function connection(parts, state) {
  setAttribute(parts.state, 'data-state', state);
  setText(parts.state, state === 'live' ? 'Live' : 'Connection lost, reconnecting …');
  setAttribute(parts.root, 'data-connection', state);
}

async function sessionOrRetry(parts) {
  for (;;) {
    try {
      return await askSession();
    } catch (error) {
      setHidden(parts.state, false);
      connection(parts, 'lost');
      if (!parts.main.hasChildNodes()) parts.main.replaceChildren(h('p', { class: 'empty' }, error.message));
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}
