// Draws requests over time, and below them the queue, the token budget and the pool.

import { PHASE } from "./engine-state.js";
import { css, PHASE_RGB, rgbOfRequest, theme } from "./engine-colours.js";

const LANE = 14;
const CHART = 46;
const LABEL = 0;
const MARK_RGB = { preempted: 3, swapped: 4 };

export class Timeline {
  // onPick(number): a request was chosen.  onPoint(text): what lies below the pointer.
  constructor(canvas, { onPick, onPoint }) {
    Object.assign(this, { canvas, onPick, onPoint });
    this.context = canvas.getContext("2d", { alpha: false });
    this.spanMs = 30_000;
    this.lanes = [];
    this.selected = 0;
    this.playhead = null; // the moment that is shown, in the past
    this.other = null; // points of another run to compare with
    this.isStale = true;
    canvas.addEventListener("click", event => {
      const lane = this.laneAt(event);
      if (lane) this.onPick(lane);
    });
    canvas.addEventListener("pointermove", event => this.point(event));
    canvas.addEventListener("pointerleave", () => this.onPoint(""));
    canvas.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => { this.isStale = true; }).observe(canvas.parentElement);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = this.timeOf(event.clientX - box.left);
    const near = (this.marks ?? []).filter(mark => Math.abs(mark.at - at) < this.spanMs / 120);
    const lane = this.laneAt(event);
    const mark = near.find(one => !lane || one.number === lane || !one.number) ?? null;
    this.onPoint(mark ? mark.text : lane ? `request #${lane}` : "");
  }

  key(event) {
    if (!["ArrowUp", "ArrowDown"].includes(event.key) || !this.lanes.length) return;
    event.preventDefault();
    const index = this.lanes.indexOf(this.selected) + (event.key === "ArrowDown" ? 1 : -1);
    this.onPick(this.lanes[Math.max(0, Math.min(this.lanes.length - 1, index))]);
  }

  // The request below the pointer; 0 if there is none.
  laneAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / LANE);
    const at = this.timeOf(event.clientX - box.left);
    const slack = this.spanMs / 200;
    for (const [number, lane] of this.rowOf ?? []) {
      const [from, to] = this.ends.get(number);
      if (lane === row && from - slack <= at && at <= to + slack) return number;
    }
    return 0;
  }

  timeOf(x) {
    return this.from + (x - LABEL) / Math.max(1, this.width - LABEL) * this.spanMs;
  }

  draw(state, until) {
    const parent = this.canvas.parentElement;
    const width = parent.clientWidth;
    const spans = state.spans.filter(span => (span.to ?? until) >= until - this.spanMs && span.from <= until);
    const most = Math.max(4, Math.floor((parent.clientHeight - 3 * CHART) / LANE));
    this.assignLanes(spans, most);
    const height = most * LANE + 3 * CHART;
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.floor(width * ratio) || this.canvas.height !== Math.floor(height * ratio)) {
      this.canvas.width = Math.floor(width * ratio);
      this.canvas.height = Math.floor(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    Object.assign(this, { width, height, from: until - this.spanMs, until, marks: state.marks });
    const { context } = this;
    const colours = theme();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = css(colours.back);
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.drawLanes(spans, colours);
    const top = height - 3 * CHART;
    this.drawChart(state, top, "queue", colours);
    this.drawChart(state, top + CHART, "tokens", colours);
    this.drawChart(state, top + 2 * CHART, "blocks", colours);
    this.drawMarks(state, colours);
  }

  x(at) {
    return LABEL + (at - this.from) / this.spanMs * (this.width - LABEL);
  }

  // Gives requests lanes, in which one follows the other; those that find none are not drawn.
  assignLanes(spans, most) {
    const ends = new Map(); // of requests: their first and last moment
    for (const span of spans) {
      const known = ends.get(span.number);
      ends.set(span.number, [Math.min(known?.[0] ?? Infinity, span.from), Math.max(known?.[1] ?? 0, span.to ?? Infinity)]);
    }
    const free = new Array(most).fill(-Infinity);
    const lanes = new Map();
    for (const [number, [from, to]] of [...ends].sort((a, b) => a[0] - b[0])) {
      let lane = this.rowOf?.get(number) ?? -1;
      if (lane < 0 || lane >= most || free[lane] > from) lane = free.findIndex(end => end <= from);
      if (lane < 0) continue;
      lanes.set(number, lane);
      free[lane] = to;
    }
    if (ends.has(this.selected) && !lanes.has(this.selected)) { // it is shown in place of others
      for (const [number, lane] of lanes) if (lane === most - 1) lanes.delete(number);
      lanes.set(this.selected, most - 1);
    }
    this.rowOf = lanes;
    this.ends = ends;
    this.lanes = [...lanes.keys()];
  }

  drawLanes(spans, colours) {
    const { context } = this;
    const phases = PHASE_RGB();
    for (const span of spans) {
      const row = this.rowOf.get(span.number);
      if (row === undefined) continue;
      const top = row * LANE;
      const left = Math.max(0, this.x(span.from));
      const right = this.x(span.to ?? this.until);
      const width = Math.max(1.5, right - left - 0.5);
      const isThin = span.phase === PHASE.WAITING;
      const isFaded = this.selected && this.selected !== span.number;
      context.fillStyle = css(phases[span.phase], isFaded ? 0.35 : 1);
      context.fillRect(left, top + (isThin ? 5 : 2), width, LANE - (isThin ? 10 : 5));
      if (isThin) continue;
      context.fillStyle = css(rgbOfRequest(span.number));
      context.fillRect(left, top + LANE - 4, width, 3);
      if (width > 34 && span.phase === PHASE.DECODE) {
        context.fillStyle = isFaded ? css(colours.text) : css(colours.back);
        context.font = "9px system-ui, sans-serif";
        context.fillText(`#${span.number}`, left + 3, top + 6.5);
        context.font = "11px system-ui, sans-serif";
      }
    }
    const row = this.rowOf.get(this.selected);
    if (row !== undefined) {
      const [from, to] = this.ends.get(this.selected);
      const left = Math.max(0, this.x(from));
      context.strokeStyle = css(colours.text);
      context.lineWidth = 1.5;
      context.strokeRect(left, row * LANE + 0.5, Math.min(this.width, this.x(Math.min(to, this.until))) - left, LANE - 2);
    }
  }

  drawMarks(state, colours) {
    const { context } = this;
    const phases = PHASE_RGB();
    for (const mark of state.marks) {
      if (mark.at < this.from || mark.at > this.until) continue;
      const x = this.x(mark.at);
      if (mark.kind === "epoch" || mark.kind === "lost sight") {
        context.fillStyle = css(colours.wrong);
        context.fillRect(x - 1, 0, 2, this.height);
        context.fillText("epoch", Math.min(x + 4, this.width - 36), 7);
        continue;
      }
      const row = this.rowOf.get(mark.number);
      if (row === undefined) continue;
      const y = row * LANE + LANE / 2;
      context.fillStyle = css(mark.kind in MARK_RGB ? phases[MARK_RGB[mark.kind]] : colours.text);
      if (mark.kind in MARK_RGB) {
        context.beginPath();
        context.moveTo(x - 5, y - 5);
        context.lineTo(x + 5, y - 5);
        context.lineTo(x, y + 5);
        context.fill();
      } else if (mark.kind === "recovered") context.fillRect(x - 1.5, y - 6, 3, 12);
    }
    if (this.playhead !== null && this.playhead >= this.from && this.playhead <= this.until) {
      context.fillStyle = css(colours.accent);
      context.fillRect(this.x(this.playhead) - 1, 0, 2, this.height);
    }
  }

  drawChart(state, top, name, colours) {
    const { context } = this;
    const phases = PHASE_RGB();
    const inner = CHART - 18;
    const seen = list => list.filter(one => one.at >= this.from - 2000 && one.at <= this.until);
    context.fillStyle = css(colours.line);
    context.fillRect(LABEL, top + CHART - 2, this.width - LABEL, 1);
    const line = (points, value, most, rgb, isDashed = false) => {
      context.beginPath();
      context.setLineDash(isDashed ? [4, 3] : []);
      let last = null;
      for (const one of points) {
        const y = top + CHART - 2 - Math.min(1, value(one) / most) * inner;
        const x = Math.max(LABEL, this.x(one.at));
        if (last === null) context.moveTo(x, y);
        else {
          context.lineTo(x, last);
          context.lineTo(x, y);
        }
        last = y;
      }
      if (last !== null && !isDashed) context.lineTo(this.x(this.until), last);
      context.strokeStyle = css(rgb);
      context.lineWidth = 1.5;
      context.stroke();
      context.setLineDash([]);
    };
    let most = 1;
    let label = "";
    if (name === "tokens") {
      most = state.tokenBudget || 1;
      label = `tokens/step (of ${most})`;
      for (const one of seen(state.steps)) {
        const height = Math.min(1, one.tokens / most) * inner;
        const prompt = Math.min(1, one.prompt / most) * inner;
        const x = this.x(one.at);
        context.fillStyle = css(phases[PHASE.DECODE]);
        context.fillRect(x, top + CHART - 2 - Math.max(1, height), 1.5, Math.max(1, height));
        context.fillStyle = css(phases[PHASE.PREFILL]);
        context.fillRect(x, top + CHART - 2 - Math.max(1, height), 1.5, prompt);
      }
    } else if (name === "queue") {
      const points = seen(state.points);
      most = Math.max(4, ...points.map(one => one.waiting + one.preempted + one.swapped), ...points.map(one => one.running));
      label = `running, waiting (to ${most})`;
      line(points, one => one.running, most, phases[PHASE.DECODE]);
      line(points, one => one.waiting + one.preempted + one.swapped, most, phases[PHASE.PREEMPTED]);
    } else {
      const points = seen(state.points);
      most = state.numBlocks || 1;
      label = `blocks in use (of ${most})`;
      line(points, one => one.used, most, colours.accent);
      line(points, one => one.tokens / (state.blockSize || 1), most, phases[PHASE.DECODE]);
    }
    const key = { queue: ["waiting", "running"], blocks: ["used"] }[name];
    if (this.other && key) key.forEach((value, i) =>
      line(this.other, one => one[value] / (value === "used" ? this.other.scale : 1), most, i ? phases[PHASE.DECODE] : name === "blocks" ? colours.accent : phases[PHASE.PREEMPTED], true));
    context.fillStyle = css(colours.quiet);
    context.fillText(label, 4, top + 6);
  }
}
