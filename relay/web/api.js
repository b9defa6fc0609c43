// Every request to the relay goes through here: one place for the header against forged requests, for errors in words, and for the
// one thing that concerns all pages, that the login is over. Paths have no slash at their front: a proxy may serve the relay below a path.

/** The address of this relay in this browser, without a slash at its end. */
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

/** Calls `listener` whenever the relay says that this browser is not logged in any more. */
export function onLoginOver(listener) {
  over.addEventListener('over', listener);
}

export async function call(method, path, body) {
  const response = await send(method, path, body);
  if (response.ok) return response.status === 204 ? null : response.json().catch(() => null);
  const error = await problem(response);
  // The login form's own 403 is a wrong token, not a login that ended.
  if (response.status === 403 && path !== 'dashboard/login') over.dispatchEvent(new Event('over'));
  throw error;
}

export const get = (path) => call('GET', path);
export const post = (path, body) => call('POST', path, body ?? {});
export const remove = (path) => call('DELETE', path);

async function send(method, path, body) {
  const headers = method === 'GET' ? {} : { 'x-modelrelay-dashboard': '1' };
  if (body !== undefined) headers['content-type'] = 'application/json';
  try {
    return await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, 'unreachable', 'The relay cannot be reached. Is it running?');
  }
}

let clientsElsewhere = false;

/** What the relay says of this browser, and of itself. */
export async function session() {
  const said = await get('dashboard/session');
  clientsElsewhere = said.clients_elsewhere;
  return said;
}

/**
 * Asks as a client does, with the key that it would have. The admin's cookie goes along only where clients have a listener of their own:
 * that of the pages answers nobody then who is not logged in.
 */
export function fetchAsClient(path, key, { headers, ...init } = {}) {
  const credentials = clientsElsewhere ? 'same-origin' : 'omit';
  const ofKey = key ? { authorization: `Bearer ${key}` } : {};
  const ofPage = clientsElsewhere ? { 'x-modelrelay-dashboard': '1' } : {};
  return fetch(path, { ...init, credentials, headers: { ...headers, ...ofKey, ...ofPage } });
}

export async function problem(response) {
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The relay answered ${response.status}.`;
  return new ApiError(response.status, said?.error?.code ?? '', message, response.headers.get('retry-after'));
}

export const workerPath = (id, what) => `admin/workers/${encodeURIComponent(id)}/${what}`;
