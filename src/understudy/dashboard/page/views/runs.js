// Runs: their curves in one chart, where their configs differ, and what each score was measured on.

import { get } from "../api.js";
import { Chart } from "../chart.js";
import { card, empty, fill, h, throttle } from "../dom.js";
import { count, IMITATION, NONE, percent, plural, protocolText, short } from "../format.js";
import { metricName } from "../metric_names.js";

const MISSING = "-"; // as the server says it
const COLORS = ["var(--run-0)", "var(--run-1)", "var(--run-2)", "var(--run-3)", "var(--run-4)", "var(--run-5)"];
const FACTS = [["Understudy", "understudy"], ["code", "code"], ["git commit", "commit"], ["config", "config"], ["weights", "parameters"], ["world", "env"]];

export async function open(page) {
  const rate = { yMin: 0, yMax: 1, y: (v) => percent(v), legend: false, xLabel: "environment steps" };
  const success = new Chart({ ...rate, height: 270, label: "Success rate in evaluations", yLabel: "held-out episodes that succeed" });
  const practice = new Chart({ ...rate, height: 230, label: "Practice that succeeded without an intervention", yLabel: "episodes of practice that succeed alone" });
  const metrics = h("div", {}), small = new Map();
  const selected = h("select", { "aria-label": "Training metric", onchange: () => drawMetric() });
  const only = h("input", { type: "checkbox", checked: true, onchange: () => drawConfig() });
  const table = h("div", { class: "scroll" }), scores = h("div", { class: "scroll" }), prints = h("div", { class: "scroll" }), hidden = new Set();
  const key = h("div", { class: "chips", role: "group", "aria-label": "Runs to show" }), none = h("div", {});
  const cards = {
    success: card("Success rate", { note: "evaluations, with 95 % intervals", wide: true, tools: key }, success.node, scores),
    practice: card("Practice", { note: "with 95 % intervals", wide: true }, practice.node),
    metric: card("Training metric", { tools: selected, wide: true }, metrics),
    config: card("Configs", { tools: h("label", { class: "check" }, only, "only differences"), wide: true }, table),
    prints: card("Fingerprints", { note: "everything that a score depends on", wide: true }, prints),
  };
  const body = h("div", { class: "cards" }, Object.values(cards));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Runs")), none, body);
  let data = { runs: [], config: [] };

  async function draw() {
    data = await get("runs");
    body.hidden = !data.runs.length;
    fill(none, data.runs.length ? null : empty("No runs", "This page shows only stores. To compare runs, name them all:", h("pre", {}, "understudy watch runs/one runs/two runs/three")));
    if (key.children.length !== data.runs.length) { // a chip that has the focus keeps it
      fill(key, data.runs.map((run, at) => h("button", { class: "chip", vars: { "--c": COLORS[at % 6] }, "aria-pressed": "true", onclick: (event) => toggle(event.currentTarget, at) }, h("i", {}), run.name)));
    }
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.train.values)))];
    if (names.join() !== [...selected.options].map((one) => one.value).join()) {
      const before = selected.value || ["critic_loss", "policy_loss", "loss"].find((name) => names.includes(name));
      fill(selected, names.map((name) => h("option", { value: name, selected: name === before }, metricName(name).title)));
    }
    drawCurves();
    drawConfig();
    drawScores();
  }

  function toggle(chip, at) {
    if (!hidden.delete(at)) hidden.add(at);
    chip.classList.toggle("off", hidden.has(at));
    chip.setAttribute("aria-pressed", String(!hidden.has(at)));
    drawCurves();
  }

  const shown = () => data.runs.map((run, at) => [run, COLORS[at % 6], at]).filter(([, , at]) => !hidden.has(at));

  function drawCurves() {
    success.set(shown().map(([run, color]) => ({ name: run.name, color, dots: true, points: run.evaluations.map((one) => [one.step, one.success]), band: run.evaluations.map((one) => [one.step, one.low, one.high]) })));
    practice.set(shown().map(([run, color]) => {
      const known = run.course.filter((one) => one.alone.episodes);
      return { name: run.name, color, points: known.map((one) => [one.step, one.alone.rate]), band: known.map((one) => [one.step, one.alone.low, one.alone.high]) };
    }));
    cards.practice.hidden = !data.runs.some((run) => run.course.length);
    drawMetric();
  }

  function drawMetric() {
    const name = selected.value;
    cards.metric.hidden = !name;
    if (!name) return;
    const { title, unit, meaning } = metricName(name), updates = shown().every(([run]) => IMITATION.has(run.kind));
    if (!small.has(name)) small.set(name, new Chart({ height: 230, label: title, yLabel: unit, xLabel: "", legend: false }));
    selected.title = meaning;
    if (metrics.firstChild !== small.get(name).node) fill(metrics, small.get(name).node);
    small.get(name).set(shown().map(([run, color]) => ({ name: run.name, color, points: (run.train.values[name] ?? []).map((value, at) => [(updates ? run.train.update : run.train.step)[at], value]) })), { xLabel: updates ? "updates" : "environment steps" });
  }

  function drawConfig() {
    const rows = data.config.filter((row) => !only.checked || row.differs);
    const shared = rows.filter((row) => !row.values.includes(MISSING)), others = rows.filter((row) => row.values.includes(MISSING));
    const wasOpen = table.querySelector("details")?.open ?? false;
    const same = data.runs.length > 1 ? "The options that all of them have are the same." : "There is only one run; untick the box to see its whole config.";
    const rest = h("details", {}, h("summary", {}, `${plural(others.length, "option")} that not all of these runs have`), listed(others));
    rest.open = wasOpen;
    fill(table, shared.length ? listed(shared) : h("p", { class: "soft" }, same), others.length ? rest : null);
  }

  const listed = (rows) => h("table", { class: "config" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "option"), data.runs.map((run, at) => h("th", { scope: "col" }, name(run, at))))),
    h("tbody", {}, rows.map((row) => h("tr", { class: row.differs ? "differs" : "" }, h("td", {}, h("code", {}, row.name)), row.values.map((value) => h("td", {}, text(value)))))));

  const name = (run, at) => h("span", { class: "key", vars: { "--c": COLORS[at % 6] } }, h("i", {}), run.name);

  function drawScores() {
    const last = data.runs.map((run, at) => [run, at, run.evaluations.at(-1)]).filter(([, , one]) => one);
    fill(scores, last.length ? h("table", { class: "prints" }, h("thead", {}, h("tr", {}, ["run", "last evaluation", "success", "95 % interval", "episodes", "starts", "how"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, last.map(([run, at, one]) => h("tr", {}, h("td", {}, name(run, at)), h("td", { class: "num" }, `at step ${count(one.step)}`), h("td", { class: "num" }, h("b", {}, percent(one.success))), h("td", { class: "num" }, `${percent(one.low)} to ${percent(one.high)}`),
        h("td", { class: "num" }, short(one.episodes)), h("td", { class: "num" }, short(one.starts)), h("td", { title: one.meaning ?? null }, protocolText(one)))))) : h("p", { class: "soft" }, "No evaluation yet."));
    const rows = data.runs.flatMap((run, at) => run.evaluations.slice(-3).reverse().map((one) => [run, at, one]));
    cards.prints.hidden = !rows.length;
    fill(prints, h("table", { class: "prints" }, h("thead", {}, h("tr", {}, ["run", "at", ...FACTS.map(([title]) => title), "versions"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows.map(([run, at, one]) => h("tr", {}, h("td", {}, name(run, at)), h("td", { class: "num" }, plural(one.step, "step")),
        FACTS.map(([, fact]) => h("td", {}, h("code", {}, one.fingerprint?.[fact] ?? NONE))), h("td", {}, h("code", {}, Object.entries(one.fingerprint?.versions ?? {}).map((pair) => pair.join(" ")).join(", "))))))));
  }

  await draw();
  return { update: throttle(2000, draw) };
}

const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
