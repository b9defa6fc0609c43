// The login form for the admin token; the relay returns a cookie that scripts cannot read.

import { post } from './api.js';
import { h, setText } from './dom.js';
import { logo } from './icons.js';

export function loginForm(session, onDone) {
  if (!session.admin_enabled) return withoutToken(session);
  const token = h('input', { type: 'password', id: 'token', name: 'token', autocomplete: 'current-password', required: true });
  const problem = h('p', { class: 'problem', role: 'alert' });
  const button = h('button', { type: 'submit', class: 'primary' }, 'Log in');
  const form = h(
    'form',
    { class: 'login', onsubmit: submit },
    logo(),
    h('h1', {}, 'Log in'),
    h('label', { for: 'token' }, 'Admin token'),
    token,
    problem,
    button,
    h('p', { class: 'hint' }, 'The token that the relay was started with: ', h('code', {}, 'MODELRELAY_ADMIN_TOKEN'), '.'),
  );
  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    setText(problem, '');
    try {
      await post('dashboard/login', { token: token.value });
      onDone();
    } catch (error) {
      setText(problem, inWords(error));
      button.disabled = false;
      token.select();
    }
  }
  requestAnimationFrame(() => token.focus());
  return form;
}

function inWords(error) {
  if (error.status === 403) return 'Wrong admin token.';
  if (error.code !== 'too_many_logins') return error.message;
  return `Too many wrong tokens. Try again ${error.retryAfter ? `in ${error.retryAfter} s` : 'in a minute'}.`;
}

function withoutToken(session) {
  return h(
    'section',
    { class: 'login' },
    logo(),
    h('h1', {}, 'No admin token'),
    h('p', {}, 'This relay was started without an admin token, so the dashboard is unavailable. Restart it with a token:'),
    h('pre', { tabindex: '0' }, h('code', {}, 'MODELRELAY_ADMIN_TOKEN=choose-a-long-one modelrelay-relay')),
    !session.clients_elsewhere && h('p', { class: 'hint' }, 'Clients can connect without it: ', h('a', { href: 'integrate' }, 'Connect a client'), '.'),
  );
}
