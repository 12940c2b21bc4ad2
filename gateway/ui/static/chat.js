// The chat: connects the page's controls, the conversation and the API.

import { AnswerStream, listModels } from "./api.js";
import { addChunk, Conversation, JSON_TEXTS, keyStore, NUMBERS, settingsStore } from "./conversation.js";
import { asCurl, asPython } from "./snippets.js";
import { byId, make, MessageView, showAlternatives } from "./view.js";

const RELOAD_MS = 5000; // in which the page before a reload lets its stream go
const conversation = new Conversation();
const log = byId("log");
let needsKey = false;
let running = null; // the AnswerStream

const key = () => byId("key").value.trim();

function tell(text) {
  byId("status").textContent = text;
}

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

// ---------------------------------------------------------------- settings

function settings() {
  const found = { system: byId("system").value, logprobs: byId("logprobs").checked };
  for (const name of NUMBERS) {
    const { value } = byId(name);
    if (value !== "") found[name] = Number(value);
  }
  for (const name of JSON_TEXTS) found[name] = byId(name).value.trim();
  return found;
}

// Lets the browser say what is wrong with a text that should be JSON.
function checkJson(name) {
  const text = byId(name).value.trim();
  let problem = "";
  try {
    const value = text ? JSON.parse(text) : null;
    if (text && Array.isArray(value) !== (name === "tools"))
      problem = name === "tools" ? "Expected a list of tools." : "Expected an object.";
  } catch (error) {
    problem = `This is no JSON: ${error.message}`;
  }
  byId(name).setCustomValidity(problem);
  if (problem) byId("formats").open = byId("settings").open = true; // or it could not be shown
}

function restoreSettings() {
  const kept = settingsStore.read();
  byId("system").value = kept.system ?? "";
  byId("logprobs").checked = kept.logprobs ?? false;
  for (const name of [...NUMBERS, ...JSON_TEXTS]) byId(name).value = kept[name] ?? "";
  byId("formats").open = JSON_TEXTS.some(name => kept[name]);
  byId("key").value = keyStore.read();
  byId("settings").open = matchMedia("(min-width: 721px)").matches;
}

async function loadModels() {
  try {
    const models = await listModels(key());
    byId("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
    needsKey = !byId("key-field").hidden;
    showProblem("");
    return true;
  } catch (error) {
    if (error.status === 401) {
      byId("key-field").hidden = false;
      byId("settings").open = true;
      showProblem(key() ? error.message : "This server asks for an API key.");
      byId("key").focus();
    } else showProblem(`The models cannot be listed: ${error.message}`);
    return false;
  }
}

// ---------------------------------------------------------------- messages

function actionsOf(answer) {
  return [
    ["Regenerate", () => regenerate(answer)],
    ["Copy as curl", () => copy(asCurl(answer.body, needsKey))],
    ["Copy as Python", () => copy(asPython(answer.body, needsKey))],
  ];
}

function show(message) {
  const view = new MessageView(message, message.role === "assistant" ? actionsOf(message) : []);
  log.append(view.element);
  log.scrollTop = log.scrollHeight;
  return view;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    tell("Copied.");
  } catch { // browsers allow it on https and localhost alone
    byId("snippet-text").value = text;
    byId("snippet").showModal();
    byId("snippet-text").select();
  }
}

function regenerate(answer) {
  if (running) return;
  const index = conversation.messages.indexOf(answer);
  conversation.messages.splice(index);
  while (log.children.length > index) log.lastChild.remove();
  byId("prompt").focus(); // the button that had it is gone
  ask();
}

// ---------------------------------------------------------------- answers

function setRunning(stream) {
  running = stream;
  byId("send").hidden = Boolean(stream);
  byId("stop").hidden = !stream;
  invite();
}

// Asks for a message, or for the result of a call.
function invite() {
  const [call] = conversation.openCalls;
  const what = call && !running ? `Result of ${call.name}` : "Message";
  byId("prompt").placeholder = `${what} (Enter sends, Shift+Enter starts a line)`;
}

function ask() {
  const body = conversation.request(byId("model").value, settings());
  const answer = conversation.begin(body);
  const view = show(answer);
  const more = { stream: true, stream_resume: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  return follow(answer, view, { ...body, ...more });
}

// Shows an answer while it streams; without a body, the rest of one that has begun.
async function follow(answer, view, body) {
  let end;
  const ended = new Promise(resolve => { end = resolve; });
  const stream = new AnswerStream({
    key: key(),
    at: answer.at,
    onBegun() {
      conversation.save();
      navigator.locks?.request(answer.at.url, () => ended);
    },
    onChunk(chunk) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      const added = addChunk(answer, chunk);
      if (added) view.add(added);
      view.update();
      if (isAtEnd) log.scrollTop = log.scrollHeight;
      conversation.saveSoon();
    },
    onGap(isLost) {
      answer.notice = isLost ? "The connection was lost; trying again …" : "";
      view.update();
      tell(isLost ? "The connection was lost." : "Connected again.");
    },
  });
  setRunning(stream);
  tell("The model answers.");
  try {
    await stream.run(body);
    answer.notice = "";
    tell(`Answer: ${answer.text}`);
  } catch (error) {
    const isStop = error.name === "AbortError";
    answer.finish = isStop ? "stopped" : "error";
    answer.notice = isStop ? "" : error instanceof TypeError ? "The server cannot be reached." : error.message;
    tell(isStop ? "Stopped." : `Error: ${answer.notice}`);
  } finally {
    answer.at = null;
    end();
    setRunning(null);
    view.update();
    conversation.save();
  }
}

// A copy of a tab has the same storage, and must leave the stream to the first one, which holds a
// lock with the stream's name.
async function resume(answer, view) {
  const work = () => follow(answer, view, null);
  if (!navigator.locks) return work();
  try {
    await navigator.locks.request(answer.at.url, { signal: AbortSignal.timeout(RELOAD_MS) }, work);
  } catch {
    answer.at = null;
    answer.notice = "This answer goes on in another tab.";
    view.update();
  }
}

function restore() {
  const views = conversation.messages.map(show);
  invite();
  const answer = conversation.last;
  if (!answer?.at) return;
  if (answer.at.url) return resume(answer, views.at(-1));
  answer.at = null; // the page was left before the server took the request
  answer.notice = "The page was left before the answer began.";
  views.at(-1).update();
}

// ---------------------------------------------------------------- controls

byId("composer").addEventListener("submit", event => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  JSON_TEXTS.forEach(checkJson);
  if (!byId("settings-form").reportValidity()) return;
  byId("prompt").value = "";
  const [call] = conversation.openCalls;
  conversation.messages.push(call ? { role: "tool", text, call: call.id, name: call.name } : { role: "user", text });
  show(conversation.last);
  if (conversation.openCalls.length) invite();
  else ask();
});
byId("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || byId("snippet").open) return;
  byId("alternatives").hidden = true;
  running?.stop();
});
byId("stop").addEventListener("click", () => {
  running?.stop();
  byId("prompt").focus();
});
byId("new").addEventListener("click", async () => {
  await running?.stop();
  conversation.clear();
  log.replaceChildren();
  invite();
  byId("prompt").focus();
});
byId("settings-form").addEventListener("submit", event => event.preventDefault());
byId("settings-form").addEventListener("change", event => {
  settingsStore.write(settings());
  if (event.target.id === "key") {
    keyStore.write(key());
    loadModels();
  }
});
showAlternatives(log, byId("alternatives"));
restoreSettings();
loadModels().then(isListed => {
  restore();
  if (isListed) byId("prompt").focus();
});
