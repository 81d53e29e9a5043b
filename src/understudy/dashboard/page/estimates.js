// Estimates: the value of each step of an episode as a curve, with the steps that were called good.

import { Chart } from "./chart.js";
import { fill, h } from "./dom.js";
import { count, short } from "./format.js";

// A card that is hidden where nothing is known; a click or a drag chooses the step.
export class EstimatesCard {
  constructor(seek) {
    this.now = h("span", { class: "soft" });
    this.notes = h("div", { class: "notes" });
    this.chart = new Chart({ height: 190, yMin: -1, yMax: 0, label: "Value of each step", x: count, yLabel: "value (share of the longest failure that is left)", seek });
    this.node = h("section", { class: "card estimates", hidden: true }, h("header", {}, h("h2", {}, "Value"), this.now, this.chart.legend), this.chart.node, this.notes);
    this.found = null;
  }

  set(found, unit) {
    this.found = found;
    this.unit = unit;
    this.node.hidden = !found;
    if (!found) return;
    for (const node of [this.now, this.chart.legend, this.chart.node]) node.hidden = !found.value;
    fill(this.notes, found.note ? h("p", { class: "stale" }, found.note) : null,
      found.value ? h("p", { class: "soft" }, "0 is a success that has been reached, -1 the start of the longest episode if it fails. ",
        h("span", { title: found.model }, `Estimated by value model ${found.model.slice(0, 8)} as of commit ${count(found.commit)}.`)) : null);
    if (!found.value) return;
    this.chart.set([{ name: "value", color: "var(--accent)", points: found.value.map((value, step) => [step, value]) }],
      { xLabel: unit, marks: { name: "called good", color: "var(--good)", spans: spans(found.good) } });
  }

  move(at) {
    if (!this.found?.value) return;
    const step = Math.min(at, this.found.value.length - 1);
    this.chart.move(step);
    this.now.textContent = `${short(this.found.value[step])} in ${this.unit} ${count(step)}, advantage ${short(this.found.advantage[step])}${this.found.good[step] ? ", good" : ""}`;
  }
}

// The first and the last step of each part in which all steps are good.
function spans(good) {
  const found = [];
  good.forEach((one, step) => {
    if (one && good[step - 1]) found.at(-1)[1] = step;
    else if (one) found.push([step, step]);
  });
  return found;
}
