// All requests to the relay go through this module: it sets the header against forged requests, turns errors into messages, and detects the
// end of the login. Paths have no leading slash, because a proxy may serve the relay below a path.

/** The relay's address in this browser, without a trailing slash. */
export const relayAddress = () => new URL('.', document.baseURI).href.slice(0, -1);

export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const over = new EventTarget();

/** Calls `listener` whenever the relay reports that this browser is no longer logged in. */
export function onLoginOver(listener) {
  over.addEventListener('over', listener);
}

export async function call(method, path, body) {
  const response = await send(method, path, body);
  if (response.ok) return response.status === 204 ? null : response.json().catch(() => null);
  const error = await problem(response);
  // The login form's own 403 means a wrong token, not an expired login.
  if (response.status === 403 && path !== 'dashboard/login') over.dispatchEvent(new Event('over'));
  throw error;
}

export const get = (path) => call('GET', path);
export const post = (path, body) => call('POST', path, body ?? {});
export const patch = (path, body) => call('PATCH', path, body);
export const remove = (path) => call('DELETE', path);

async function send(method, path, body) {
  const headers = method === 'GET' ? {} : { 'x-modelrelay-dashboard': '1' };
  if (body !== undefined) headers['content-type'] = 'application/json';
  try {
    return await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, 'unreachable', 'Cannot reach the relay. Check that it is running.');
  }
}

let clientsElsewhere = false;

/** Returns the state of this browser's login, and the relay's settings for the pages. */
export async function session() {
  const state = await get('dashboard/session');
  clientsElsewhere = state.clients_elsewhere;
  return state;
}

/**
 * Sends a request as a client does, with the client's key. The admin's cookie is included only if clients have a separate listener: the
 * listener of the pages then rejects requests without a login.
 */
export function fetchAsClient(path, key, { headers, ...init } = {}) {
  const credentials = clientsElsewhere ? 'same-origin' : 'omit';
  const ofKey = key ? { authorization: `Bearer ${key}` } : {};
  const ofPage = clientsElsewhere ? { 'x-modelrelay-dashboard': '1' } : {};
  return fetch(path, { ...init, credentials, headers: { ...headers, ...ofKey, ...ofPage } });
}

export async function problem(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The relay returned ${response.status}.`;
  return new ApiError(response.status, body?.error?.code ?? '', message, response.headers.get('retry-after'));
}

export const workerPath = (id, what) => `admin/workers/${encodeURIComponent(id)}/${what}`;
