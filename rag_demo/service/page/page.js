// Content of the index is inserted as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COMMON = new Set(("a about an and any are as at be been but by can could did do does for from had has have how i if in "
  + "into is it its me my no not of on or our so than that the their them then there these they this to was we were what when "
  + "where which who whose why will with would you your").split(" "));
const WIDTH = 600, HEIGHT = 160;
const BEST_FUSED = 2 / 61;  // the score of a document that is first by words and by meaning
const LABEL_ROOM = 0.16;  // share of the width for the label of an event
const LONGEST = 4000;  // characters of a text; a megabyte would block the browser
const ANSWER_MS = 90000, MEMORY_MS = 10000;  // longer than the limits of the service

async function fetchJSON(path, options = {}, limit = ANSWER_MS) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(limit) });
  if (response.status === 401) byId("token-form").hidden = false;
  const body = await response.json().catch(() => null);  // A proxy sends HTML.
  if (!response.ok || body === null) {
    const errors = (body?.errors || []).map((each) => each.detail).join("; ");
    throw new Error(errors || body?.detail || `the service did not answer (status ${response.status})`);
  }
  return body;
}

// A screen reader reads each change, so equal text must not be set again.
function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
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
  const paragraph = element("p", "text");
  paragraph.dir = "auto";
  // A sentence ends before white space: "0.82" is one word.
  const sentences = text.split(/(?<=[.!?]\s+|\n+)(?=\S)/u);
  const best = bestSentence(sentences, wanted);
  sentences.forEach((sentence, place) => {
    const part = element("span", place === best ? "best" : "");
    for (const piece of sentence.trimEnd().split(/([\p{L}\p{N}]+)/u)) {
      if (wanted.has(piece.toLowerCase())) part.append(element("mark", "", piece));
      else part.append(piece);
    }
    paragraph.append(part, sentence.slice(sentence.trimEnd().length));
  });
  return paragraph;
}

// Metadata may be any JSON, even an object with a toString that is not a function.
const asText = (value) => typeof value === "string" ? value : JSON.stringify(value);

function sourceOf(result) {
  const { path, source, line, page } = result.metadata;
  let place = asText(path ?? source ?? result.id);
  if (path !== undefined && line !== undefined) place += `:${asText(line)}`;
  if (path !== undefined && page !== undefined) place += `, page ${asText(page)}`;
  return place;
}

// Only http addresses become links; another scheme could be a script.
function sourceElement(result) {
  const { path, source } = result.metadata;
  const place = [source, path].find((each) => typeof each === "string" && /^https?:\/\//i.test(each));
  const link = element(place ? "a" : "span", "source", sourceOf(result));
  if (place) Object.assign(link, { href: place, rel: "noreferrer" });
  return link;
}

// A fused score has no unit, so the page shows it as a share of the best score.
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

let lastSearch = 0;  // A response that arrives after a later search is ignored.

byId("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const number = ++lastSearch;
  const form = event.target, query = form.query.value;
  const address = new URLSearchParams({ q: query, mode: form.mode.value });
  if (new URLSearchParams(location.search).get("q") !== query) history.pushState(null, "", `?${address}`);
  byId("status").textContent = "searching";
  try {
    const started = performance.now();
    const { results } = await fetchJSON("search", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ query, mode: form.mode.value, top_k: Number(form.top_k.value) }),
    });
    if (number !== lastSearch) return;
    show(results, query, form.mode.value);
    const count = `${results.length} ${results.length === 1 ? "result" : "results"}`;
    const hint = results.length ? "" : "; try other words, or search by meaning";
    byId("status").textContent = `${count} in ${Math.round(performance.now() - started)} ms${hint}`;
  } catch (error) {
    if (number === lastSearch) byId("status").textContent = `The search failed: ${error.message}`;
  }
});

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // Headers and tokens are printable ASCII.
  sessionStorage.setItem("token", byId("token").value.trim().replace(/[^!-~]/g, "?"));
  byId("token-form").hidden = true;
  update();
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
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parts.push(node);
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
  const visible = events.filter((event) => event.at >= start);
  let free = 1;  // Newer events get their labels first; an older label must fit beside them.
  for (const event of [...visible].reverse()) {
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
  setText("memory-events", visible.slice(-3).map((event) => `${event.what} of ${event.model}`).join(", "));
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
    const text = `${name}: ${state}`;
    if (item.firstChild.textContent !== text) item.firstChild.textContent = text;
    item.lastChild.disabled = state !== "loaded";
  });
  [...list.children].filter((each) => !Object.hasOwn(models, each.dataset.name)).forEach((each) => each.remove());
}

async function unload(name) {
  try {
    const path = `admin/models/${encodeURIComponent(name)}/unload`;
    const report = await fetchJSON(path, { method: "POST" });
    byId("returned").textContent = `${name}: ${report.summary}`;
  } catch (error) {
    byId("returned").textContent = `${name} was not unloaded: ${error.message}`;
  }
  update();
}

function setState(state, text) {
  byId("state").className = `pill ${state}`;
  setText("state", text);
}

async function update() {
  try {
    const memory = await fetchJSON("memory", {}, MEMORY_MS);
    const count = memory.documents.toLocaleString("en");
    const stops = memory.draining;
    setState(stops ? "away" : "ready", stops ? "stopping" : `ready, ${count} documents`);
    draw(memory);
    listModels(memory.samples[memory.samples.length - 1].models);
  } catch (error) {
    setState("away", "not reachable");
    byId("memory-now").textContent = `unknown: ${error.message}`;
  }
}

async function keepUpdating() {
  if (!document.hidden) await update();
  setTimeout(keepUpdating, 1000);
}

// The address contains the question, so that it can be saved, shared and revisited.
function searchFromAddress() {
  const address = new URLSearchParams(location.search), form = byId("search");
  if (!address.get("q")) return;
  form.query.value = address.get("q");
  if (["hybrid", "dense", "bm25"].includes(address.get("mode"))) form.mode.value = address.get("mode");
  form.requestSubmit();
}

addEventListener("popstate", searchFromAddress);
searchFromAddress();
keepUpdating();
