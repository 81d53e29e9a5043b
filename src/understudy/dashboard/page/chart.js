// Curves as SVG, redrawn when the data or the width changes. Hover or touch shows the numbers at a step.

import { h, svg } from "./dom.js";
import { short } from "./format.js";

const LEFT = 44, RIGHT = 12, TOP = 24, BOTTOM = 38; // the label of y stands above its ticks, that of x below

// `xLabel` and `yLabel` say what the axes count, with the unit; `x` and `y` write their numbers.
// series: { name, color, points: [[x, y], ...], band: [[x, low, high], ...], dots, dash, bars, starts }
// With `bars`, x is the index of the bar; with `starts` too, a bar reaches from its start to its x.
// `seek` is called with the x of a click or a drag; `move` shows where a film is.
export class Chart {
  constructor({ height = 200, xMin = 0, yMin = null, yMax = null, y = short, x = short, label = "", xLabel, yLabel, legend = true, seek = null }) {
    Object.assign(this, { height, xMin, yMin, yMax, formatY: y, formatX: x, named: legend, label, xLabel, yLabel });
    this.series = [];
    this.marks = null; // { name, color, spans: [[first, last], ...] }: parts of x
    this.at = null; // of a film
    this.svg = svg("svg", { class: "chart", role: "img", "aria-label": label, height });
    this.legend = h("div", { class: "legend" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.node = h("div", { class: "plot" }, this.legend, h("div", { class: "canvas" }, this.svg, this.tip));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    if (seek) {
      const choose = (event) => { if (this.scale && event.buttons) seek(Math.round(this.xOf(event))); };
      this.svg.classList.add("seek");
      this.svg.addEventListener("pointerdown", (event) => { this.svg.setPointerCapture(event.pointerId); choose(event); });
      this.svg.addEventListener("pointermove", choose);
    }
    new ResizeObserver(() => this.draw()).observe(this.svg.parentNode);
  }

  set(series, { xLabel = this.xLabel, yLabel = this.yLabel, marks = null } = {}) {
    Object.assign(this, { xLabel, yLabel });
    this.marks = marks;
    this.series = series.filter((one) => one.points.some(([, y]) => y !== null));
    this.legend.replaceChildren(...[...(this.named && (series.length > 1 || series[0]?.always) ? series : []), ...(marks ? [marks] : [])].map((one) =>
      h("span", { class: one.dash ? "dash" : "", vars: { "--c": one.color } }, h("i", {}), one.name)));
    this.svg.setAttribute("aria-label", `${this.label}: ${this.series.map(described(this.formatY)).join("; ") || "no data yet"}`);
    this.draw();
    return this;
  }

  draw() {
    const width = this.svg.parentNode.clientWidth;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const xs = this.series.flatMap((one) => one.points.map(([x]) => x));
    const ys = this.series.flatMap((one) => [...one.points.map(([, y]) => y), ...(one.band ?? []).flatMap(([, a, b]) => [a, b])]).filter((y) => y !== null);
    if (!ys.length) {
      this.svg.replaceChildren(svg("text", { class: "none", x: width / 2, y: this.height / 2, "text-anchor": "middle" }, "no data yet"));
      this.scale = null;
      return;
    }
    const bars = this.series.some((one) => one.bars && !one.starts);
    let x0 = bars ? -0.5 : Math.min(this.xMin, ...xs), x1 = bars ? Math.max(...xs) + 0.5 : Math.max(...xs);
    let y0 = this.yMin ?? Math.min(...ys), y1 = this.yMax ?? Math.max(...ys);
    if (x0 === x1) x1 = x0 + 1;
    if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 1; if (this.yMin === null && y0 !== 0) y0 -= room; if (this.yMax === null) y1 += room; }
    else if (this.yMax === null) y1 += (y1 - y0) * 0.06;
    const sx = (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
    const sy = (y) => this.height - BOTTOM - (y - y0) / (y1 - y0) * (this.height - TOP - BOTTOM);
    this.scale = { sx, sy, x0, x1, width };
    const parts = [];
    const yTicks = ticks(y0, y1, Math.max(3, Math.floor(this.height / 50))), texts = yTicks.map(this.formatY);
    const exact = new Set(texts).size < texts.length; // they differ by less than the format shows
    for (const [at, y] of yTicks.entries()) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: sy(y), y2: sy(y) }),
        svg("text", { class: "tick", x: LEFT - 8, y: sy(y) + 4, "text-anchor": "end" }, exact ? String(y) : texts[at]));
    }
    for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 120))).filter((one) => !bars || Number.isInteger(one))) {
      parts.push(svg("text", { class: "tick", x: Math.min(sx(x), width - RIGHT - 8), y: this.height - BOTTOM + 16, "text-anchor": "middle" }, this.formatX(x)));
    }
    parts.push(svg("text", { class: "axis", x: 0, y: 11 }, this.yLabel), svg("text", { class: "axis", x: width - RIGHT, y: this.height - 5, "text-anchor": "end" }, this.xLabel));
    for (const [first, last] of this.marks?.spans ?? []) {
      const left = Math.max(sx(first - 0.5), LEFT), wide = Math.max(Math.min(sx(last + 0.5), width - RIGHT) - left, 1), bottom = this.height - BOTTOM;
      const part = (name, y, height) => svg("rect", { class: name, x: left, width: wide, y, height, style: { fill: this.marks.color } });
      parts.push(part("band", TOP, bottom - TOP), part("mark", bottom, 4));
    }
    for (const one of this.series) parts.push(...this.lines(one, sx, sy, y0, width));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" });
    this.now = svg("line", { class: "now", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.cursor, this.now);
    this.move(this.at);
  }

  move(at) {
    this.at = at;
    if (at === null || !this.scale) return;
    const x = this.scale.sx(Math.min(at, this.scale.x1));
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.now.setAttribute(name, value);
  }

  lines(one, sx, sy, y0, width) {
    const found = [];
    if (one.band?.length > 1) {
      const top = one.band.map(([x, , high]) => `${sx(x)},${sy(high)}`);
      const low = one.band.map(([x, down]) => `${sx(x)},${sy(down)}`).reverse();
      found.push(svg("polygon", { class: "band", points: [...top, ...low].join(" "), style: { fill: one.color } }));
    } else if (one.band?.length === 1) {
      const [[x, low, high]] = one.band;
      const line = (x1, x2, y1, y2) => svg("line", { class: "whisker", x1, x2, y1, y2, style: { stroke: one.color } });
      found.push(line(sx(x), sx(x), sy(low), sy(high)), ...[low, high].map((end) => line(sx(x) - 5, sx(x) + 5, sy(end), sy(end))));
    }
    if (one.starts) {
      one.points.forEach(([x, y], at) => {
        const left = sx(one.starts[at]) + 1, wide = Math.max(sx(x) - left, 1);
        if (y) found.push(svg("rect", { class: "bar", x: left, width: wide, y: sy(y), height: Math.max(sy(y0) - sy(y), 1), rx: Math.min(2, wide / 3), style: { fill: one.color } }));
      });
      return found;
    }
    if (one.bars) {
      const wide = Math.max(1, Math.min(26, (width - LEFT - RIGHT) / one.points.length - 2));
      for (const [x, y] of one.points) {
        if (y) found.push(svg("rect", { class: "bar", x: sx(x) - wide / 2, width: wide, y: sy(y), height: Math.max(sy(y0) - sy(y), 1), rx: Math.min(2, wide / 3), style: { fill: one.color } }));
      }
      return found;
    }
    let path = "", pen = false;
    for (const [x, y] of one.points) {
      if (y === null) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${sx(x).toFixed(1)},${sy(y).toFixed(1)}`;
      pen = true;
    }
    found.push(svg("path", { class: one.dash ? "line dash" : "line", d: path, style: { stroke: one.color } }));
    if (one.dots || one.points.length === 1) {
      for (const [x, y] of one.points.slice(-200)) {
        if (y !== null) found.push(svg("circle", { class: "dot", cx: sx(x), cy: sy(y), r: one.points.length === 1 ? 4.5 : 3, style: { fill: one.color } }));
      }
    }
    return found;
  }

  xOf(event) {
    const { x0, x1, width } = this.scale;
    return x0 + (event.offsetX - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
  }

  point(event) {
    if (!this.scale) return;
    const { sx, width } = this.scale, at = this.xOf(event);
    const near = ({ points, starts }) => (starts ? points.find(([x]) => x >= at) ?? points.at(-1) : points.reduce((best, one) => (one[1] !== null && (best === null || Math.abs(one[0] - at) < Math.abs(best[0] - at)) ? one : best), null));
    const found = this.series.map((one) => [one, near(one)]).filter(([, point]) => point);
    if (!found.length) return;
    const x = found.reduce((best, [, point]) => (Math.abs(point[0] - at) < Math.abs(best - at) ? point[0] : best), found[0][1][0]);
    this.cursor.setAttribute("x1", sx(x));
    this.cursor.setAttribute("x2", sx(x));
    this.cursor.setAttribute("visibility", "visible");
    this.tip.replaceChildren(h("b", {}, `${this.formatX(x)} `), h("small", {}, this.xLabel), ...found.map(([one, [px, y]]) => {
      const range = one.band?.find(([bx]) => bx === px);
      return h("div", { vars: { "--c": one.color } }, h("i", {}), one.name, h("span", {}, this.formatY(y), range ? ` (${this.formatY(range[1])} to ${this.formatY(range[2])})` : ""));
    }));
    this.tip.hidden = false;
    const right = sx(x) > width / 2;
    this.tip.style.left = right ? "" : `${sx(x) + 12}px`;
    this.tip.style.right = right ? `${width - sx(x) + 12}px` : "";
  }

  leave() {
    this.tip.hidden = true;
    this.cursor?.setAttribute("visibility", "hidden");
  }
}

// The last number of a curve, for those who hear the page.
const described = (format) => ({ name, points }) => `${name} ${format(points.findLast(([, y]) => y !== null)[1])}`;

export function ticks(low, high, number) {
  const rough = (high - low) / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => (high - low) / s <= number) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// A rate with its 95 % interval, as a bar from 0 to 1.
export function intervalBar(score, color = "var(--accent)") {
  const node = h("div", { class: "interval", title: score.episodes ? `${score.successes} of ${score.episodes}` : "no episodes" });
  if (score.episodes) {
    node.append(
      h("i", { class: "range", style: { left: `${100 * score.low}%`, width: `${100 * (score.high - score.low)}%`, background: color } }),
      h("i", { class: "at", style: { left: `${100 * score.rate}%`, background: color } }));
  }
  return node;
}

// Parts of a whole: [[name, value, color], ...].
export function stack(parts, { legend = false, format = short } = {}) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  const bar = h("div", { class: "stack" }, parts.filter(([, value]) => value > 0).map(([name, value, color]) =>
    h("i", { title: `${name}: ${format(value)}`, style: { flexGrow: String(value / whole), background: color } })));
  if (!legend) return bar;
  return h("div", {}, bar, h("div", { class: "legend" }, parts.filter(([, value]) => value > 0).map(([name, value, color]) =>
    h("span", { vars: { "--c": color } }, h("i", {}), name, h("b", {}, format(value))))));
}

// Practice over training: the share of its episodes that succeeded alone, and with an intervention.
export function practiceCurves(course) {
  const curve = (part, name, color) => ({ name, color, dash: true, always: true, points: course.map((one) => [one.step, one[part].rate]) });
  const helped = course.some((one) => one.human_steps > 0);
  return [curve("alone", "practice that succeeded alone", "var(--policy)"), ...(helped ? [curve("helped", "practice that succeeded with an intervention", "var(--human)")] : [])];
}
