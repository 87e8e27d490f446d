// The page: it gets snapshots for as long as it is looked at, and shows each.

import { goals, showFigures } from "./charts.js";
import { byId, element, follow, say, set } from "./dom.js";
import { showEngines } from "./engines.js";
import { History } from "./history.js";
import { learn } from "./names.js";
import { showPlacement } from "./placement.js";
import { showRequests } from "./requests.js";
import { Refused, events, post } from "./stream.js";

const API = "admin/v1/";
const HIDDEN = 30_000; // milliseconds for which a page that nobody sees stays connected
const SILENT = 15_000; // milliseconds without an event before it connects again, at least
const MOST_PAUSE = 15_000;
const SAID = 8_000;
const WRONG = 4; // sentences on what is wrong that are shown at once

const history = new History();
let key = null; // of operators: only here
let newsAt = null;
let trouble = "connecting";

const sleep = (time) => new Promise((then) => setTimeout(then, time));

function show(shown) {
  newsAt = performance.now();
  trouble = null;
  learn(shown.listed.engines.map((one) => one.url));
  history.add(shown, goals(shown));
  say(byId("version"), shown.version);
  const { state, reason, details } = shown.ready;
  const words = { ok: "ok", degraded: "degraded: no prompt can be split", not_ready: "not ready" };
  say(byId("state"), words[state] ?? state);
  set(byId("state"), "data-state", state);
  document.title = state === "ok" ? "pdproxy" : `${state.replace("_", " ")}: pdproxy`;
  showWrong(reason === null ? details : [reason, ...details]);
  showFigures(history, shown);
  showEngines(shown, history, act);
  showPlacement(shown);
  showRequests(shown);
  showNews();
}

function showWrong(sentences) {
  const at = byId("wrong");
  const [first, all] = at.querySelectorAll("ul");
  const more = at.querySelector("details");
  const lines = (list, texts) => follow(list, texts, (text) => text, () => element("li"), say);
  at.hidden = !sentences.length;
  lines(first, sentences.slice(0, WRONG));
  more.hidden = sentences.length <= WRONG;
  say(more.querySelector("summary"), `and ${sentences.length - WRONG} more`);
  lines(all, sentences.slice(WRONG));
}

function showNews() {
  const since = newsAt === null ? null : (performance.now() - newsAt) / 1000;
  const text = trouble ?? (since < 3 ? "live" : `no news for ${since.toFixed(0)} s`);
  say(byId("news"), text);
  set(document.body, "data-stale", trouble !== null || since >= 3);
  if (newsAt === null) {
    say(byId("state"), "not connected");
  }
}

let saidTimer = null;

function tell(text) {
  const at = byId("said");
  clearTimeout(saidTimer);
  at.hidden = false;
  say(at, text);
  saidTimer = setTimeout(() => (at.hidden = true), SAID);
}

/** Drain or undrain an engine. Return whether the proxy has done it. */
async function act(engine, verb) {
  for (;;) {
    try {
      const done = await post(`${API}engines/${engine.id}/${verb}`, key);
      tell(`${engine.url}: ${done.result}, ${done.note}`);
      return true;
    } catch (error) {
      if (error.status === 401) {
        await askForKey(error.message);
        continue;
      }
      tell(`${engine.url}: ${error.message}`);
      return false;
    }
  }
}

let asking = null;

function askForKey(why) {
  asking ??= new Promise((then) => {
    const dialog = byId("key");
    say(byId("key-why"), why);
    dialog.addEventListener("close", () => {
      key = byId("key-field").value;
      byId("key-field").value = "";
      asking = null;
      then();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// Without a key there is nothing to see: the dialog stays.
byId("key").addEventListener("cancel", (event) => event.preventDefault());

function seen() {
  if (!document.hidden) return Promise.resolve();
  trouble = "paused while nobody looks";
  showNews();
  return new Promise((then) => {
    const changed = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", changed);
      then();
    };
    document.addEventListener("visibilitychange", changed);
  });
}

/** Show what comes until the connection ends, nobody looks, or nothing has come for long. */
async function listen() {
  const ending = new AbortController();
  let silent = null;
  let hidden = null;
  const changed = () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(() => ending.abort(), HIDDEN);
  };
  const wait = (time) => {
    clearTimeout(silent);
    silent = setTimeout(() => ending.abort(), time);
  };
  document.addEventListener("visibilitychange", changed);
  changed();
  wait(SILENT);
  try {
    for await (const [name, data] of events(`${API}live`, key, ending.signal)) {
      if (name === "snapshot") {
        show(data);
        wait(Math.max(SILENT, 5000 * data.next_s));
      } else {
        trouble = data.message;
        showNews();
        wait(SILENT);
      }
    }
  } catch (error) {
    if (!ending.signal.aborted) throw error;
  } finally {
    clearTimeout(silent);
    clearTimeout(hidden);
    document.removeEventListener("visibilitychange", changed);
  }
}

async function run() {
  let pause = 500;
  for (;;) {
    await seen();
    const before = newsAt;
    try {
      await listen();
      trouble = "connecting again";
    } catch (error) {
      if (!(error instanceof Refused)) {
        trouble = "connecting again";
      } else if (error.status === 401) {
        trouble = error.message;
        showNews();
        await askForKey(error.message);
        continue;
      } else {
        trouble = error.message;
      }
    }
    showNews();
    pause = newsAt === before ? Math.min(MOST_PAUSE, 2 * pause) : 500;
    await sleep(pause);
  }
}

setInterval(showNews, 1000);
run();
