// Small outlined icons, defined here so that nothing is fetched. Screen readers skip them and read the text next to them.

import { s } from './dom.js';

const PATHS = {
  overview: 'M3 13h4l2.500-8 4 14 2.500-6H21',
  workers: 'M4 5h16v5H4zM4 14h16v5H4zM7.500 7.500h.01M7.500 16.500h.01',
  queue: 'M5 6h14M5 12h9M5 18h5',
  requests: 'M4 8h13l-3-3M20 16H7l3 3',
  providers: 'M12 3l8 4.500v9L12 21l-8-4.500v-9zM4 7.500l8 4.500 8-4.500M12 12v9',
  journal: 'M6 3h9l4 4v14H6zM9.500 11h6M9.500 15h6',
  keys: 'M15 9m-4.500 0a4.500 4.500 0 1 0 9 0a4.500 4.500 0 1 0 -9 0M11.500 12.500L4 20M6.500 17.500l2 2',
  usage: 'M4 20h16M7 20v-6M12 20V5M17 20v-9',
  setup: 'M12 5v14M5 12h14',
  integrate: 'M8 7l-5 5 5 5M16 7l5 5-5 5M13.500 5l-3 14',
  theme: 'M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16',
  logout: 'M14 4h5v16h-5M4 12h10M10.500 8.500L14 12l-3.500 3.500',
  copy: 'M9 9h11v11H9zM5 15H4V4h11v1',
  check: 'M5 12.500l4.500 4.500L19 7.500',
  warn: 'M12 4l9 16H3zM12 10.500v4M12 17.200v.01',
  error: 'M12 12m-9 0a9 9 0 1 0 18 0a9 9 0 1 0 -18 0M12 7.500v5.500M12 16.200v.01',
  info: 'M12 12m-9 0a9 9 0 1 0 18 0a9 9 0 1 0 -18 0M12 11v5.500M12 7.800v.01',
  back: 'M19 12H5M11 6l-6 6 6 6',
  search: 'M10.500 10.500m-6.500 0a6.500 6.500 0 1 0 13 0a6.500 6.500 0 1 0 -13 0M15.500 15.500L20 20',
  pin: 'M9 4h6l-1 6 3 3H7l3-3zM12 13v7',
  linux: 'M4 5h16v14H4zM7.500 9.500l3 2.500-3 2.500M12.500 15h4',
  macos: 'M5 5h14v10H5zM3 19h18',
  windows: 'M4 5.500l7-1v7H4zM13 4.200l7-1v8.300h-7zM4 13.500h7v7l-7-1zM13 13.500h7v8.300l-7-1z',
  container: 'M3 10h18v9H3zM7 10v9M12 10v9M17 10v9M8 10V6h8v4',
  kubernetes: 'M12 3l7.500 3.700 1.800 8-5 6.300H7.700l-5-6.300 1.800-8zM12 12m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0',
};

export function icon(name) {
  return s(
    'svg',
    { class: 'icon', viewBox: '0 0 24 24', 'aria-hidden': 'true', focusable: 'false' },
    s('path', { d: PATHS[name] }),
  );
}

export function logo() {
  return s(
    'svg',
    { class: 'logo', viewBox: '0 0 32 32', 'aria-hidden': 'true', focusable: 'false' },
    s('rect', { width: 32, height: 32, rx: 8 }),
    s('path', { d: 'M7 9.500h3.500L16 16l5.500-6.500H25M7 22.500h3.500L16 16l5.500 6.500H25' }),
    s('circle', { cx: 16, cy: 16, r: 3.6 }),
  );
}
