// Requests that run and the last ones that have ended, each with its course.

import { byId, drawn, element, follow, say, set } from "./dom.js";
import { short } from "./names.js";
import { UNKNOWN, age, number, round, seconds } from "./units.js";

const PHASES = [
  ["queue", "waits for a place"],
  ["tokenize", "waits for its token ids"],
  ["encode", "media are encoded"],
  ["prefill", "the prefill leg; of one engine alone its queue and prefill"],
  ["kv", "KV transfer and one step"],
  ["decode", "from the first data to the end"],
  ["whole", "from asking to all of an answer that is not streamed"],
  ["continuation", "another engine goes on"],
  ["open", "other: failed attempts, notices, or not over yet"],
];

const NAMES = { kv: "KV", open: "other", whole: "not streamed" };

/** The parts of a request's course: [phase, from, to] in seconds since it came. */
export function course(one) {
  const parts = [];
  let at = 0;
  const add = (phase, length) => {
    if (length > 0) parts.push([phase, at, (at += length)]);
  };
  add("queue", one.queue_s);
  const prompt = longest(one.prompts);
  if (prompt === null) {
    if (at < one.total_s) parts.push([one.phase === "waiting" ? "queue" : "open", at, one.total_s]);
    return parts;
  }
  add("tokenize", prompt.tokenize_s ?? 0);
  const alone = prompt.prefill === null;
  const legs = [
    ["encode", prompt.encode_s],
    ["prefill", prompt.prefill_s],
    [alone ? "alone" : "kv", prompt.first_s],
    ["decode", prompt.decode_s],
    ["whole", prompt.whole_s],
  ].filter(([, length]) => length !== null && length > 0);
  const known = legs.reduce((sum, [, length]) => sum + length, 0);
  // The legs are those of the last attempt. What is before them went to others; of a request that
  // runs, what is behind them is not over.
  if (one.ended_s !== null && one.total_s - at - known > 0.002) add("open", one.total_s - at - known);
  for (const [phase, length] of legs) add(phase, length);
  if (one.ended_s === null && one.total_s > at) {
    const streams = one.phase === "streaming";
    parts.push([streams ? "decode" : "open", at, one.total_s]);
  }
  for (const failed of one.failures) {
    if (failed.phase === "continued" && prompt.pause_s) {
      parts.push(["continuation", failed.at_s, failed.at_s + prompt.pause_s]);
    }
  }
  return parts;
}

function longest(prompts) {
  const time = (one) => (one.prefill_s ?? 0) + (one.first_s ?? 0) + (one.decode_s ?? 0) + (one.whole_s ?? 0);
  return prompts.reduce((found, one) => (found === null || time(one) > time(found) ? one : found), null);
}

function showCourse(svg, one, scale) {
  const parts = course(one);
  const x = (time) => `${(100 * Math.min(1, time / scale)).toFixed(2)}%`;
  follow(svg, [...parts, ...one.failures.map((failed) => ["failure", failed.at_s, failed.at_s])], (_, number) => number,
    () => drawn("rect", { y: 2, height: 12 }),
    (rect, [phase, from, to]) => {
      set(rect, "data-phase", phase);
      set(rect, "x", x(from));
      set(rect, "width", phase === "failure" ? 2 : `${Math.max(0, 100 * (Math.min(to, scale) - from) / scale).toFixed(2)}%`);
    });
  const words = parts.map(([phase, from, to]) => `${phase} ${seconds(to - from)}`);
  for (const { phase, at_s: at, error, retried } of one.failures) {
    const what = phase === "continued" ? (retried ? "continued" : "not continued") : `${phase} failed`;
    words.push(`${what} at ${seconds(at)}: ${error}`);
  }
  if (one.error) words.push(one.error);
  set(svg, "aria-label", words.join(", ") || "nothing measured");
  set(svg.parentNode, "title", words.join("\n") || null);
  set(svg.parentNode, "data-cut", one.total_s > scale * 1.001);
}

const cell = (name, label) => element("td", { role: "cell", class: name, "data-label": label });

function made() {
  const row = element(
    "tr", { role: "row" },
    cell("number when"),
    element("th", { role: "rowheader", scope: "row", class: "request" }, element("span", { class: "id" }), element("span", { class: "model" })),
    cell("engines"), cell("course"), cell("number first", "TTFT"), cell("number total", "total"),
    cell("number tokens", "tokens"), cell("decision"),
  );
  row.querySelector(".course").append(drawn("svg", { role: "img", height: 16 }));
  return row;
}

function update(row, one, scale) {
  const at = (name) => row.querySelector(`.${name}`);
  const runs = one.ended_s === null;
  const prompt = longest(one.prompts);
  say(at("when"), runs ? one.phase : age(one.ended_s));
  say(at("id"), one.id.length > 14 ? `${one.id.slice(0, 12)}…` : one.id);
  set(at("request"), "title", `${one.method} ${one.path}, id ${one.id}${one.key ? `, key ${one.key}` : ""}${one.client ? `, from ${one.client}` : ""}`);
  say(at("model"), one.model ?? "");
  const engines = [prompt?.prefill, prompt?.decode].filter(Boolean);
  say(at("engines"), engines.map(short).join(" → ") || UNKNOWN);
  set(at("engines"), "title", engines.join(" → ") || null);
  showCourse(at("course").firstChild, one, scale);
  say(at("first"), seconds(one.first_s));
  say(at("total"), seconds(one.total_s));
  say(at("tokens"), one.prompt_tokens === null ? UNKNOWN : `${number(one.prompt_tokens)} + ${number(one.completion_tokens)}`);
  const continued = prompt?.continued ? `continued ${prompt.continued} ×` : null;
  const again = prompt && prompt.attempts > 1 ? `${prompt.attempts} attempts` : null;
  const { why_alone: rule, decision: reason } = prompt ?? {};
  const how = rule ? "whole" : prompt?.prefill ? "split" : null;
  const because = [rule === "decided" ? null : rule, reason === how ? null : reason];
  const bad = runs || one.outcome === "ok" ? null : `${one.outcome.replace("_", " ")}${one.reason ? `: ${one.reason}` : ""}`;
  const text = [bad, how, ...new Set(because), continued, again].filter(Boolean).join(", ");
  say(at("decision"), text || UNKNOWN);
  set(at("decision"), "title", one.error ?? (text || null));
  set(row, "data-level", runs ? "runs" : bad === null ? null : one.outcome === "client_left" ? "rest" : "bad");
}

/** The seconds that a course's whole width stands for: of nearly all requests; longer ones are cut. */
function scaleOf(requests) {
  const totals = requests.map((one) => one.total_s).sort((a, b) => a - b);
  return totals.length ? round(Math.max(0.01, totals[Math.floor(0.9 * (totals.length - 1))])) : 1;
}

export function showRequests(shown) {
  const requests = [...shown.running, ...shown.ended];
  const scale = scaleOf(requests);
  say(byId("scale"), `course, 0 to ${seconds(scale)}`);
  follow(
    byId("requests").tBodies[0], requests, (one) => one.id,
    made, (row, one) => update(row, one, scale),
  );
  const counts = Object.entries(shown.phases).map(([phase, count]) => `${number(count)} ${phase}`);
  say(byId("more"), requests.length
    ? `${counts.length ? `Run now: ${counts.join(", ")}. ` : ""}Shown: ${shown.running.length} of ${shown.running_count} that run, and ${shown.ended.length} of the last ${shown.ended_count} that have ended. Longer courses are cut at the right.`
    : "No requests yet.");
  follow(
    byId("phases"), PHASES, ([name]) => name,
    ([name, words]) => element("span", { role: "listitem", title: words }, element("span", { class: "key", "data-phase": name }), NAMES[name] ?? name),
    () => {},
  );
}
