// Runs before the first paint, so that a dark page does not flash white. The stored choice applies, otherwise the system's. A blocked
// storage is not an error.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem('modelrelay.theme');
  } catch {}
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const root = document.documentElement;
  const show = () => (root.dataset.theme = chosen ?? (dark.matches ? 'dark' : 'light'));
  dark.addEventListener('change', () => root.dataset.chosen || show());
  show();
})();
