// Runs: their curves in one chart, where their configs differ, and what each score was measured on.

import { get } from "../api.js";
import { Chart } from "../chart.js";
import { card, empty, fill, h, throttle } from "../dom.js";
import { count, IMITATION, NONE, percent, protocolText, short } from "../format.js";

const COLORS = ["var(--run-0)", "var(--run-1)", "var(--run-2)", "var(--run-3)", "var(--run-4)", "var(--run-5)"];

export async function open(page) {
  const success = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), height: 250, label: "Success of runs", legend: false });
  const metric = new Chart({ height: 220, label: "A metric of runs" });
  const selected = h("select", { "aria-label": "Metric", onchange: () => drawMetric() });
  const only = h("input", { type: "checkbox", checked: true, onchange: () => drawConfig() });
  const table = h("div", { class: "scroll" }), scores = h("div", { class: "scroll" }), hidden = new Set();
  const key = h("div", { class: "chips" }), none = h("div", {});
  const body = h("div", { class: "cards" }, card("Success rate", { note: "evaluations, with 95 % intervals", wide: true, tools: key }, success.node), card("Training metric", { tools: selected, wide: true }, metric.node),
    card("Configs", { tools: h("label", { class: "check" }, only, "only differences"), wide: true }, table), card("Evaluations", { note: "with everything that a score depends on", wide: true }, scores));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Runs")), none, body);
  let data = { runs: [], config: [] };

  async function draw() {
    data = await get("runs");
    body.hidden = !data.runs.length;
    fill(none, data.runs.length ? null : empty("No runs", "This page shows only stores. To compare runs, name them all:", h("pre", {}, "understudy watch runs/one runs/two runs/three")));
    fill(key, data.runs.map((run, at) => h("button", { class: hidden.has(at) ? "chip off" : "chip", vars: { "--c": COLORS[at % 6] }, "aria-pressed": String(!hidden.has(at)), onclick: () => { if (!hidden.delete(at)) hidden.add(at); draw(); } }, h("i", {}), run.name)));
    success.set(shown().map(([run, color]) => ({ name: run.name, color, dots: true, points: run.evaluations.map((one) => [one.step, one.success]), band: run.evaluations.map((one) => [one.step, one.low, one.high]) })));
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.train.values)))];
    if (names.join() !== [...selected.options].map((one) => one.value).join()) {
      const before = selected.value || ["critic_loss", "policy_loss", "loss"].find((name) => names.includes(name));
      fill(selected, names.map((name) => h("option", { value: name, selected: name === before }, name.replaceAll("_", " "))));
    }
    drawMetric();
    drawConfig();
    drawScores();
  }

  const shown = () => data.runs.map((run, at) => [run, COLORS[at % 6], at]).filter(([, , at]) => !hidden.has(at));

  function drawMetric() {
    metric.set(shown().map(([run, color]) => ({ name: run.name, color, points: (run.train.values[selected.value] ?? []).map((value, at) => [(IMITATION.has(run.kind) ? run.train.update : run.train.step)[at], value]) })));
  }

  function drawConfig() {
    const rows = data.config.filter((row) => !only.checked || row.differs);
    fill(table, rows.length ? h("table", { class: "config" }, h("thead", {}, h("tr", {}, h("th", {}, "option"), data.runs.map((run) => h("th", {}, run.name)))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.differs ? "differs" : "" }, h("td", {}, row.name), row.values.map((value) => h("td", {}, text(value)))))))
      : h("p", { class: "soft" }, data.runs.length > 1 ? "Their configs are the same." : "There is only one run; untick the box to see its whole config."));
  }

  function drawScores() {
    const rows = data.runs.flatMap((run, at) => run.evaluations.slice(-3).reverse().map((one) => [run, at, one]));
    const facts = ["understudy", "code", "commit", "config", "parameters", "env"];
    fill(scores, rows.length ? h("table", { class: "prints" }, h("thead", {}, h("tr", {}, ["run", "step", "score", "episodes", ...facts, "versions"].map((name) => h("th", {}, name)))),
      h("tbody", {}, rows.map(([run, at, one]) => h("tr", {}, h("td", {}, h("span", { class: "key", vars: { "--c": COLORS[at % 6] } }, h("i", {}), run.name)), h("td", { class: "num" }, count(one.step)),
        h("td", { class: "num" }, `${percent(one.success)} (${percent(one.low)} to ${percent(one.high)})`), h("td", { class: "num", title: one.meaning ?? null }, `${short(one.episodes)}, ${short(one.starts)} starts${one.sampling ? `; ${protocolText(one)}` : ""}`),
        facts.map((name) => h("td", {}, h("code", {}, one.fingerprint?.[name] ?? NONE))), h("td", {}, h("code", {}, Object.entries(one.fingerprint?.versions ?? {}).map((pair) => pair.join(" ")).join(", ")))))))
      : h("p", { class: "soft" }, "No evaluation yet."));
  }

  await draw();
  return { update: throttle(2000, () => draw().catch(() => {})) };
}

const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
