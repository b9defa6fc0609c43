// Sums over providers for the overview: current values, and values of each point of the last hour. Pure.

const RECENT = 6;

export function totals(providers) {
  const sum = { workers: 0, draining: 0, load: 0, capacity: 0, queued: 0, queueCapacity: 0, inFlight: 0, oldestAt: null };
  for (const provider of providers) {
    sum.workers += provider.workers;
    sum.draining += provider.draining_workers;
    sum.load += provider.load;
    sum.capacity += provider.capacity;
    sum.queued += provider.queue_depth;
    sum.queueCapacity += provider.queue_capacity;
    sum.inFlight += provider.in_flight;
    if (provider.oldest_at !== null && provider.oldest_at !== undefined) sum.oldestAt = Math.min(sum.oldestAt ?? Infinity, provider.oldest_at);
  }
  return sum;
}

/**
 * Combines one point of all providers, or of the named one. Quantiles cannot be added: the median is weighted by requests, and the 95th
 * percentile is that of the slowest provider.
 */
export function combined(point, name) {
  const parts = name ? [point.providers[name]].filter(Boolean) : Object.values(point.providers);
  const sum = { at: point.at, requests: 0, errors: 0, tokensIn: 0, tokensOut: 0, queued: 0, inFlight: 0, p50: null, p95: null };
  let weight = 0;
  for (const part of parts) {
    sum.requests += part.requests;
    sum.errors += part.errors;
    sum.tokensIn += part.tokens_in;
    sum.tokensOut += part.tokens_out;
    sum.queued += part.queue_depth;
    sum.inFlight += part.in_flight;
    if (part.ttft_p50 !== null && part.ttft_p50 !== undefined) {
      const requests = Math.max(1, part.requests);
      sum.p50 = ((sum.p50 ?? 0) * weight + part.ttft_p50 * requests) / (weight + requests);
      weight += requests;
    }
    if (part.ttft_p95 !== null && part.ttft_p95 !== undefined) sum.p95 = Math.max(sum.p95 ?? 0, part.ttft_p95);
  }
  return sum;
}

/** Returns the values of the last minute: those of a single interval of ten seconds vary too much. */
export function lastMinute(points, intervalMs) {
  const recent = points.slice(-RECENT);
  const seconds = (recent.length * intervalMs) / 1000;
  const add = (field) => recent.reduce((sum, point) => sum + point[field], 0);
  const requests = add('requests');
  const perSecond = (value) => (seconds ? value / seconds : 0);
  const withTtft = recent.filter((point) => point.p50 !== null);
  return {
    requests,
    errors: add('errors'),
    requestsPerSecond: perSecond(requests),
    tokensPerSecond: perSecond(add('tokensOut')),
    p50: withTtft.at(-1)?.p50 ?? null,
    p95: withTtft.length ? Math.max(...withTtft.map((point) => point.p95 ?? 0)) : null,
  };
}
