// How prompts are placed, and between which engines KV moves.

import { byId, element, follow, say, set } from "./dom.js";
import { short } from "./names.js";
import { UNKNOWN, age, number, percent } from "./units.js";

const MOST = 16; // engines of a side that are shown
const DECISIONS = 8;

function shareOf({ pool, served }) {
  const sum = (by) => Object.values(by).reduce((a, b) => a + b, 0);
  const parts = [["split", served.split, "by two engines"]];
  for (const [reason, count] of Object.entries(served.beside_idle)) {
    parts.push(["idle", count, `${reason}, beside an idle prefill engine`]);
  }
  for (const [reason, count] of Object.entries(served.alone)) parts.push(["alone", count, reason]);
  return { pool, total: served.split + sum(served.alone) + sum(served.beside_idle), parts: parts.filter(([, count]) => count) };
}

function showShares(shown) {
  const shares = shown.listed.prompts.map(shareOf);
  follow(
    byId("shares"), shares, (one) => one.pool,
    () => element("div", { class: "share" }, element("p"), element("div", { class: "stack", role: "presentation" }), element("ul", { class: "reasons" })),
    (at, one) => {
      const [words, stack, reasons] = at.children;
      const pool = shares.length > 1 ? `Pool ${one.pool}: ` : "";
      say(words, one.total ? `${pool}${number(one.total)} prompt tokens in the last 5 minutes` : `${pool}no prompts in the last 5 minutes`);
      stack.hidden = !one.total;
      const key = ([kind, , reason]) => `${kind} ${reason}`;
      follow(stack, one.parts, key, () => element("span"), (part, [kind, count]) => {
        set(part, "data-kind", kind);
        part.style.flexGrow = count / one.total;
      });
      follow(reasons, one.parts, key, () => element("li", {}, element("span", { class: "key" }), element("span"), element("strong")), (line, [kind, count, reason]) => {
        set(line.firstChild, "data-kind", kind);
        say(line.children[1], kind === "split" ? "split" : `whole: ${reason}`);
        say(line.lastChild, percent(count / one.total));
      });
    },
  );
}

function showDecisions({ placement, decisions }) {
  byId("decisions").hidden = placement === null || !decisions.length;
  const cells = (...names) => names.map((name) => element("td", { role: "cell", class: name }));
  follow(
    byId("decisions").tBodies[0], decisions.slice(0, DECISIONS),
    (one) => `${one.request_id} ${one.engines.join(" ")}`,
    () => element("tr", { role: "row" }, ...cells("number", "choice", "engines", "reason", "values")),
    (row, one) => {
      const [when, choice, engines, reason, based] = row.children;
      say(when, age(one.age_s));
      say(choice, one.choice);
      set(row, "data-level", one.choice === "refused" ? "bad" : null);
      say(engines, one.engines.map(short).join(" → ") || UNKNOWN);
      const numbers = (values) => Object.entries(values ?? {}).filter(([, value]) => value !== null)
        .map(([name, value]) => `${name} ${Number(value.toPrecision(3))}`).join(", ");
      const other = one.other === null ? "" : `; next best: ${one.other.choice} ${one.other.engines.map(short).join(" → ")}, ${numbers(one.other.values)}`;
      say(reason, one.must_be_whole ?? (one.term === null ? one.reason : `${one.reason}: ${one.term}`));
      say(based, numbers(one.values));
      set(row, "title", `${one.request_id}: ${based.textContent || "no values"}${other}; ${one.outcome?.state ?? "outcome not known"}`);
    },
  );
}

function moved(shown) {
  const found = new Map();
  for (const request of [...shown.running, ...shown.ended]) {
    for (const one of request.prompts) {
      if (one.prefill === null || one.decode === null) continue;
      const key = `${one.prefill}\n${one.decode}`;
      const [runs, ended] = found.get(key) ?? [0, 0];
      found.set(key, request.ended_s === null ? [runs + 1, ended] : [runs, ended + 1]);
    }
  }
  return found;
}

/** Why no KV moves from one engine to another, and whether that is wrong; null if it may. */
function apart(prefill, decode) {
  for (const [one, other] of [[prefill, decode], [decode, prefill]]) {
    const found = one.pairs?.not_paired.find(({ url }) => url === other.url);
    if (found) return [found.why, "bad"];
  }
  const out = [prefill, decode].find((one) => !["up", "slow_start"].includes(one.health.state));
  if (!out) return null;
  const state = out.health.state;
  return [`${short(out.url)}: ${state.replaceAll("_", " ")}`, state === "draining" ? "rest" : "bad"];
}

function showPairs(shown) {
  const at = byId("pairs");
  const engines = shown.listed.engines;
  const makes = engines.filter((one) => ["prefill", "any"].includes(one.role)).slice(0, MOST);
  const uses = engines.filter((one) => ["decode", "any"].includes(one.role)).slice(0, MOST);
  const flows = moved(shown);
  const handles = shown.counts.pdproxy_kv_handles;
  const rows = makes.length && uses.length ? [null, ...makes] : [];
  if (!at.firstChild) {
    at.append(
      element("p"),
      element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Pairs of engines" }, element("table", { class: "grid", role: "table", "aria-label": "From prefill engines (rows) to decode engines (columns)" }, element("tbody", { role: "rowgroup" }))),
      element("p", { class: "note" }),
    );
  }
  const [words, scroll, note] = at.children;
  say(words, rows.length
    ? `Handles: ${handles.held ?? 0} held, ${handles.asked ?? 0} asked, ${handles.releasing ?? 0} being released`
    : "No prefill engine: each prompt is served by one engine, and no KV moves.");
  scroll.hidden = !rows.length;
  follow(
    scroll.querySelector("tbody"), rows, (one) => (one === null ? "" : one.id),
    () => element("tr", { role: "row" }),
    (row, make) => follow(
      row, [null, ...uses], (one) => (one === null ? "" : one.id),
      (use) => make === null || use === null
        ? element("th", { role: use === null && make !== null ? "rowheader" : "columnheader", scope: use === null && make !== null ? "row" : "col" }, element("span"))
        : element("td", { role: "cell" }),
      (cell, use) => {
        if (make === null || use === null) {
          const engine = make ?? use;
          if (engine === null) return say(cell.firstChild, "from \\ to");
          say(cell.firstChild, short(engine.url));
          return set(cell, "title", engine.url);
        }
        if (make === use) return set(cell, "data-level", "none");
        const [runs, ended] = flows.get(`${make.url}\n${use.url}`) ?? [0, 0];
        const [why, level] = apart(make, use) ?? [null, runs ? "runs" : ended ? "some" : "idle"];
        set(cell, "data-level", level);
        say(cell, level === "bad" ? "×" : runs || ended ? String(runs + ended) : "·");
        const text = `${why === null ? "" : `${why}; `}${runs} run, ${ended} have ended`;
        set(cell, "title", `${short(make.url)} → ${short(use.url)}: ${text}`);
        set(cell, "aria-label", `${short(make.url)} to ${short(use.url)}: ${text}`);
      },
    ),
  );
  const left = engines.filter((one) => one.role !== "encode").length - new Set([...makes, ...uses]).size;
  say(note, rows.length ? `Prompts of the requests below by the engines between which their KV moved. × none is split there.${left > 0 ? ` Of each side, the first ${MOST} engines.` : ""}` : "");
}

export function showPlacement(shown) {
  showShares(shown);
  showDecisions(shown.decisions);
  showPairs(shown);
}
