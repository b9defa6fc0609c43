// Runs before the first paint: a page that is light for a moment and then dark hurts the eyes. What was chosen counts, else the system; a
// blocked storage is no reason to fail.
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
