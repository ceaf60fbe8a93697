// Content of the index is inserted as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const COMMON = new Set(("a about an and any are as at be been but by can could did do does for from had has have how i if in "
  + "into is it its me my no not of on or our so than that the their them then there these they this to was we were what when "
  + "where which who whose why will with would you your").split(" "));
const BEST_FUSED = 2 / 6;  // the score of a document that is first by words and by meaning
const LONGEST = 4000;  // characters of a text; a megabyte would block the browser
const ANSWER_MS = 90000, STATE_MS = 10000;  // longer than the limits of the service

async function fetchJSON(path, options = {}, limit = ANSWER_MS) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(limit) });
  if (response.status === 401) byId("token-form").hidden = false;
  const body = await response.json().catch(() => null);  // A proxy sends HTML.
  if (!response.ok || body === null) {
    throw new Error(body?.detail || `the service did not answer (status ${response.status})`);
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
  if (byId("query").value) byId("search").requestSubmit();
});

function setState(state, text) {
  byId("state").className = `pill ${state}`;
  setText("state", text);
}

async function update() {
  try {
    const { documents } = await fetchJSON("readyz", {}, STATE_MS);
    setState("ready", `ready, ${documents.toLocaleString("en")} documents`);
  } catch (error) {
    setState("away", error.message);
  }
}

async function keepUpdating() {
  if (!document.hidden) await update();
  setTimeout(keepUpdating, 5000);
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
