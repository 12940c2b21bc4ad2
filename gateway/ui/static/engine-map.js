// Draws the blocks of a pool on a canvas, one cell each.

import { KIND } from "./engine-state.js";
import { css, rgbOfRequest, theme } from "./engine-colours.js";

const FLASH_MS = 450;
const EVICTED_MS = 900; // how long an evicted block has an outline
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const GAP_FROM = 6; // px of a cell that has a gap, a level and marks

export class BlockMap {
  // canvas: drawn on. scroller: its parent, which scrolls where it is zoomed. kindOf: "device" or "host".
  constructor(canvas, scroller, { isHost = false, onPoint } = {}) {
    Object.assign(this, { canvas, scroller, isHost, onPoint });
    this.context = canvas.getContext("2d", { alpha: false });
    this.zoom = 1;
    this.cursor = -1;
    this.selected = 0; // request that is emphasized
    this.flashes = new Map(); // block -> time
    this.evictions = new Map(); // block -> time
    this.isStale = true;
    this.num = 0;
    canvas.addEventListener("pointermove", event => this.point(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("focus", () => this.point(Math.max(0, this.cursor)));
    scroller.addEventListener("scroll", () => { this.isStale = true; });
    new ResizeObserver(() => {
      if (scroller.clientWidth !== this.width || innerHeight !== this.pageHeight) this.layout();
    }).observe(scroller.parentElement);
    addEventListener("resize", () => this.layout());
  }

  numOf(state) {
    return this.isHost ? state.numHostBlocks : state.numBlocks;
  }

  layout() {
    const num = this.num;
    const width = Math.max(1, this.scroller.clientWidth);
    const height = this.isHost ? 110 : Math.max(220, innerHeight * 0.46);
    if (!num) return;
    this.width = width;
    this.pageHeight = innerHeight;
    const ratio = devicePixelRatio || 1;
    // The largest whole number of device pixels at which all cells fit.
    let cell = Math.floor(Math.sqrt(width * height * ratio * ratio / num));
    while (cell > 1 && Math.ceil(num / Math.floor(width * ratio / cell)) * cell > height * ratio) cell--;
    cell = Math.max(1, Math.min(cell, this.isHost ? 14 * ratio : 48 * ratio)) * this.zoom;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width * ratio / cell));
    this.rows = Math.ceil(num / this.columns);
    this.ratio = ratio;
    // The canvas has the size of the window onto the cells, whatever their number.
    this.viewWidth = Math.floor(width * ratio);
    this.viewHeight = Math.min(this.rows * cell, Math.floor(height * ratio));
    this.scroller.style.height = `${this.viewHeight / ratio}px`;
    this.canvas.width = this.viewWidth;
    this.canvas.height = Math.max(1, this.viewHeight);
    this.canvas.style.width = `${this.viewWidth / ratio}px`;
    this.canvas.style.height = `${this.viewHeight / ratio}px`;
    this.scroller.firstElementChild.style.height = `${this.rows * cell / ratio}px`;
    this.isStale = true;
  }

  setZoom(zoom) {
    this.zoom = Math.max(1, Math.min(16, zoom));
    this.layout();
  }

  // Takes what the state says has changed.
  update(state, now) {
    if (this.numOf(state) !== this.num) {
      this.num = this.numOf(state);
      this.layout();
    }
    const changed = this.isHost ? state.changedHosts : state.changed;
    if (changed && changed.length < 20_000 && !calm.matches) for (const block of changed) this.flashes.set(block, now);
    if (!this.isHost) {
      for (const block of state.evicted) this.evictions.set(block, now);
      state.evicted.clear();
    }
    this.isStale = true;
  }

  // Draws if there is anything new; returns whether an animation goes on.
  draw(state, now) {
    if (!this.num || !this.cell || (!this.isStale && !this.flashes.size && !this.evictions.size)) return false;
    this.isStale = false;
    if (this.cell < GAP_FROM) this.drawPixels(state, now);
    else this.drawCells(state, now);
    for (const [block, since] of this.flashes) if (now - since > FLASH_MS) this.flashes.delete(block);
    for (const [block, since] of this.evictions) if (now - since > EVICTED_MS) this.evictions.delete(block);
    return this.flashes.size > 0 || this.evictions.size > 0;
  }

  get firstRow() {
    return Math.floor(this.scroller.scrollTop * this.ratio / this.cell);
  }

  rgb(state, block, colours) {
    if (this.isHost) {
      const owner = state.hosts[block];
      return owner ? rgbOfRequest(owner, this.selected && this.selected !== owner) : colours.free;
    }
    const owner = state.owners[block];
    if (owner) return rgbOfRequest(owner, Boolean(this.selected) && this.selected !== owner);
    if (state.kinds[block] & KIND.PINNED) return colours.quiet;
    if ((state.kinds[block] & 7) === KIND.CACHED) {
      const last = state.lastOwners[block];
      return last ? rgbOfRequest(last, true) : colours.cached;
    }
    return colours.free;
  }

  drawPixels(state, now) {
    const { cell, columns, context, viewWidth, viewHeight } = this;
    const colours = theme();
    const image = this.image?.width === viewWidth && this.image.height === viewHeight
      ? this.image : (this.image = context.createImageData(viewWidth, viewHeight));
    const pixels = new Uint32Array(image.data.buffer);
    const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
    pixels.fill(pack(colours.back));
    const firstRow = this.firstRow;
    const numRows = Math.ceil(viewHeight / cell);
    const end = Math.min(this.num, (firstRow + numRows) * columns);
    const packed = new Map();
    for (let block = firstRow * columns; block < end; block++) {
      let rgb = this.rgb(state, block, colours);
      let value;
      const since = this.flashes.get(block);
      if (since !== undefined) {
        const left = Math.max(0, 1 - (now - since) / FLASH_MS);
        rgb = rgb.map((part, i) => part + (colours.text[i] - part) * left * 0.8);
        value = pack(rgb.map(Math.round));
      } else {
        value = packed.get(rgb);
        if (value === undefined) packed.set(rgb, value = pack(rgb));
      }
      const x = (block % columns) * cell;
      const y = (Math.floor(block / columns) - firstRow) * cell;
      for (let row = y; row < Math.min(y + cell, viewHeight); row++)
        pixels.fill(value, row * viewWidth + x, row * viewWidth + x + cell);
    }
    context.putImageData(image, 0, 0);
    this.drawEvictions(now, colours, firstRow);
    this.drawCursor(colours, firstRow);
  }

  drawCells(state, now) {
    const { cell, columns, context } = this;
    const colours = theme();
    context.fillStyle = css(colours.back);
    context.fillRect(0, 0, this.viewWidth, this.viewHeight);
    const firstRow = this.firstRow;
    const end = Math.min(this.num, (firstRow + Math.ceil(this.viewHeight / cell) + 1) * columns);
    const inner = cell - Math.max(1, Math.round(cell / 12));
    for (let block = firstRow * columns; block < end; block++) {
      const x = (block % columns) * cell;
      const y = (Math.floor(block / columns) - firstRow) * cell;
      const since = this.flashes.get(block);
      const left = since === undefined ? 0 : Math.max(0, 1 - (now - since) / FLASH_MS);
      const shrink = Math.round(inner * 0.22 * left * left); // what changed grows into its place
      this.drawCell(state, block, x + shrink, y + shrink, inner - 2 * shrink, colours);
    }
    this.drawEvictions(now, colours, firstRow);
    this.drawCursor(colours, firstRow);
  }

  drawCell(state, block, x, y, size, colours) {
    const { context } = this;
    const rgb = this.rgb(state, block, colours);
    const owner = this.isHost ? state.hosts[block] : state.owners[block];
    if (!owner || this.isHost) {
      context.fillStyle = css(rgb);
      context.fillRect(x, y, size, size);
      if (!this.isHost && state.kinds[block] & KIND.PINNED) this.drawPin(x, y, size, colours);
      return;
    }
    const level = Math.round(size * state.filled[block] / state.blockSize);
    if (level < size) {
      context.fillStyle = css(rgb, 0.25);
      context.fillRect(x, y, size, size);
    }
    context.fillStyle = css(rgb);
    context.fillRect(x, y + size - level, size, level);
    const kind = state.kinds[block];
    if (state.references[block] > 1) {
      context.fillStyle = css(colours.back, 0.92);
      const third = Math.max(2, Math.round(size / 3));
      if ((kind & 7) === KIND.PREFIX) context.fillRect(x + (size - third) / 2, y + (size - third) / 2, third, third);
      else {
        context.beginPath();
        context.moveTo(x + size, y);
        context.lineTo(x + size, y + size * 0.6);
        context.lineTo(x + size * 0.4, y);
        context.fill();
      }
    }
    if (kind & KIND.PINNED) this.drawPin(x, y, size, colours);
  }

  drawPin(x, y, size, colours) {
    const { context } = this;
    const line = Math.max(1, size / 7);
    context.strokeStyle = css(colours.text);
    context.lineWidth = line;
    context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
  }

  // An outline that fades; with reduced motion it stays as it is until it ends.
  drawEvictions(now, colours, firstRow) {
    const { cell, columns, context } = this;
    const line = Math.max(1, Math.round(cell / 8));
    context.lineWidth = line;
    for (const [block, since] of this.evictions) {
      const y = (Math.floor(block / columns) - firstRow) * cell;
      const left = 1 - (now - since) / EVICTED_MS;
      if (left <= 0 || y < 0 || y > this.viewHeight) continue;
      context.strokeStyle = css(colours.wrong, calm.matches ? 1 : Math.min(1, 1.5 * left));
      context.strokeRect((block % columns) * cell + line / 2, y + line / 2, Math.max(1, cell - line), Math.max(1, cell - line));
    }
  }

  drawCursor(colours, firstRow) {
    if (this.cursor < 0) return;
    const { cell, context } = this;
    const x = (this.cursor % this.columns) * cell;
    const y = (Math.floor(this.cursor / this.columns) - firstRow) * cell;
    const size = Math.max(cell, 5);
    context.strokeStyle = css(colours.text);
    context.lineWidth = Math.max(2, this.ratio * 2);
    context.strokeRect(x - 1, y - 1, size + 1, size + 1);
  }

  blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) * this.ratio / this.cell);
    const row = Math.floor((event.clientY - box.top) * this.ratio / this.cell) + this.firstRow;
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && block < this.num ? block : -1;
  }

  point(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.isStale = true;
    this.onPoint?.(block);
  }

  key(event) {
    const page = this.columns * Math.max(1, Math.floor(this.viewHeight / this.cell) - 1);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const block = Math.max(0, Math.min(this.num - 1, Math.max(0, this.cursor) + move));
    const top = Math.floor(block / this.columns) * this.cell / this.ratio;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + this.cell / this.ratio > this.scroller.scrollTop + this.scroller.clientHeight)
      this.scroller.scrollTop = top + this.cell / this.ratio - this.scroller.clientHeight;
    this.point(block);
  }
}
