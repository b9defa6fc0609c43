// Names come from workers and end in commands that people paste: each is quoted for the language it goes into.

/** For POSIX shells; what needs no quotes gets none, because it reads better. */
export function shell(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** For PowerShell, where curly quotes are quotes too. */
export function powershell(text) {
  return `'${text.replace(/['\u2018-\u201b]/g, '$&$&')}'`;
}

/** For JSON, and for what takes its strings: YAML, TOML, Python, TypeScript. */
export function quoted(text) {
  return JSON.stringify(text).replaceAll('\u2028', '\\u2028').replaceAll('\u2029', '\\u2029');
}

export function xml(text) {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
}

/** The right side of an Environment= line of systemd, where % and " and \ mean something. */
export function systemd(assignment) {
  return `"${assignment.replaceAll('\\', '\\\\').replaceAll('"', '\\"').replaceAll('%', '%%')}"`;
}

/** Inside a here-document whose END is not quoted, because $HOME is meant there. */
export function inHereDocument(text) {
  return text.replace(/[\\$`]/g, '\\$&');
}
