// The state of an engine: snapshots and differences of the feed, applied. No DOM.

export const KIND = { FREE: 0, USED: 1, PREFIX: 2, FORK: 3, BEAM: 4, CACHED: 5, PINNED: 8 };
export const KIND_NAMES = ["free", "in use", "shared prefix", "shared by choices", "shared by beams", "cached, free"];
export const PHASE = { WAITING: 0, PREFILL: 1, DECODE: 2, PREEMPTED: 3, SWAPPED: 4, ENDED: 5 };
export const PHASE_NAMES = ["waiting", "prefill", "decode", "preempted", "swapped out", "ended"];
const COUNTS = ["used", "cached", "pinned", "free", "saved", "tokens", "waiting", "running", "preempted", "swapped", "found", "evicted"];
const MOST_SPANS = 4000; // of all requests together
const MOST_POINTS = 3000;
const MOST_MARKS = 4000;
const MOST_ENDED = 200;

function unpack(text, Type) {
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0));
  return new Type(bytes.buffer);
}

export class EngineState {
  constructor() {
    this.isReady = false;
    this.numFrames = 0;
    this.names = new Map(); // of the viewer's own requests
    this.clear();
  }

  // Forgets what is drawn over time.
  clear() {
    this.requests = new Map();
    this.spans = []; // {number, phase, from, to}; `to` is null while it lasts
    this.open = new Map(); // the last span of each request
    this.steps = []; // {step, at, tokens, prompt, waiting, running, us}
    this.points = []; // {at, used, tokens, cached, pinned, waiting, running}
    this.marks = [];
    this.evicted = new Set(); // cached blocks taken for other content, until a map has shown them
  }

  snapshot(data) {
    const isSame = this.isReady && data.num_blocks === this.numBlocks && data.epoch === this.epoch;
    this.epoch = data.epoch;
    this.step = data.step;
    this.at = data.at;
    this.numBlocks = data.num_blocks;
    this.blockSize = data.block_size;
    this.numHostBlocks = data.num_host_blocks;
    this.tokenBudget = data.token_budget;
    this.maxSequences = data.max_num_sequences;
    this.preemption = data.preemption;
    this.watermark = data.watermark;
    this.owners = unpack(data.owners, Int32Array);
    this.columns = unpack(data.columns, Int32Array);
    this.references = unpack(data.references, Uint16Array);
    this.filled = unpack(data.filled, Uint16Array);
    this.kinds = unpack(data.kinds, Uint8Array);
    this.hosts = unpack(data.hosts, Int32Array);
    if (!isSame || this.lastOwners?.length !== this.numBlocks) this.lastOwners = this.owners.slice();
    this.changed = null; // everything
    this.changedHosts = null;
    this.counts = {};
    const known = new Set(data.requests.map(row => row[0]));
    for (const [number, request] of this.requests)
      if (!known.has(number) && request.phase !== PHASE.ENDED) this.setPhase(request, PHASE.ENDED, data.at);
    this.takeCounts(data.counts);
    this.takeRequests(data.requests);
    const lastStep = this.steps.at(-1)?.step ?? 0;
    this.takeSteps(isSame ? data.steps.filter(row => row[0] > lastStep) : data.steps);
    const lastMark = this.marks.at(-1)?.at ?? 0;
    this.takeMarks(data.marks.filter(row => row[1] > lastMark));
    this.isReady = true;
    this.numFrames++;
  }

  frame(data) {
    this.step = data.step;
    this.at = data.at;
    this.changed = [];
    this.changedHosts = [];
    for (const block of data.evicted ?? []) this.evicted.add(block);
    if (data.blocks) {
      const [where, owners, columns, references, filled, kinds] = data.blocks;
      where.forEach((block, i) => {
        this.owners[block] = owners[i];
        if (owners[i]) this.lastOwners[block] = owners[i];
        this.columns[block] = columns[i];
        this.references[block] = references[i];
        this.filled[block] = filled[i];
        this.kinds[block] = kinds[i];
      });
      this.changed = where;
    }
    if (data.filled) data.filled[0].forEach((block, i) => { this.filled[block] = data.filled[1][i]; });
    if (data.hosts) {
      data.hosts[0].forEach((block, i) => { this.hosts[block] = data.hosts[1][i]; });
      this.changedHosts = data.hosts[0];
    }
    if (data.counts) this.takeCounts(data.counts);
    else if (data.steps) this.addPoint();
    if (data.requests) this.takeRequests(data.requests);
    if (data.steps) this.takeSteps(data.steps);
    if (data.marks) this.takeMarks(data.marks);
    this.numFrames++;
  }

  takeCounts(values) {
    COUNTS.forEach((name, i) => { this.counts[name] = values[i]; });
    this.addPoint();
  }

  addPoint() {
    this.points.push({ at: this.at, ...this.counts });
    if (this.points.length > MOST_POINTS) this.points.splice(0, MOST_POINTS / 4);
  }

  takeRequests(rows) {
    for (const [number, phase, prompt, generated, priority, choices, acceptedMs, maxOutput, isSearch] of rows) {
      let request = this.requests.get(number);
      if (!request) this.requests.set(number, request = { number, phase: -1 });
      Object.assign(request, { prompt, generated, priority, choices, acceptedMs, maxOutput, isSearch });
      if (request.phase !== phase) this.setPhase(request, phase, this.at);
    }
    if (this.requests.size > 2 * MOST_ENDED) this.dropEnded();
  }

  setPhase(request, phase, at) {
    const before = this.open.get(request.number);
    if (before) before.to = at;
    const from = before ? at : Math.min(at, request.acceptedMs || at);
    request.phase = phase;
    if (phase === PHASE.ENDED) {
      this.open.delete(request.number);
      request.endedMs = at;
      return;
    }
    const span = { number: request.number, phase, from, to: null };
    this.open.set(request.number, span);
    this.spans.push(span);
    if (this.spans.length > MOST_SPANS) this.spans = this.spans.slice(MOST_SPANS / 4).concat([...this.open.values()].filter(one => this.spans.indexOf(one) < MOST_SPANS / 4));
  }

  dropEnded() {
    const ended = [...this.requests.values()].filter(one => one.phase === PHASE.ENDED);
    for (const request of ended.slice(0, -MOST_ENDED)) this.requests.delete(request.number);
  }

  takeSteps(rows) {
    for (const [step, at, tokens, prompt, waiting, running, us] of rows)
      this.steps.push({ step, at, tokens, prompt, waiting, running, us });
    if (this.steps.length > MOST_POINTS) this.steps.splice(0, MOST_POINTS / 4);
  }

  takeMarks(rows) {
    for (const [kind, at, step, number, text] of rows) this.marks.push({ kind, at, step, number, text });
    if (this.marks.length > MOST_MARKS) this.marks.splice(0, MOST_MARKS / 4);
  }

  // How much a count that only grows grew since a time; it starts again with an epoch.
  growthOf(name, since) {
    let grown = 0;
    for (let i = this.points.length - 1; i > 0 && this.points[i].at > since; i--)
      grown += Math.max(0, this.points[i][name] - this.points[i - 1][name]);
    return grown;
  }

  nameOf(number) {
    return this.names.get(number) ?? "";
  }

  // The number of blocks of each request, and of those that it shares.
  blocksByRequest() {
    const found = new Map();
    for (let block = 0; block < this.numBlocks; block++) {
      const owner = this.owners[block];
      if (!owner) continue;
      const entry = found.get(owner) ?? { blocks: 0, shared: 0 };
      entry.blocks++;
      if (this.references[block] > 1) entry.shared++;
      found.set(owner, entry);
    }
    return found;
  }

  describe(block) {
    const kind = this.kinds[block];
    const owner = this.owners[block];
    const parts = [`Block ${block}`, KIND_NAMES[kind & 7] + (kind & KIND.PINNED ? ", pinned" : "")];
    if (owner) {
      const name = this.nameOf(owner);
      const first = this.columns[block] * this.blockSize;
      parts.push(`request #${owner}${name ? ` (${name})` : ""}`);
      parts.push(`positions ${first} to ${first + this.blockSize - 1}`);
      parts.push(`${this.filled[block]} of ${this.blockSize} slots filled`);
      parts.push(`${this.references[block]} ${this.references[block] === 1 ? "reference" : "references"}`);
    } else if ((kind & 7) === KIND.CACHED && this.lastOwners[block]) parts.push(`last used by request #${this.lastOwners[block]}`);
    return parts.join(" · ");
  }
}
