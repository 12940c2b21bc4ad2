// The conversation of this tab and its settings, kept in the tab's session storage.

const STORE = "pagestream.chat";
const KEY = "pagestream.key";
const SETTINGS = "pagestream.settings";
export const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
export const JSON_TEXTS = ["schema", "tools"];
const NUM_ALTERNATIVES = 5;

export const keyStore = {
  read: () => sessionStorage.getItem(KEY) ?? "",
  write: key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export const settingsStore = {
  read: () => JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}"),
  write: settings => sessionStorage.setItem(SETTINGS, JSON.stringify(settings)),
};

// messages: {role, text} of a user, {role, text, call, name} of a tool's result, and of an assistant with
//   reasoning, calls ({id, name, arguments} of tools), pieces (text with log-probabilities), at (where its stream goes on, null when it has
//   ended), body (the request), startedMs, firstMs, lastMs, numTokens, finish, notice,
//   heldScores (of tokens whose text has not come yet).
export class Conversation {
  constructor() {
    this.messages = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
    this.timer = null;
    addEventListener("pagehide", () => this.save());
  }

  get last() {
    return this.messages.at(-1);
  }

  clear() {
    this.messages = [];
    this.save();
  }

  save() {
    clearTimeout(this.timer);
    this.timer = null;
    try {
      sessionStorage.setItem(STORE, JSON.stringify(this.messages));
    } catch { // the quota is used up: texts matter more than log-probabilities
      const bare = this.messages.map(message => ({ ...message, pieces: [] }));
      try {
        sessionStorage.setItem(STORE, JSON.stringify(bare));
      } catch {
        sessionStorage.removeItem(STORE);
      }
    }
  }

  saveSoon() {
    this.timer ??= setTimeout(() => this.save(), 300);
  }

  // The body of the request that asks for the next answer.
  request(model, settings) {
    const messages = this.messages
      .filter(({ role, text, calls }) => role !== "assistant" || text || calls?.length)
      .map(asInput);
    if (settings.system) messages.unshift({ role: "system", content: settings.system });
    const body = { model, messages };
    for (const name of NUMBERS) if (settings[name] != null) body[name] = settings[name];
    if (settings.schema)
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
    if (settings.tools) body.tools = JSON.parse(settings.tools);
    if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
    return body;
  }

  begin(body) {
    const answer = {
      role: "assistant", text: "", reasoning: "", calls: [], pieces: [], heldScores: [], body, at: { url: "", lastId: "" },
      startedMs: Date.now(), firstMs: 0, lastMs: 0, numTokens: 0, finish: "", notice: "",
    };
    this.messages.push(answer);
    return answer;
  }

  // Calls of the last answer whose results are missing.
  get openCalls() {
    const at = this.messages.findLastIndex(({ role }) => role === "assistant");
    const closed = new Set(this.messages.slice(at + 1).map(({ call }) => call));
    return (this.messages[at]?.calls ?? []).filter(({ id }) => !closed.has(id));
  }
}

// A message as the API takes it.
function asInput({ role, text, call, calls }) {
  if (role === "tool") return { role, tool_call_id: call, content: text };
  if (!calls?.length) return { role, content: text };
  const tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role, content: text || null, tool_calls };
}

function addCalls(answer, parts) {
  for (const { index, id, function: part } of parts) {
    const call = answer.calls[index] ??= { id: "", name: "", arguments: "" };
    call.id ||= id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

// Adds a chunk of the stream to an answer; returns the new {text, reasoning, piece}.
export function addChunk(answer, chunk) {
  const choice = chunk.choices?.[0];
  answer.numTokens = chunk.usage?.completion_tokens ?? answer.numTokens;
  if (!choice) return null;
  const text = choice.delta?.content ?? "";
  const reasoning = choice.delta?.reasoning_content ?? "";
  answer.finish = choice.finish_reason ?? answer.finish;
  const parts = choice.delta?.tool_calls ?? [];
  addCalls(answer, parts);
  if (text || reasoning || parts.length) {
    answer.firstMs ||= Date.now();
    answer.lastMs = Date.now();
  }
  answer.text += text;
  answer.reasoning += reasoning;
  const scores = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({
    token, logprob, top: top_logprobs.map(one => [one.token, one.logprob]),
  }));
  const piece = { text, scores: [...answer.heldScores, ...scores] };
  answer.heldScores = text || reasoning ? [] : piece.scores;
  if (answer.body.logprobs && text) answer.pieces.push(piece);
  return { text, reasoning, piece };
}
