// Whatever comes from the index is put in as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COMMON = new Set(("a about an and any are as at be been but by can could did do does for from had has have how i if in "
  + "into is it its me my no not of on or our so than that the their them then there these they this to was we were what when "
  + "where which who whose why will with would you your").split(" "));
const WIDTH = 600, HEIGHT = 160;
const BEST_FUSED = 2 / 61;  // of a document that is first by words and by meaning
const LABEL_ROOM = 0.16;  // of the width, that the label of a load or unload needs
const LONGEST = 4000;  // characters of a text that are shown; a megabyte would stop the browser
const ANSWER_MS = 90000, LOOK_MS = 10000;  // longer than the service itself takes at most

async function ask(path, options = {}, limit = ANSWER_MS) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(limit) });
  if (answer.status === 401) byId("token-form").hidden = false;
  const body = await answer.json().catch(() => null);  // A proxy answers in HTML.
  if (!answer.ok || body === null) {
    const errors = (body?.errors || []).map((each) => each.detail).join("; ");
    throw new Error(errors || body?.detail || `status ${answer.status}, and no answer of the service`);
  }
  return body;
}

// A screen reader says what changes: what stays must not be written again.
function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];

function bestSentence(sentences, wanted) {
  let best = 0, most = 0;
  sentences.forEach((sentence, place) => {
    const found = new Set(wordsOf(sentence).filter((word) => wanted.has(word))).size;
    if (found > most) { most = found; best = place; }
  });
  return most ? best : -1;
}

function marked(text, wanted) {
  const shown = element("p", "text");
  shown.dir = "auto";
  // A sentence ends before white space: "0.82" is one word.
  const sentences = text.split(/(?<=[.!?]\s+|\n+)(?=\S)/u);
  const best = bestSentence(sentences, wanted);
  sentences.forEach((sentence, place) => {
    const part = element("span", place === best ? "best" : "");
    for (const piece of sentence.trimEnd().split(/([\p{L}\p{N}]+)/u)) {
      if (wanted.has(piece.toLowerCase())) part.append(element("mark", "", piece));
      else part.append(piece);
    }
    shown.append(part, sentence.slice(sentence.trimEnd().length));
  });
  return shown;
}

// Metadata is any JSON: an object may have a toString that is none.
const written = (value) => typeof value === "string" ? value : JSON.stringify(value);

function sourceOf(result) {
  const { path, source, line, page } = result.metadata;
  let place = written(path ?? source ?? result.id);
  if (path !== undefined && line !== undefined) place += `:${written(line)}`;
  if (path !== undefined && page !== undefined) place += `, page ${written(page)}`;
  return place;
}

// Only addresses of the web become links: another scheme could be a script.
function sourceElement(result) {
  const { path, source } = result.metadata;
  const place = [source, path].find((each) => typeof each === "string" && /^https?:\/\//i.test(each));
  const shown = element(place ? "a" : "span", "source", sourceOf(result));
  if (place) Object.assign(shown, { href: place, rel: "noreferrer" });
  return shown;
}

// A fused score only says the order: it is shown as a share of the best possible one.
function about(result, mode, [worst, best]) {
  const line = element("p", "about");
  line.append(sourceElement(result));
  const score = { hybrid: `${Math.round((100 * result.score) / BEST_FUSED)}% match`,
    dense: `cosine ${result.score.toFixed(2)}`, bm25: `words ${result.score.toFixed(1)}` }[mode];
  line.append(element("span", "score", score));
  const bar = element("div", "bar");
  bar.append(element("i"));
  const share = best > worst ? (result.score - worst) / (best - worst) : 1;
  bar.firstChild.style.width = `${10 + 90 * share}%`;
  return [line, bar];
}

function show(results, query, mode) {
  const wanted = new Set(wordsOf(query).filter((word) => !COMMON.has(word)));
  const scores = results.map((result) => result.score);
  const range = [Math.min(...scores), Math.max(...scores)];
  byId("results").replaceChildren(...results.map((result) => {
    const all = Array.from(result.text).slice(...(result.passage ?? []));
    const text = all.slice(0, LONGEST).join("") + (all.length > LONGEST ? " …" : "");
    const item = element("li");
    item.append(...about(result, mode, range), marked(text, wanted));
    return item;
  }));
}

let asked = 0;  // An answer that comes after a later question's is not shown.

byId("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const number = ++asked;
  const form = event.target, query = form.query.value;
  const address = new URLSearchParams({ q: query, mode: form.mode.value });
  if (new URLSearchParams(location.search).get("q") !== query) history.pushState(null, "", `?${address}`);
  byId("said").textContent = "searching";
  try {
    const started = performance.now();
    const { results } = await ask("search", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ query, mode: form.mode.value, top_k: Number(form.top_k.value) }),
    });
    if (number !== asked) return;
    show(results, query, form.mode.value);
    const count = `${results.length} ${results.length === 1 ? "answer" : "answers"}`;
    const hint = results.length ? "" : ": try other words, or compare by meaning";
    byId("said").textContent = `${count} in ${Math.round(performance.now() - started)} ms${hint}`;
  } catch (error) {
    if (number === asked) byId("said").textContent = `That did not work: ${error.message}`;
  }
});

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // No header takes other characters than these, and no token has them.
  sessionStorage.setItem("token", byId("token").value.trim().replace(/[^!-~]/g, "?"));
  byId("token-form").hidden = true;
  look();
});

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
const devicesOf = (sample) => Object.values(sample.devices).reduce((sum, each) => sum + each, 0);

function shortened(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

function roundStep(bytes) {
  const ten = 10 ** Math.floor(Math.log10(bytes));
  return ten * [1, 2, 5, 10].find((each) => each * ten >= bytes);
}

function draw({ samples, events }) {
  const last = samples[samples.length - 1], first = samples[0].at;
  const span = Math.max(last.at - first, 10);
  const start = last.at - span;
  const most = 1.15 * Math.max(...samples.map((each) => Math.max(each.host, devicesOf(each))), 1);
  const x = (at) => ((at - start) / span) * WIDTH;
  const y = (bytes) => HEIGHT * (1 - bytes / most);
  const parts = [], labels = [];
  const add = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parts.push(made);
  };
  const step = roundStep(most / 3);
  for (let bytes = step; bytes < 0.92 * most; bytes += step) {
    add("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(bytes), y2: y(bytes) });
    const label = element("span", "", `${bytes / 1e6} MB`);
    label.style.bottom = `${(bytes / most) * 100}%`;
    labels.push(label);
  }
  const line = (value) => samples.map((each) => `${x(each.at)},${y(value(each))}`).join(" ");
  const host = line((each) => each.host);
  add("polygon", { points: `${x(first)},${HEIGHT} ${host} ${WIDTH},${HEIGHT}` });
  add("polyline", { class: "host", points: host });
  if (samples.some(devicesOf)) add("polyline", { class: "device", points: line(devicesOf) });
  const shown = events.filter((event) => event.at >= start);
  let free = 1;  // The newest have their labels; those for which there is no room have none.
  for (const event of [...shown].reverse()) {
    const at = x(event.at), place = at / WIDTH;
    add("line", { class: event.what, x1: at, x2: at, y1: 0, y2: HEIGHT });
    if (place > free) continue;
    const side = place > 1 - LABEL_ROOM ? " last" : place < LABEL_ROOM ? " first" : "";
    const label = element("span", `event ${event.what}${side}`, event.what);
    label.style.left = `${place * 100}%`;
    labels.push(label);
    free = place - LABEL_ROOM;
  }
  byId("picture").replaceChildren(...parts);
  byId("labels").replaceChildren(...labels);
  byId("since").textContent = `${shortened(span)} ago`;
  const device = devicesOf(last);
  byId("memory-now").textContent =
    `${megabytes(last.host)} of host memory${device ? `, ${megabytes(device)} on devices` : ""}`;
  say("memory-events", shown.slice(-3).map((event) => `${event.what} of ${event.model}`).join(", "));
}

function listModels(models) {
  const list = byId("models");
  Object.entries(models).forEach(([name, state]) => {
    let item = [...list.children].find((each) => each.dataset.name === name);
    if (!item) {
      item = element("li");
      item.dataset.name = name;
      const button = element("button", "quiet", "Unload");
      button.type = "button";
      button.setAttribute("aria-label", `Unload ${name}`);
      button.addEventListener("click", () => unload(name));
      item.append(element("span"), button);
      list.append(item);
    }
    const told = `${name}: ${state}`;
    if (item.firstChild.textContent !== told) item.firstChild.textContent = told;
    item.lastChild.disabled = state !== "loaded";
  });
  [...list.children].filter((each) => !Object.hasOwn(models, each.dataset.name)).forEach((each) => each.remove());
}

async function unload(name) {
  try {
    const path = `admin/models/${encodeURIComponent(name)}/unload`;
    const report = await ask(path, { method: "POST" });
    byId("returned").textContent = `${name}: ${report.summary}`;
  } catch (error) {
    byId("returned").textContent = `${name} was not unloaded: ${error.message}`;
  }
  look();
}

function tell(state, text) {
  byId("state").className = `pill ${state}`;
  say("state", text);
}

async function look() {
  try {
    const memory = await ask("memory", {}, LOOK_MS);
    const count = memory.documents.toLocaleString("en");
    const stops = memory.draining;
    tell(stops ? "away" : "ready", stops ? "stopping" : `ready, ${count} documents`);
    draw(memory);
    listModels(memory.samples[memory.samples.length - 1].models);
  } catch (error) {
    tell("away", "cannot be asked");
    byId("memory-now").textContent = `not known: ${error.message}`;
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, 1000);
}

// The question stands in the address, to be kept, shared and gone back to.
function askAddress() {
  const address = new URLSearchParams(location.search), form = byId("search");
  if (!address.get("q")) return;
  form.query.value = address.get("q");
  if (["hybrid", "dense", "bm25"].includes(address.get("mode"))) form.mode.value = address.get("mode");
  form.requestSubmit();
}

addEventListener("popstate", askAddress);
askAddress();
keepLooking();
