// Follows /ui/feed while the page is looked at.

import { get, readEvents } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 5000];

export class Feed {
  // state: an EngineState.  onUpdate(): it has changed.  onStatus(state, detail).
  constructor({ state, key, engine, onUpdate, onStatus }) {
    Object.assign(this, { state, key, engine, onUpdate, onStatus });
    this.controller = null;
  }

  start() {
    if (this.controller) return;
    this.controller = new AbortController();
    this.run(this.controller.signal);
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  async run(signal) {
    for (let tries = 0; !signal.aborted; tries++) {
      try {
        const name = this.engine();
        const response = await get(`ui/feed${name ? `?engine=${encodeURIComponent(name)}` : ""}`, this.key(), signal);
        for await (const event of readEvents(response)) {
          if (signal.aborted) return;
          this.take(event);
          tries = 0;
        }
        this.onStatus("away", "The connection was closed; trying again …");
      } catch (error) {
        if (signal.aborted) return;
        this.onStatus(error.status === 401 ? "key" : "away", error instanceof TypeError ? "The server cannot be reached; trying again …" : error.message);
        if (error.status === 401 || error.status === 404) {
          this.stop();
          return;
        }
      }
      await new Promise(resolve => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }

  take({ name, data }) {
    const found = JSON.parse(data);
    if (name === "snapshot") this.state.snapshot(found);
    else if (name === "frame") this.state.frame(found);
    else if (name === "names") for (const [number, id] of found) this.state.names.set(number, id);
    else if (name === "status") this.onStatus(found.state, found.detail);
    if (name === "snapshot" || name === "frame") this.onUpdate();
  }
}
