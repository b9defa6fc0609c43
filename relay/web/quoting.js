// Quoting for each language of the commands that users paste, because they contain names from workers.

/** Quotes for POSIX shells; a text that needs no quotes gets none, because it is easier to read. */
export function shell(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** Quotes for PowerShell, where curly quotes are quotes too. */
export function powershell(text) {
  return `'${text.replace(/['\u2018-\u201b]/g, '$&$&')}'`;
}

/** Quotes for JSON, and for languages that accept its strings: YAML, TOML, Python, TypeScript. */
export function quoted(text) {
  return JSON.stringify(text).replaceAll('\u2028', '\\u2028').replaceAll('\u2029', '\\u2029');
}

export function xml(text) {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
}

/** Quotes the right side of an Environment= line of systemd, where % and " and \ are special. */
export function systemd(assignment) {
  return `"${assignment.replaceAll('\\', '\\\\').replaceAll('"', '\\"').replaceAll('%', '%%')}"`;
}

/** Escapes for a here-document whose END is not quoted, because $HOME must be expanded in it. */
export function inHereDocument(text) {
  return text.replace(/[\\$`]/g, '\\$&');
}
