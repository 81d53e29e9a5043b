// Player: the camera videos of an episode, frame by frame; and its lanes: curves, and the source of each action.

import { getBytes } from "./api.js";
import { h } from "./dom.js";
import { ticks } from "./chart.js";
import { count, short, WHO } from "./format.js";

const BLOCK = 32, CACHE_BYTES = 96e6;

// The frames of one camera, fetched in blocks and cached up to a number of bytes.
export class CameraVideo {
  constructor(target, episode, camera, shape, version) {
    Object.assign(this, { target, episode, camera, version, shape });
    this.canvas = h("canvas", { width: shape[1], height: shape[0], class: shape[1] < 200 ? "pixels" : "", role: "img", "aria-label": `Camera ${camera.replace("observation/", "")}` });
    this.pen = this.canvas.getContext("2d");
    this.blocks = new Map();
    this.loading = new Map();
    this.most = Math.max(2, Math.floor(CACHE_BYTES / (BLOCK * shape[0] * shape[1] * 4)));
    this.controller = new AbortController();
  }

  has(index) { return this.blocks.has(Math.floor(index / BLOCK)); }

  async load(number) {
    if (this.blocks.has(number)) return this.blocks.get(number);
    if (!this.loading.has(number)) {
      this.loading.set(number, (async () => {
        try {
          const data = await getBytes(`${this.target}/frames/${this.episode}?camera=${encodeURIComponent(this.camera)}&first=${number * BLOCK}&count=${BLOCK}&v=${this.version}`, this.controller.signal);
          const view = new DataView(data), images = [];
          for (let at = 0; at < data.byteLength;) {
            const size = view.getUint32(at, true);
            images.push(createImageBitmap(new Blob([new Uint8Array(data, at + 4, size)], { type: "image/jpeg" })));
            at += 4 + size;
          }
          this.blocks.set(number, await Promise.all(images));
          while (this.blocks.size > this.most) {
            const oldest = this.blocks.keys().next().value;
            for (const image of this.blocks.get(oldest)) image.close();
            this.blocks.delete(oldest);
          }
        } finally { this.loading.delete(number); }
      })());
    }
    await this.loading.get(number);
    return this.blocks.get(number);
  }

  async show(index) {
    this.wanted = index;
    const number = Math.floor(index / BLOCK);
    const images = await this.load(number);
    if (this.wanted !== index || !images) return;
    const image = images[index - number * BLOCK];
    if (image) this.pen.drawImage(image, 0, 0, this.canvas.width, this.canvas.height);
    this.canvas.dataset.row = index;
    this.load(number + 1).catch(() => {}); // prefetch
  }

  close() { this.controller.abort(); }
}

const LANE = 52, LEFT = 8, AXIS = 30;

// The lanes of an episode: { name, values, proposal }; a click or a drag chooses the step.
export class Lanes {
  constructor(seek) {
    this.canvas = h("canvas", { role: "img", "aria-label": "Curves of each step; the arrow keys move through them" });
    this.cursor = h("i", { class: "cursor" });
    this.names = h("div", { class: "names" });
    this.plot = h("div", { class: "plotted" }, this.canvas, this.cursor);
    this.node = h("div", { class: "lanes" }, this.names, this.plot);
    this.lanes = [];
    this.source = [];
    this.at = 0;
    this.kept = null; // [first, last] step of the part that a trim keeps
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      seek(Math.round((event.clientX - box.left - LEFT) / Math.max(box.width - 2 * LEFT, 1) * Math.max(this.source.length - 1, 1)));
    };
    this.plot.addEventListener("pointerdown", (event) => { this.plot.setPointerCapture(event.pointerId); point(event); });
    this.plot.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.plot);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.dark.addEventListener("change", this.redraw);
  }

  close() { this.sizes.disconnect(); this.dark.removeEventListener("change", this.redraw); }

  set(lanes, source, unit) {
    this.lanes = lanes;
    this.unit = unit;
    this.source = source;
    this.values = lanes.map(() => h("span", {}));
    this.names.replaceChildren(h("div", { class: "strip" }, "source"), ...lanes.map((lane, at) => h("div", { title: lane.title }, h("b", {}, lane.name), this.values[at])));
    this.draw();
    this.move(this.at);
  }

  keep(part) {
    this.kept = part;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, height = 26 + this.lanes.length * LANE + AXIS, ratio = devicePixelRatio;
    if (!width) return;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(this.node);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.scale(ratio, ratio);
    const steps = this.source.length, x = (at) => LEFT + at / Math.max(steps - 1, 1) * (width - 2 * LEFT);
    const wide = (width - 2 * LEFT) / Math.max(steps - 1, 1);
    for (let at = 0; at < steps; at++) {
      pen.fillStyle = color(WHO[this.source[at]]);
      pen.fillRect(x(at) - wide / 2, 6, wide + 0.6, 12);
    }
    pen.fillStyle = color("soft");
    pen.font = "11px system-ui, sans-serif";
    for (const step of ticks(0, Math.max(steps - 1, 1), Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
      pen.textAlign = step === 0 ? "left" : x(step) > width - 24 ? "right" : "center";
      pen.fillText(count(step), x(step), height - AXIS + 12);
    }
    pen.textAlign = "right";
    pen.fillText(this.unit, width - LEFT, height - 4);
    this.lanes.forEach((lane, number) => this.drawLane(pen, lane, 26 + number * LANE, x, color, width));
    if (this.kept) { // what a trim drops is grey
      pen.globalAlpha = 0.75;
      pen.fillStyle = color("later");
      pen.fillRect(0, 0, x(this.kept[0]) - wide / 2, height - AXIS);
      pen.fillRect(x(this.kept[1]) + wide / 2, 0, width, height - AXIS);
      pen.globalAlpha = 1;
    }
    this.move(this.at);
  }

  drawLane(pen, lane, top, x, color, width) {
    const all = [...lane.values, ...(lane.proposal ?? [])].filter((value) => value !== null);
    let low = Math.min(0, ...all), high = Math.max(0, ...all);
    if (low === high) high = low + 1;
    const y = (value) => top + LANE - 7 - (value - low) / (high - low) * (LANE - 14);
    pen.strokeStyle = color("line");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(LEFT, y(0));
    pen.lineTo(width - LEFT, y(0));
    pen.stroke();
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    for (let at = 1; at < lane.values.length; at++) { // in the colour of who chose it
      if (lane.values[at] === null || lane.values[at - 1] === null) continue;
      pen.strokeStyle = lane.plain ? color("accent") : color(WHO[this.source[at]]);
      pen.beginPath();
      pen.moveTo(x(at - 1), y(lane.values[at - 1]));
      pen.lineTo(x(at), y(lane.values[at]));
      pen.stroke();
    }
    if (!lane.proposal) return;
    pen.strokeStyle = color("ink");
    pen.lineWidth = 1.1;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    let down = false;
    lane.proposal.forEach((value, at) => {
      if (value === null) { down = false; return; }
      if (down) pen.lineTo(x(at), y(value)); else pen.moveTo(x(at), y(value));
      down = true;
    });
    pen.stroke();
    pen.setLineDash([]);
  }

  move(at) {
    this.at = at;
    const step = Math.min(at, this.source.length - 1), width = this.plot.clientWidth;
    this.cursor.style.transform = `translateX(${LEFT + step / Math.max(this.source.length - 1, 1) * (width - 2 * LEFT)}px)`;
    this.lanes.forEach((lane, number) => {
      const proposed = lane.proposal?.[step];
      this.values[number].textContent = step < 0 ? "" : short(lane.values[step]) + (proposed === null || proposed === undefined ? "" : `  (${short(proposed)})`);
    });
  }
}
