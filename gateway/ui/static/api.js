// Calls of the gateway's API: errors as the server words them, Server-Sent Events, resumed streams.

const RETRY_MS = [250, 500, 1000, 2000, 4000];
const LONGEST_GAP_MS = 60_000; // the default of --resume-window
const URL_MS = 500; // for the head of a response, after a stop

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function headersFor(key, more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `${response.status} ${response.statusText}`);
}

export async function listModels(key) {
  const response = await checked(await fetch("v1/models", { headers: headersFor(key) }));
  return (await response.json()).data;
}

// The response of a GET; rejects with an ApiError.
export async function get(path, key, signal) {
  return checked(await fetch(path, { headers: headersFor(key), signal }));
}

// Yields {id, name, data} for each event of a response.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part; !(part = await reader.read()).done;) {
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { id: null, name: "", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("id: ")) event.id = line.slice(4);
          else if (line.startsWith("event: ")) event.name = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

const isPassing = error => error instanceof TypeError || [429, 503].includes(error.status);

// One streamed answer, which goes on after lost connections.
//   at: {url, lastId} of a stream that has begun; it is updated, for whoever keeps it.
//   onBegun(): the server took the request, and at.url is there.
//   onChunk(chunk): is called with each event's JSON.
//   onGap(isLost): the connection was lost, or is there again.
export class AnswerStream {
  constructor({ key, at, onBegun, onChunk, onGap }) {
    Object.assign(this, { key, at, onBegun, onChunk, onGap });
    this.controller = new AbortController();
    this.retries = 0;
    this.lostAt = 0;
    this.hasUrl = new Promise(resolve => { this.onUrl = resolve; });
  }

  // Resolves at the end of the answer; rejects with an ApiError, or an AbortError after stop().
  async run(body) {
    let response = null;
    if (body) {
      response = await checked(await fetch("v1/chat/completions", {
        method: "POST",
        headers: headersFor(this.key, { "Content-Type": "application/json" }),
        body: JSON.stringify(body),
        signal: this.controller.signal,
      }));
      this.at.url = (response.headers.get("X-Stream-URL") ?? "").replace(/^\//, "");
      this.onUrl();
      this.onBegun();
    }
    while (true) {
      try {
        response ??= await this.reconnect();
        if (response.status === 204 || await this.read(response)) return;
      } catch (error) {
        if (!isPassing(error)) throw error;
      }
      response = null;
      await this.wait();
    }
  }

  // Ends the answer, also on the server.
  async stop() {
    // The URL may be on its way, and without it the answer could not be ended by name.
    if (!this.at.url) await Promise.race([this.hasUrl, new Promise(resolve => setTimeout(resolve, URL_MS))]);
    const { url } = this.at;
    this.controller.abort();
    if (url) await fetch(url, { method: "DELETE", cache: "no-store", headers: headersFor(this.key) }).catch(() => {});
  }

  async reconnect() {
    const more = this.at.lastId ? { "Last-Event-ID": this.at.lastId } : {};
    return checked(await fetch(this.at.url, {
      // A browser that caches streams may send the DELETE of one twice.
      cache: "no-store", headers: headersFor(this.key, more), signal: this.controller.signal,
    }));
  }

  async read(response) {
    for await (const { id, data } of readEvents(response)) {
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code === "shutting_down" ? 503 : 0, chunk.error.message);
      if (this.lostAt) this.onGap(false);
      this.retries = this.lostAt = 0;
      this.at.lastId = id ?? this.at.lastId;
      this.onChunk(chunk);
    }
    return false; // it was cut off
  }

  async wait() {
    if (!this.lostAt) this.onGap(true);
    this.lostAt ||= Date.now();
    if (!this.at.url || Date.now() - this.lostAt > LONGEST_GAP_MS)
      throw new ApiError(0, "The connection was lost.");
    await pause(RETRY_MS[Math.min(this.retries++, RETRY_MS.length - 1)], this.controller.signal);
  }
}
