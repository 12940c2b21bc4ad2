// The time machine: an engine as it was, from stretches of its logs, and reruns of them.

import { get } from "./api.js";
import { EngineState } from "./engine-state.js";

const BACK_MS = 20_000; // of a stretch, before the moment that was asked for
const AHEAD_MS = 10_000;

export class Past {
  // key(), engine(): as the feed has them.
  constructor({ key, engine }) {
    Object.assign(this, { key, engine });
    this.isOn = false;
    this.recording = ""; // name of a file that is shown instead of the logs
    this.problem = ""; // why the stretch ends early
    this.state = new EngineState(); // at the moment that is shown
    this.full = new EngineState(); // at the end of the stretch, for what is drawn over time
    this.since = this.until = this.at = 0;
    this.frames = [];
    this.next = 0; // frame to apply
    this.wanted = 0;
    this.controller = null;
  }

  async fetch(path, values = {}, signal = undefined) {
    const name = this.engine();
    const source = this.recording ? { recording: this.recording } : name ? { engine: name } : {};
    const query = new URLSearchParams({ ...values, ...source });
    return (await get(`ui/${path}?${query}`, this.key(), signal)).json();
  }

  span() {
    return this.fetch("past");
  }

  recordings() {
    return this.fetch("past/recordings");
  }

  explain(number) {
    return this.fetch("past/explain", { request: number });
  }

  rerun(since, until, changes) {
    return this.fetch("past/rerun", { since_ms: Math.floor(since), until_ms: Math.ceil(until), ...changes });
  }

  // Shows a moment; resolves to whether it is shown, and not one that was asked for later.
  async seek(at, span) {
    this.wanted = at;
    if (!this.isOn || at < this.since || at > this.until) {
      this.controller?.abort();
      const controller = this.controller = new AbortController();
      const since = Math.max(span.first_ms, Math.floor(at - BACK_MS));
      const until = Math.ceil(Math.min(span.last_ms, at + AHEAD_MS));
      const data = await this.fetch("past/stretch", { since_ms: since, until_ms: Math.max(since, until) }, controller.signal);
      if (controller !== this.controller) return false;
      if (!data.snapshot) throw new Error(this.recording ? "The recording has nothing there." : "The logs do not reach back so far.");
      this.load(data, since, Math.max(until, since + 1));
    }
    this.isOn = true;
    this.show(this.wanted);
    return true;
  }

  load(data, since, until) {
    this.snapshot = data.snapshot;
    this.frames = data.frames;
    this.problem = data.problem ?? "";
    this.since = since;
    this.until = until;
    const names = new Map(data.names);
    this.full = new EngineState();
    this.full.names = names;
    this.full.snapshot(data.snapshot);
    for (const frame of data.frames) this.apply(this.full, frame);
    this.rewind();
  }

  rewind() {
    const { names } = this.full;
    this.state = new EngineState();
    this.state.names = names;
    this.state.snapshot(this.snapshot);
    this.next = 0;
  }

  apply(state, frame) {
    if (frame.owners) state.snapshot(frame); // a new epoch's pool
    else state.frame(frame);
  }

  show(at) {
    if (at < this.at) this.rewind();
    this.at = at;
    const changed = [];
    const hosts = [];
    while (this.next < this.frames.length && this.frames[this.next].at <= at) {
      this.apply(this.state, this.frames[this.next++]);
      changed.push(...this.state.changed ?? []);
      hosts.push(...this.state.changedHosts ?? []);
    }
    this.state.changed = changed;
    this.state.changedHosts = hosts;
  }

  leave() {
    this.controller?.abort();
    this.isOn = false;
  }
}
