// Problems that need an operator, most urgent first. Pure, and limited to a few entries.

import { some } from './format.js';
import { whyWaiting, workersByModel } from './reasons.js';

const MOST = 6;
const NEARLY_FULL = 0.8;

export function concerns(store) {
  const { relay } = store;
  const found = [];
  const add = (key, tone, words, link, href) => found.push({ key, tone, words, link, href });
  if (relay.config_error) add('config', 'bad', `Invalid configuration file, the previous configuration is active: ${relay.config_error}`);
  if (relay.api_keys_error) add('keys', 'bad', `API keys: ${relay.api_keys_error}`, 'API keys', '#/keys');
  if (relay.client_tokens_error) add('tenants', 'bad', `Tokens of tenants cannot be reviewed: ${relay.client_tokens_error}`, 'API keys', '#/keys');
  if (relay.buffered_bytes_limit && relay.buffered_bytes > NEARLY_FULL * relay.buffered_bytes_limit) {
    add('memory', 'bad', 'The memory for request and response bodies is nearly full; new requests will be rejected.', 'Requests', '#/requests');
  }
  for (const provider of store.providers.values()) {
    if (!provider.enabled) add(`disabled ${provider.name}`, 'warn', `Provider ${provider.name} is disabled.`, 'Providers', '#/providers');
    if (provider.queue_depth > NEARLY_FULL * provider.queue_capacity) {
      add(`full ${provider.name}`, 'bad', `The queue of ${provider.name} is nearly full; further requests will be rejected with 429.`, 'Queue', '#/queue');
    }
  }
  waiting(store, add);
  slots(store, add);
  return found.slice(0, MOST);
}

function waiting(store, add) {
  for (const provider of store.providers.values()) {
    const models = provider.models.filter((model) => model.waiting > 0);
    if (!models.length) continue;
    const serving = workersByModel(providersWorkers(store, provider), models.map((model) => model.id));
    for (const model of models) {
      const why = whyWaiting(provider, model, serving.get(model.id));
      if (why.tone !== 'bad') continue;
      add(`waits ${provider.name} ${model.id}`, 'bad', `${some(model.waiting, 'request')} for ${model.id} ${model.waiting === 1 ? 'waits' : 'wait'}. ${why.words}`, 'Queue', '#/queue');
    }
  }
}

function slots(store, add) {
  for (const worker of store.workers.values()) {
    for (const slot of worker.slots ?? []) {
      if (slot.state !== 'quarantined' && slot.state !== 'backoff') continue;
      const why = slot.last_failure?.message ?? 'its last load failed';
      const words = `Slot ${slot.id} of ${worker.name} is in ${slot.state}: ${why}`;
      add(`slot ${worker.worker_id} ${slot.id}`, slot.state === 'quarantined' ? 'bad' : 'warn', words, 'Worker', `#/workers/${encodeURIComponent(worker.worker_id)}`);
    }
  }
}

export function providersWorkers(store, provider) {
  return [...store.workers.values()].filter((worker) => worker.provider === provider.name);
}
