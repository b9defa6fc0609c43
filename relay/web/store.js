// The state from the relay's event stream. It has no nodes and knows no page; every view is drawn from it.

const MOST_POINTS = 360;
const MOST_JOURNAL = 500;

export class Store {
  relay = null;
  providers = new Map();
  workers = new Map();
  requests = new Map();
  requestsTotal = 0;
  positions = {};
  intervalMs = 10_000;
  points = [];
  journal = [];

  get known() {
    return this.relay !== null;
  }

  replace(snapshot) {
    this.relay = snapshot.relay;
    this.providers = byId(snapshot.providers, 'name');
    this.workers = byId(snapshot.workers, 'worker_id');
    this.requests = byId(snapshot.requests, 'request_id');
    this.requestsTotal = snapshot.requests_total;
    this.positions = snapshot.positions;
    this.intervalMs = snapshot.history.interval_ms;
    this.points = snapshot.history.points;
    this.journal = snapshot.journal;
  }

  /** Absent parts are unchanged. */
  change(change) {
    if (change.relay) this.relay = change.relay;
    merge(this.providers, change.providers, change.gone_providers, 'name');
    merge(this.workers, change.workers, change.gone_workers, 'worker_id');
    merge(this.requests, change.requests, change.gone_requests, 'request_id');
    if (change.requests_total !== undefined) this.requestsTotal = change.requests_total;
    if (change.positions) this.positions = change.positions;
    if (change.point) this.points = [...this.points, change.point].slice(-MOST_POINTS);
    if (change.journal?.length) this.journal = [...this.journal, ...change.journal].slice(-MOST_JOURNAL);
  }

  workerName(id) {
    return this.workers.get(id)?.name ?? id;
  }

  /** Returns the models of the providers, those with the most workers first. */
  models() {
    const models = new Map();
    for (const provider of this.providers.values()) {
      for (const model of provider.models) {
        const before = models.get(model.id) ?? { id: model.id, workers: 0, open_workers: 0, in_flight: 0 };
        before.workers += model.workers;
        before.open_workers += model.open_workers;
        before.in_flight += model.in_flight;
        models.set(model.id, before);
      }
    }
    return [...models.values()].sort((a, b) => b.workers - a.workers || a.id.localeCompare(b.id));
  }
}

function byId(items, id) {
  return new Map(items.map((item) => [item[id], item]));
}

function merge(map, changed = [], gone = [], id) {
  for (const item of changed) map.set(item[id], item);
  for (const key of gone) map.delete(key);
}
