// The reason why the requests for a model wait, from the data of the relay and its workers. Pure.

import { some } from './format.js';

/**
 * Returns {tone, words, help?: {words, href}, until?} for a model of a provider with waiting requests. `serving`: the workers that have it,
 * including draining ones.
 */
export function whyWaiting(provider, model, serving) {
  if (!provider.enabled) return { tone: 'bad', words: 'The provider is disabled; its workers receive no requests.' };
  if (model.workers === 0) return notServed(serving);
  if (model.open_workers === 0) return notLoaded(model, serving);
  return allBusy(model, serving);
}

function notServed(serving) {
  const draining = serving.filter((worker) => worker.draining).length;
  if (draining) return { tone: 'bad', words: `Only draining workers have this model (${draining}); they accept no new requests.`, help: add };
  return { tone: 'bad', words: 'No connected worker serves this model.', help: add };
}

const add = { words: 'Add a machine', href: 'setup' };

function notLoaded(model, serving) {
  for (const worker of serving) {
    const slot = worker.slots?.find((one) => one.target === model.id);
    if (slot) {
      const doing = slot.state === 'loading' ? 'loading it' : `making room for it (${slot.state})`;
      return { tone: 'warn', words: `${worker.name} is ${doing} in slot ${slot.id}.`, until: slot.eta };
    }
  }
  if (model.asked_worker) return { tone: 'warn', words: `${model.asked_worker} is assigned to load it and has not started yet.` };
  const failed = failure(model, serving);
  if (failed) return failed;
  return { tone: 'warn', words: `${some(serving.length, 'worker')} can load this model; none has it loaded now.` };
}

function failure(model, serving) {
  for (const worker of serving) {
    for (const slot of worker.slots ?? []) {
      const known = slot.models?.find((one) => one.id === model.id && one.status === 'failed');
      if (known) return { tone: 'bad', words: `${worker.name} could not load it: ${known.message ?? 'no reason reported'}` };
    }
  }
  return null;
}

function allBusy(model, serving) {
  const able = serving.filter((worker) => !worker.draining);
  const load = able.reduce((sum, worker) => sum + Math.min(worker.load, worker.capacity), 0);
  const capacity = able.reduce((sum, worker) => sum + worker.capacity, 0);
  const who = some(model.open_workers, 'worker');
  if (capacity && load >= capacity) return { tone: 'busy', words: capacity === 1 ? 'Its only worker slot is busy.' : `All ${capacity} worker slots of ${who} are busy.` };
  return { tone: 'busy', words: `The worker slots of ${who} with this model are busy.` };
}

/** Returns the workers that have any of `models`, by model, in one pass over the fleet. */
export function workersByModel(workers, models) {
  const found = new Map([...models].map((id) => [id, []]));
  for (const worker of workers) {
    for (const id of worker.models) found.get(id)?.push(worker);
  }
  return found;
}
