// The figures: a few numbers each, and a line of the last minutes.

import { byId, drawn, element, follow, say, set } from "./dom.js";
import { WINDOW } from "./history.js";
import { UNKNOWN, age, number, percent, round, seconds } from "./units.js";

const WIDTH = 300;
const HEIGHT = 60;
const MOST_APART = 8; // seconds between two points that a line connects
const SHORTEST = 60; // seconds that a chart shows at least

const perSecond = (value) => (value === null ? UNKNOWN : `${number(value)}/s`);

const FIGURES = [
  {
    name: "Requests",
    lines: [["answered", "main"], ["failed", "bad"]],
    format: perSecond,
    values: (at, shown) => [
      ["answered", perSecond(at.answered)],
      ["failed", perSecond(at.failed), at.failed > 0 ? "bad" : null],
      ["in flight", number(shown.counts.pdproxy_inflight[""])],
      ["waiting", number(shown.counts.pdproxy_queue[""])],
    ],
  },
  {
    name: "Time to first token",
    lines: [["ttft50", "main"], ["ttft95", "other"]],
    format: seconds,
    values: (at) => [["p50", seconds(at.ttft50), "main"], ["p95", seconds(at.ttft95), "other"]],
  },
  {
    name: "Time between events",
    lines: [["itl50", "main"], ["itl99", "other"]],
    format: seconds,
    values: (at) => [["p50", seconds(at.itl50), "main"], ["p99", seconds(at.itl99), "other"]],
  },
  {
    name: "Goodput",
    lines: [["goodput", "main"]],
    format: perSecond,
    values: (at) => [
      ["in time", perSecond(at.goodput)],
      [`of ${at.streams} streams`, percent(at.share)],
    ],
    goals: true,
  },
  {
    name: "Tokens",
    lines: [["generated", "main"], ["prompt", "other"]],
    format: perSecond,
    values: (at) => [["generated", perSecond(at.generated), "main"], ["prompts", perSecond(at.prompt), "other"]],
  },
  {
    name: "KV moved",
    lines: [["moved", "main"], ["recomputed", "bad"]],
    format: perSecond,
    values: (at, shown) => [
      ["tokens", perSecond(at.moved)],
      ["recomputed", perSecond(at.recomputed), at.recomputed > 0 ? "bad" : null],
      ["handles", number(at.handles)],
      ["stuck", number(Object.values(shown.counts.pdproxy_kv_stuck).reduce((a, b) => a + b, 0))],
    ],
  },
];

/** What the page's reader takes for in time, in seconds. null: as the settings say. */
const own = { ttft: null, tpot: null };
const USUAL = { ttft: 1, tpot: 0.05 };

/** The goals by which streams are judged. */
export function goals(shown) {
  return {
    ttft: own.ttft ?? shown.goals.ttft ?? USUAL.ttft,
    tpot: own.tpot ?? shown.goals.tpot ?? USUAL.tpot,
  };
}

function goal(name, words) {
  const field = element("input", {
    type: "number", min: 1, step: "any", inputmode: "decimal", "data-goal": name,
    "aria-label": `${words} that is in time, in milliseconds`,
  });
  field.addEventListener("change", () => {
    own[name] = field.valueAsNumber > 0 ? field.valueAsNumber / 1000 : null;
  });
  return element("label", {}, `${words} ≤ `, field, " ms");
}

function made(figure) {
  return element(
    "article", { class: "figure" },
    element("h3", {}, figure.name),
    element("dl"),
    ...(figure.goals ? [element("p", { class: "goals" }, goal("ttft", "TTFT"), goal("tpot", "TPOT"))] : []),
    element(
      "div", { class: "chart" },
      drawn(
        "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
        drawn("line", { class: "rule", x1: 0, x2: WIDTH, y1: 1, y2: 1 }),
        drawn("line", { class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
        drawn("line", { class: "rule base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
        ...figure.lines.map(([, kind]) => drawn("path", { class: `line ${kind}` })).reverse(),
      ),
      element("span", { class: "most" }),
      element("span", { class: "since" }),
    ),
  );
}

function path(points, name, from, now, most) {
  let found = "";
  let before = null;
  for (const point of points) {
    const value = point[name];
    if (value === null) continue;
    const x = (WIDTH * (point.now - from)) / (now - from);
    const y = HEIGHT - 1 - ((HEIGHT - 4) * value) / most;
    const connected = before !== null && point.now - before <= MOST_APART;
    found += `${connected ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = point.now;
  }
  return found;
}

function update(at, figure, history, shown) {
  const { points, last } = history;
  const values = figure.values(last, shown);
  follow(
    at.querySelector("dl"), values, (_, number) => number,
    () => element("div", {}, element("dt"), element("dd")),
    (one, [name, value, kind]) => {
      say(one.firstChild, name);
      say(one.lastChild, value);
      set(one, "class", kind);
    },
  );
  const span = Math.min(WINDOW, Math.max(SHORTEST, last.now - points[0].now));
  const from = last.now - span;
  const highest = Math.max(...points.flatMap((point) => figure.lines.map(([name]) => point[name] ?? 0)));
  const most = highest > 0 ? round(highest) : 1;
  const lines = [...at.querySelectorAll(".line")].reverse();
  figure.lines.forEach(([name, kind], number) => {
    const isNothing = kind === "bad" && !points.some((point) => point[name] > 0);
    set(lines[number], "d", isNothing ? "" : path(points, name, from, last.now, most));
  });
  set(at.querySelector("svg"), "aria-label", `${figure.name}, the last ${age(span)}: ${values.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  say(at.querySelector(".most"), highest > 0 ? figure.format(most).replace(/\.0+(?= )/, "") : "");
  say(at.querySelector(".since"), `${age(span)} ago`);
  const wanted = goals(shown);
  for (const field of at.querySelectorAll("input")) {
    if (document.activeElement !== field) {
      const value = String(Math.round(wanted[field.dataset.goal] * 1e6) / 1e3);
      if (field.value !== value) field.value = value;
    }
  }
}

export function showFigures(history, shown) {
  follow(byId("figures"), FIGURES, (figure) => figure.name, made, (at, figure) => update(at, figure, history, shown));
  say(
    byId("window"),
    `Charts begin when this page is opened, and show ${age(WINDOW)} at most. Rates are of 10 s, quantiles of 30 s, goodput of the last minute's streams.`,
  );
}
