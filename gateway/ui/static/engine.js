// The engine's view: connects the feed, the maps, the timeline and the page's controls.

import { get } from "./api.js";
import { keyStore } from "./conversation.js";
import { Feed } from "./engine-feed.js";
import { Past } from "./engine-past.js";
import { BlockMap } from "./engine-map.js";
import { listRecordings } from "./engine-recordings.js";
import { css, onSchemeChange, rgbOfRequest } from "./engine-colours.js";
import { EngineState, PHASE, PHASE_NAMES } from "./engine-state.js";
import { Timeline } from "./engine-timeline.js";
import { setUpWhatIf } from "./engine-what-if.js";
import { byId, make } from "./view.js";

const HASH = "#/engine"; // no element's name: the page would scroll to it
const panel = byId("engine");
const live = new EngineState();
const source = { key: () => keyStore.read(), engine: () => byId("engine-name").value };
const past = new Past(source);
const LIVE_SPAN_MS = 30_000;
const shown = () => (past.isOn ? past.state : live);
let span = { first_ms: 0, last_ms: 0 }; // of the logs, or the recording
let playing = 0;
let clockOffsetMs = 0; // of the engine's clock to this one
let selected = 0;
let isDue = false;
let wordsDueMs = 0;

const maps = [
  new BlockMap(byId("map"), byId("map").parentElement, { onPoint: describe }),
  new BlockMap(byId("host-map"), byId("host-map").parentElement, { isHost: true, onPoint: describeHost }),
];
const timeline = new Timeline(byId("timeline"), { onPick: select, onPoint: text => tell(text) });
const feed = new Feed({ ...source, state: live, onUpdate, onStatus });

// ------------------------------------------------------------------- drawing

function onUpdate() {
  const now = performance.now();
  clockOffsetMs = Math.max(live.at - Date.now(), clockOffsetMs - 1);
  if (live.numFrames <= 1) clockOffsetMs = live.at - Date.now();
  if (!past.isOn) for (const map of maps) map.update(live, now);
  onStatus("live", "");
  Object.assign(panel.dataset, { step: live.step, frames: live.numFrames, ...live.counts });
  schedule();
}

function schedule() {
  if (!isDue && !panel.hidden) {
    isDue = true;
    requestAnimationFrame(draw);
  }
}

function draw(now) {
  isDue = false;
  const state = shown();
  if (panel.hidden || !state.isReady) return;
  byId("host-pool").hidden = !state.numHostBlocks;
  let goesOn = false;
  for (const map of maps) goesOn = map.draw(state, now) || goesOn;
  if (now >= wordsDueMs) {
    wordsDueMs = now + 250;
    showWords();
    drawTimeline();
  }
  if (goesOn || feed.controller) schedule();
}

function drawTimeline() {
  timeline.playhead = past.isOn ? past.at : null;
  timeline.spanMs = past.isOn ? Math.max(1000, past.until - past.since) : LIVE_SPAN_MS;
  if (past.isOn) timeline.draw(past.full, past.until);
  else timeline.draw(live, Math.max(live.at, Date.now() + clockOffsetMs));
}

function showWords() {
  const state = shown();
  const { counts, numBlocks, blockSize } = state;
  const rate = rateOf(state);
  byId("engine-about").textContent = `epoch ${new Date(state.epoch).toLocaleTimeString()} · step ${state.step}`;
  const numbers = {
    Running: counts.running,
    Waiting: counts.waiting,
    "Preempted": counts.preempted + counts.swapped,
    "Tokens/s": rate.tokens.toFixed(rate.tokens < 10 ? 1 : 0),
    "Steps/s": rate.steps.toFixed(rate.steps < 10 ? 1 : 0),
    "Blocks": `${counts.used} / ${numBlocks}`,
  };
  byId("engine-numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  showOccupancy(counts, numBlocks, blockSize);
  const since = (past.isOn ? past.at : Math.max(live.at, Date.now() + clockOffsetMs)) - 1000;
  byId("reuse").textContent = `last second: prefix hits ${state.growthOf("found", since)} · evictions ${state.growthOf("evicted", since)}`;
  byId("map").setAttribute("aria-label", `KV blocks: ${counts.used} of ${numBlocks} in use by ${counts.running} running requests, ${counts.cached} cached, ${counts.free} free`);
  if (byId("request-list").open) showTable();
}

function rateOf(state) {
  const since = state.at - 3000;
  const steps = state.steps.filter(one => one.at > since);
  return { steps: steps.length / 3, tokens: steps.reduce((sum, one) => sum + one.tokens - one.prompt, 0) / 3 };
}

// The paper's Fig. 2: what share of the memory has the state of tokens.
function showOccupancy(counts, numBlocks, blockSize) {
  const slots = numBlocks * blockSize || 1;
  const parts = [
    ["tokens", counts.tokens, "token states"],
    ["reserved", counts.used * blockSize - counts.tokens, "reserved: unfilled slots of blocks in use"],
    ["pinned", counts.pinned * blockSize, "pinned, not in use"],
    ["cached", counts.cached * blockSize, "cached, free to take"],
    ["free", counts.free * blockSize, "free"],
  ];
  const bar = byId("occupancy");
  if (bar.childElementCount !== parts.length) bar.replaceChildren(...parts.map(([name]) => make("span", { class: name })));
  const used = counts.used * blockSize;
  const share = value => `${(100 * value / slots).toFixed(1)} %`;
  const width = value => `${100 * Math.max(0, value) / slots}%`;
  parts.forEach(([, value], i) => { bar.children[i].style.width = width(value); });
  bar.setAttribute("aria-label", parts.map(([, value, text]) => `${share(value)} ${text}`).join(", "));
  const lines = parts.filter(([name, value]) => value > 0 || name === "tokens").map(([name, value, text]) =>
    make("li", {}, make("i", { class: name }), ` ${share(value)} ${text}`));
  if (counts.saved > 0) lines.push(make("li", {}, `sharing saves ${counts.saved} blocks`));
  if (used) lines.push(make("li", {}, `${(100 * counts.tokens / used).toFixed(1)} % of the slots in use are filled`));
  byId("waste").replaceChildren(...lines);
}

function swatch(number) {
  const made = make("i", { class: "swatch" });
  made.style.background = css(rgbOfRequest(number));
  return made;
}

function showTable() {
  const state = shown();
  const blocks = state.blocksByRequest();
  const rows = [...state.requests.values()].filter(one => one.phase !== PHASE.ENDED).slice(0, 200);
  byId("request-rows").replaceChildren(...rows.map(request => {
    const own = blocks.get(request.number) ?? { blocks: 0, shared: 0 };
    const button = make("button", { type: "button", class: "link" }, `#${request.number}`);
    button.addEventListener("click", () => select(request.number));
    return make("tr", {}, make("th", { scope: "row" }, swatch(request.number), " ", button, ` ${state.nameOf(request.number).slice(0, 8)}`),
      ...[PHASE_NAMES[request.phase], request.prompt, request.generated, own.blocks, own.shared].map(value => make("td", {}, String(value))));
  }));
}

// ------------------------------------------------------------------- details

function tell(text) {
  byId("block-detail").textContent = text || "Point at a block, or reach the map with Tab and move with the arrow keys.";
}

function describe(block) {
  tell(block >= 0 ? shown().describe(block) : "");
  schedule();
}

function describeHost(block) {
  const owner = block >= 0 ? shown().hosts[block] : 0;
  tell(block < 0 ? "" : `Host block ${block} · ${owner ? `request #${owner}, swapped out` : "free"}`);
  schedule();
}

function select(number) {
  selected = selected === number ? 0 : number;
  timeline.selected = selected;
  for (const map of maps) {
    map.selected = selected;
    map.isStale = true;
  }
  wordsDueMs = 0;
  showRequest();
  schedule();
}

const clock = ms => {
  const at = new Date(ms);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map(part => String(part).padStart(2, "0")).join(":") + `.${String(at.getMilliseconds()).padStart(3, "0")}`;
};
const listOf = rows => make("ol", {}, ...rows.map(([at, text]) => make("li", {}, make("time", {}, clock(at)), ` ${text}`)));

function showRequest() {
  const box = byId("request-detail");
  const state = past.isOn ? past.full : live;
  const request = state.requests.get(selected);
  box.hidden = !request;
  if (!request) return;
  const name = state.nameOf(selected);
  const marks = state.marks.filter(mark => mark.number === selected).map(mark => [mark.at, mark.text]);
  const explain = make("button", { type: "button" }, "Explain its life");
  explain.addEventListener("click", () => explainRequest(selected, box));
  box.replaceChildren(
    make("h2", {}, swatch(selected), ` Request #${selected} `, make("small", {}, name || "of another key")),
    make("p", {}, `${PHASE_NAMES[request.phase]} · ${request.prompt} prompt tokens · ${request.generated} of up to ${request.maxOutput} generated${request.choices > 1 ? ` · ${request.choices} ${request.isSearch ? "beams" : "choices"}` : ""}${request.priority ? ` · priority ${request.priority}` : ""}`),
    listOf(marks), ...(name && !past.recording ? [explain] : []));
}

async function explainRequest(number, box) {
  box.lastChild.disabled = true;
  try {
    const found = await past.explain(number);
    if (number !== selected) return;
    const notes = found.unknown.length ? [make("details", {}, make("summary", {}, "Not known"), make("ul", {}, ...found.unknown.map(text => make("li", {}, text))))] : [];
    box.replaceChildren(box.firstChild, make("p", {}, found.status), listOf(found.events.map(([, at, text]) => [at, text])), ...notes);
  } catch (error) {
    box.append(make("p", { class: "notice" }, error.message));
  }
}

// -------------------------------------------------------------- time machine

async function updateSpan() {
  if (past.recording) return; // its span stays as it is
  try {
    const found = await past.span();
    if (past.recording) return;
    if (found.first_ms) span = found;
  } catch {
    return; // the feed reports the same
  }
  showSpan();
}

function showSpan() {
  const slider = byId("moment");
  slider.min = span.first_ms;
  slider.max = span.last_ms;
  if (!past.isOn) slider.value = span.last_ms;
}

async function seek(at) {
  byId("moment-text").textContent = clock(at);
  slideTo(at);
  try {
    if (!await past.seek(at, span)) return;
  } catch (error) {
    if (error.name !== "AbortError") byId("moment-text").textContent = error.message;
    return;
  }
  byId("to-live").disabled = byId("play").disabled = false;
  Object.assign(panel.dataset, { past: past.at, pastStep: past.state.step });
  showPast();
}

function slideTo(at) {
  byId("moment").value = at;
  byId("moment").setAttribute("aria-valuetext", clock(at));
}

function showPast() {
  const now = performance.now();
  for (const map of maps) map.update(past.state, now);
  onStatus("past", "");
  wordsDueMs = 0;
  schedule();
}

// Shows the start of a recording, or with "" what is now.
async function openRecording(name) {
  toLive();
  if (!name) return;
  byId("recording").value = past.recording = name;
  byId("moment-text").textContent = "opening …";
  try {
    const found = await past.span();
    if (past.recording !== name) return;
    span = found;
    showSpan();
    seek(span.first_ms);
  } catch (error) {
    if (past.recording === name) byId("moment-text").textContent = error.message;
  }
}

function toLive() {
  past.leave();
  if (past.recording) {
    byId("recording").value = past.recording = "";
    updateSpan();
  }
  stopPlaying();
  timeline.other = null;
  delete panel.dataset.past;
  byId("to-live").disabled = byId("play").disabled = true;
  byId("moment-text").textContent = "now";
  byId("moment").value = byId("moment").max;
  live.evicted.clear();
  for (const map of maps) map.update(Object.assign(live, { changed: null, changedHosts: null }), 0);
  onStatus("live", "");
  wordsDueMs = 0;
  schedule();
}

function stopPlaying() {
  clearInterval(playing);
  playing = 0;
  byId("play").textContent = "▶";
  byId("play").setAttribute("aria-label", "Play");
}

byId("moment").addEventListener("input", () => {
  stopPlaying();
  const at = Number(byId("moment").value);
  if (at >= span.last_ms && !past.recording) toLive();
  else seek(at);
});
byId("to-live").addEventListener("click", toLive);
byId("recording").addEventListener("change", () => openRecording(byId("recording").value));
byId("play").addEventListener("click", () => {
  if (playing) return stopPlaying();
  byId("play").textContent = "❚❚";
  byId("play").setAttribute("aria-label", "Pause");
  playing = setInterval(() => {
    const at = past.at + 100;
    if (at >= span.last_ms) past.recording ? stopPlaying() : toLive();
    else if (at <= past.until || past.wanted <= past.until) seek(at);
  }, 100);
});
setUpWhatIf({ past, timeline, panel, shown, spanMs: LIVE_SPAN_MS, onRun: () => {
  wordsDueMs = 0;
  schedule();
} });

// ------------------------------------------------------------------ controls

function onStatus(state, detail) {
  if (past.isOn && state === "live") state = "past";
  if (state === "past") detail = past.problem;
  byId("engine-live").textContent = state;
  byId("engine-live").className = `live ${state}`;
  const text = state === "key" ? "This server asks for an API key: enter it in the chat's settings." : detail;
  if (byId("engine-problem").textContent !== text) byId("engine-problem").textContent = text;
  byId("engine-problem").hidden = !text;
}

async function loadEngines() {
  try {
    const names = await (await get("ui/engines", keyStore.read())).json();
    byId("engine-name").replaceChildren(...names.map(name => make("option", { value: name }, name)));
    byId("engine-choice").hidden = names.length < 2;
  } catch {
    // The feed reports the same.
  }
}

const tabs = [["tab-chat", byId("layout")], ["tab-engine", panel]];

async function show(name) {
  for (const [id, content] of tabs) {
    byId(id).setAttribute("aria-selected", String(id === name));
    byId(id).tabIndex = id === name ? 0 : -1;
    content.hidden = id !== name;
  }
  const isEngine = name === "tab-engine";
  document.body.classList.toggle("engine", isEngine);
  if (isEngine !== (location.hash === HASH)) history.replaceState(null, "", isEngine ? HASH : location.pathname);
  if (!isEngine) return feed.stop();
  await loadEngines();
  listRecordings(past, byId("recording-choice"), byId("recording"));
  updateSpan();
  if (!document.hidden && !panel.hidden) feed.start();
  schedule();
}

for (const [id] of tabs) {
  byId(id).addEventListener("click", () => show(id));
  byId(id).addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = tabs.find(([name]) => name !== id)[0];
    show(other);
    byId(other).focus();
  });
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) feed.stop();
  else if (!panel.hidden) feed.start();
});
byId("engine-name").addEventListener("change", () => {
  if (past.isOn) toLive();
  feed.stop();
  live.clear();
  live.isReady = false;
  feed.start();
});
byId("zoom-in").addEventListener("click", () => zoom(2));
byId("zoom-out").addEventListener("click", () => zoom(0.5));
function zoom(factor) {
  maps[0].setZoom(maps[0].zoom * factor);
  schedule();
}
byId("request-list").addEventListener("toggle", () => {
  wordsDueMs = 0;
  schedule();
});
onSchemeChange(() => {
  for (const map of maps) map.isStale = true;
  schedule();
});
if (location.hash === HASH) show("tab-engine");
setInterval(() => {
  if (!panel.hidden && !document.hidden && feed.controller) updateSpan();
}, 2000);
