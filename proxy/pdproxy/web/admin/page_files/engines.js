// The table of engines, and what drains them.

import { byId, element, follow, say, set } from "./dom.js";
import { short } from "./names.js";
import { UNKNOWN, number, percent, seconds } from "./units.js";

const ROLES = ["encode", "prefill", "decode", "any", "aggregated"];
const PHASES = {
  encode: ["encode"],
  prefill: ["prefill"],
  decode: ["kv", "alone"],
  any: ["prefill", "kv"],
  aggregated: ["alone"],
};
const GOOD = new Set(["up", "slow_start"]);
const GONE = new Set(["down", "stalled", "excluded"]);

/** Why an engine does not serve as it should, in the admin API's words. */
export function problem(engine) {
  const { drain, health, breaker, pairs } = engine;
  const wrong = [];
  if (drain !== null) {
    wrong.push(
      engine.state === "draining"
        ? `drained by ${drain.by}, waits for ${drain.waits_for}, ${drain.left_s.toFixed(0)} s left`
        : `drained by ${drain.by}`,
    );
  } else if (health.reason) wrong.push(health.reason);
  if (breaker.open_for_s) wrong.push(`excluded for ${breaker.open_for_s.toFixed(0)} s`);
  wrong.push(...engine.slow);
  for (const one of pairs?.not_paired.slice(0, 1) ?? []) {
    wrong.push(`not paired with ${short(one.url)}: ${one.why}`);
  }
  return wrong.join("; ");
}

const cell = (name, label) => element("td", { role: "cell", class: name, "data-label": label });

function made() {
  const row = element(
    "tr", { role: "row" },
    element("th", { role: "rowheader", scope: "row", class: "engine" }),
    cell("state"), cell("number load", "requests"), cell("kv", "KV in use"),
    cell("mean", "mean time"), cell("number pairs", "pairs"), cell("why"), cell("action"),
  );
  row.querySelector(".state").append(element("span", { class: "dot" }), element("span"));
  row.querySelector(".kv").append(
    element("span", { class: "bar", role: "presentation" }, element("span")),
    element("span", { class: "number" }),
  );
  return row;
}

function update(row, engine, history, act) {
  const at = (name) => row.querySelector(`.${name}`);
  const { health, load, pairs } = engine;
  say(at("engine"), short(engine.url));
  set(at("engine"), "title", `${engine.url} (${engine.id}), from ${engine.source}`);
  const word = ["up", "draining"].includes(health.state) ? engine.state : health.state.replaceAll("_", " ");
  say(at("state").lastChild, word);
  const level = engine.drain ? "rest" : GONE.has(health.state) ? "bad" : GOOD.has(health.state) ? "good" : "warn";
  set(row, "data-level", level);
  say(at("load"), load.window === null ? number(load.requests) : `${load.requests} of ${number(load.window)}`);
  const bar = at("bar").firstChild;
  bar.style.width = `${100 * (load.kv_usage ?? 0)}%`;
  set(at("bar"), "data-full", load.kv_usage > 0.9);
  say(at("kv").lastChild, load.kv_usage === null ? UNKNOWN : percent(load.kv_usage));
  const times = (PHASES[engine.role] ?? [])
    .map((phase) => [phase, history.mean(engine.url, phase)])
    .filter(([, value]) => value !== null);
  say(at("mean"), times.length ? times.map(([phase, value]) => `${phase === "kv" ? "KV" : phase} ${seconds(value)}`).join(", ") : "");
  const apart = engine.role === "aggregated" || engine.role === "encode" || pairs === null;
  say(at("pairs"), apart ? UNKNOWN : `${pairs.paired} of ${pairs.paired + pairs.not_paired_count}`);
  set(at("pairs"), "data-some", !apart && pairs.not_paired_count > 0);
  const why = problem(engine);
  say(at("why"), why);
  set(at("why"), "title", why || null);
  showAction(at("action"), engine, act);
}

// The buttons of an engine: what they do changes with its state, and a drain is asked for twice.
const asked = new Set();

function showAction(at, engine, act) {
  const drains = engine.drain !== null;
  const mode = drains ? "undrain" : asked.has(engine.id) ? "sure" : "drain";
  if (at.dataset.mode === mode) return;
  at.dataset.mode = mode;
  const hadFocus = at.contains(document.activeElement);
  const button = (words, name, then, kind) => {
    const made = element("button", { type: "button", class: kind, "aria-label": `${name} ${short(engine.url)}` }, words);
    made.addEventListener("click", then);
    return made;
  };
  const again = () => showAction(at, engine, act);
  const send = async (verb) => {
    asked.delete(engine.id);
    for (const one of at.querySelectorAll("button")) one.disabled = true;
    if (!(await act(engine, verb))) {
      delete at.dataset.mode;
      again();
    }
  };
  if (mode === "undrain") {
    at.replaceChildren(button("Undrain", "Undrain", () => send("undrain")));
  } else if (mode === "drain") {
    at.replaceChildren(button("Drain", "Drain", () => { asked.add(engine.id); again(); }));
  } else {
    at.replaceChildren(
      button("Yes, drain", "Yes, drain", () => send("drain"), "main"),
      button("No", "Do not drain", () => { asked.delete(engine.id); again(); }),
    );
  }
  if (hadFocus) at.querySelector("button").focus();
}

function groups(engines) {
  const found = new Map();
  for (const one of engines) {
    const key = `${one.pool}\n${one.role}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(one);
  }
  const pools = [...new Set(engines.map((one) => one.pool))];
  return [...found.entries()].map(([key, list]) => ({ key, pool: list[0].pool, role: list[0].role, list, several: pools.length > 1 }))
    .sort((a, b) => pools.indexOf(a.pool) - pools.indexOf(b.pool) || ROLES.indexOf(a.role) - ROLES.indexOf(b.role));
}

/** Show the engines. act(engine, verb): drains or undrains one, and returns whether it was done. */
export function showEngines(shown, history, act) {
  const head = byId("engines").tHead;
  const bodies = groups(shown.listed.engines);
  if (byId("engines").firstChild !== head) byId("engines").prepend(head);
  follow(
    byId("engines"), [null, ...bodies], (one) => (one === null ? "" : one.key),
    (one) => one === null ? head : element("tbody", { role: "rowgroup" }),
    (body, one) => {
      if (one === null) return;
      follow(
        body, [null, ...one.list], (engine) => (engine === null ? "" : engine.id),
        (engine) => engine === null
          ? element("tr", { role: "row", class: "group" }, element("th", { role: "rowheader", scope: "rowgroup", colspan: 8 }))
          : made(),
        (row, engine) => {
          if (engine !== null) return update(row, engine, history, act);
          const up = one.list.filter((engine) => GOOD.has(engine.health.state)).length;
          const requests = one.list.reduce((sum, engine) => sum + engine.load.requests, 0);
          const pool = one.several ? `pool ${one.pool}: ` : "";
          say(row.firstChild, `${pool}${one.role}: ${up} of ${one.list.length} up, ${number(requests)} ${requests === 1 ? "request" : "requests"}`);
        },
      );
    },
  );
  const silent = shown.listed.silent_workers;
  byId("silent").hidden = !silent.length;
  say(byId("silent"), `Without the numbers of workers that do not answer: ${silent.join(", ")}.`);
}
