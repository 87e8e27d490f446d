// What the charts show: made of the snapshots that this page has got. The proxy keeps no history.

export const WINDOW = 300; // seconds that are kept
const RATES = 10; // seconds over which rates are means
const QUANTILES = 30; // seconds whose histogram is taken for quantiles
const JUDGED = 60; // seconds whose streams are judged by their goals

/** The quantile of a histogram in seconds, as PromQL's histogram_quantile makes it. */
export function quantile(bounds, counts, q) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let below = 0;
  for (let at = 0; at < bounds.length; at++) {
    if (below + counts[at] >= q * total && counts[at]) {
      const low = at ? bounds[at - 1] : 0;
      return low + ((bounds[at] - low) * (q * total - below)) / counts[at];
    }
    below += counts[at];
  }
  return bounds[bounds.length - 1];
}

export class History {
  constructor() {
    this.raw = []; // the counts of the last snapshots, for differences
    this.points = []; // what is drawn, one for each snapshot
  }

  /** Take a snapshot. goals: {ttft, tpot} in seconds. */
  add(shown, goals) {
    const last = this.raw[this.raw.length - 1];
    if (last && (shown.now < last.now || this.#began_again(last, shown))) {
      this.raw = [];
      this.points = [];
    }
    this.raw.push({ now: shown.now, counts: shown.counts, times: shown.times, legs: shown.legs });
    while (this.raw.length > 2 && this.raw[0].now < shown.now - 2 * QUANTILES) this.raw.shift();
    this.points.push(this.#point(shown, goals));
    while (this.points[0].now < shown.now - WINDOW) this.points.shift();
  }

  get last() {
    return this.points[this.points.length - 1];
  }

  #began_again(before, shown) {
    const sum = (counts) => Object.values(counts.pdproxy_tokens_total).reduce((a, b) => a + b, 0);
    return sum(shown.counts) < sum(before.counts);
  }

  #before(seconds) {
    const now = this.raw[this.raw.length - 1].now;
    return this.raw.find((one) => one.now >= now - seconds - 0.5);
  }

  #point(shown, goals) {
    const rate = (name, ...labels) => this.#rate(name, labels);
    const answered = rate("pdproxy_requests_total", "ok");
    const streams = shown.judged.filter((one) => one[0] <= JUDGED);
    const inTime = streams.filter(
      ([, ok, ttft, tpot]) =>
        ok && (ttft === null || ttft <= goals.ttft) && (tpot === null || tpot <= goals.tpot),
    );
    const share = streams.length ? inTime.length / streams.length : null;
    const counts = shown.counts;
    return {
      now: shown.now,
      answered,
      failed: rate("pdproxy_requests_total", "engine", "capacity", "ours"),
      prompt: rate("pdproxy_tokens_total", "prompt"),
      generated: rate("pdproxy_tokens_total", "completion"),
      ttft50: this.#quantile("pdproxy_ttft_seconds", 0.5),
      ttft95: this.#quantile("pdproxy_ttft_seconds", 0.95),
      itl50: this.#quantile("pdproxy_itl_seconds", 0.5),
      itl99: this.#quantile("pdproxy_itl_seconds", 0.99),
      streams: streams.length,
      share,
      goodput: share === null || answered === null ? null : answered * share,
      moved: rate("pdproxy_kv_moved_total", "transferred"),
      recomputed: rate("pdproxy_kv_moved_total", "recomputed"),
      handles: Object.values(counts.pdproxy_kv_handles).reduce((a, b) => a + b, 0),
    };
  }

  #rate(name, labels) {
    const [before, now] = [this.#before(RATES), this.raw[this.raw.length - 1]];
    if (before === now) return null;
    const of = (one) => labels.reduce((sum, label) => sum + (one.counts[name][label] ?? 0), 0);
    return Math.max(0, of(now) - of(before)) / (now.now - before.now);
  }

  #quantile(name, q) {
    const [before, now] = [this.#before(QUANTILES), this.raw[this.raw.length - 1]];
    const { bounds, counts } = now.times[name];
    const earlier = before.times[name].counts;
    return quantile(bounds, counts.map((count, at) => Math.max(0, count - earlier[at])), q);
  }

  /** The mean seconds of a phase at an engine, null if none has ended lately. */
  mean(url, phase) {
    const [before, now] = [this.#before(2 * QUANTILES), this.raw[this.raw.length - 1]];
    const [count, total] = now.legs[url]?.[phase] ?? [0, 0];
    const [earlier, lessTotal] = before.legs[url]?.[phase] ?? [0, 0];
    return count > earlier ? (total - lessTotal) / (count - earlier) : null;
  }
}
