// Whatever comes from the index is put in as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COMMON = new Set("a an and are as at by for from how in is it of on or that the to was what when where which who why with".split(" "));
const WIDTH = 600, HEIGHT = 160, TOP = 22, BOTTOM = 8;

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) byId("token-form").hidden = false;
  const body = await answer.json();
  if (!answer.ok) {
    const errors = (body.errors || []).map((each) => each.detail).join("; ");
    throw new Error(errors || body.detail || `status ${answer.status}`);
  }
  return body;
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
  const sentences = text.match(/[^.!?\n]+[.!?]*\s*|[.!?\n]+\s*/g) || [text];
  const best = bestSentence(sentences, wanted);
  sentences.forEach((sentence, place) => {
    const part = element("span", place === best ? "best" : "");
    for (const piece of sentence.split(/([\p{L}\p{N}]+)/u)) {
      if (wanted.has(piece.toLowerCase())) part.append(element("mark", "", piece));
      else part.append(piece);
    }
    shown.append(part);
  });
  return shown;
}

function sourceOf(result) {
  const { path, source, line, page } = result.metadata;
  let place = String(path ?? source ?? result.id);
  if (path !== undefined && line !== undefined) place += `:${line}`;
  if (path !== undefined && page !== undefined) place += `, page ${page}`;
  return place;
}

function show(results, query) {
  const wanted = new Set(wordsOf(query).filter((word) => !COMMON.has(word)));
  byId("results").replaceChildren(...results.map((result) => {
    const item = element("li");
    item.append(element("span", "source", `${sourceOf(result)} · score ${result.score.toFixed(3)}`));
    const text = result.passage
      ? Array.from(result.text).slice(result.passage[0], result.passage[1]).join("")
      : result.text;
    item.append(marked(text, wanted));
    return item;
  }));
}

byId("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target, query = form.query.value;
  byId("said").textContent = "searching";
  try {
    const started = performance.now();
    const { results } = await ask("search", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ query, mode: form.mode.value, top_k: Number(form.top_k.value) }),
    });
    show(results, query);
    const count = `${results.length} ${results.length === 1 ? "answer" : "answers"}`;
    byId("said").textContent = `${count} in ${Math.round(performance.now() - started)} ms`;
  } catch (error) {
    byId("said").textContent = `That did not work: ${error.message}`;
  }
});

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
  byId("token-form").hidden = true;
  look();
});

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
const devicesOf = (sample) => Object.values(sample.devices).reduce((sum, each) => sum + each, 0);

function draw({ samples, events }) {
  const last = samples[samples.length - 1], first = samples[0].at;
  const span = Math.max(last.at - first, 10);
  const most = 1.1 * Math.max(...samples.map((each) => Math.max(each.host, devicesOf(each))), 1);
  const x = (at) => ((at - first) / span) * WIDTH;
  const y = (bytes) => HEIGHT - BOTTOM - (bytes / most) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  const add = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    parts.push(made);
  };
  for (const event of events) {
    if (event.at < first) continue;
    const at = x(event.at);
    add("line", { class: event.what, x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
  }
  const line = (value) => samples.map((each) => `${x(each.at)},${y(value(each))}`).join(" ");
  add("polyline", { class: "host", points: line((each) => each.host) });
  if (samples.some(devicesOf)) add("polyline", { class: "device", points: line(devicesOf) });
  add("text", { x: 4, y: 15 }, megabytes(most));
  byId("picture").replaceChildren(...parts);
  const device = devicesOf(last);
  byId("memory-now").textContent =
    `${megabytes(last.host)} of host memory${device ? `, ${megabytes(device)} on devices` : ""}`;
}

function listModels(models) {
  const list = byId("models");
  Object.entries(models).forEach(([name, state]) => {
    let item = [...list.children].find((each) => each.dataset.name === name);
    if (!item) {
      item = element("li");
      item.dataset.name = name;
      const button = element("button", "", "Give back");
      button.type = "button";
      button.setAttribute("aria-label", `Give back ${name}`);
      button.addEventListener("click", () => giveBack(name));
      item.append(element("span"), button);
      list.append(item);
    }
    item.firstChild.textContent = `${name}: ${state}`;
    item.lastChild.disabled = state !== "loaded";
  });
  [...list.children].filter((each) => !(each.dataset.name in models)).forEach((each) => each.remove());
}

async function giveBack(name) {
  try {
    const path = `admin/models/${encodeURIComponent(name)}/unload`;
    const report = await ask(path, { method: "POST" });
    byId("returned").textContent = `${name}: ${report.summary}`;
  } catch (error) {
    byId("returned").textContent = `${name} was not given back: ${error.message}`;
  }
  look();
}

async function look() {
  try {
    const memory = await ask("memory");
    draw(memory);
    listModels(memory.samples[memory.samples.length - 1].models);
  } catch (error) {
    byId("memory-now").textContent = `not known: ${error.message}`;
  }
}

look();
setInterval(() => { if (!document.hidden) look(); }, 1000);
