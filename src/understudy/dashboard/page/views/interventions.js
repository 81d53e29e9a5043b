// Interventions: when a human took over, who, why, and with which latency.

import { get } from "../api.js";
import { Chart, intervalBar, practiceCurves } from "../chart.js";
import { card, empty, fill, h, throttle, tile } from "../dom.js";
import { clock, count, IMITATION, isScript, NONE, ON_POLICY, percent, plural, short } from "../format.js";

export async function open(page, { target }) {
  const tiles = h("dl", { class: "tiles" }), none = h("div", {});
  const share = { yMin: 0, yMax: 1, y: (v) => percent(v), height: 200, xLabel: "environment steps" };
  const rate = new Chart({ ...share, label: "Intervention rate", yLabel: "practice steps by an operator" });
  const success = new Chart({ ...share, label: "Success of practice", yLabel: "episodes that succeed" });
  const number = new Chart({ yMin: 0, height: 180, label: "Takeovers", yLabel: "takeovers", xLabel: "environment steps" });
  let limits = [];
  const latency = new Chart({ yMin: 0, height: 180, label: "Takeover latency", yLabel: "episodes", xLabel: "latency, up to this many milliseconds", x: (at) => (at < limits.length ? String(limits[at]) : "more") });
  const operators = h("div", {}), reasons = h("div", {}), newest = h("div", {});
  const takeovers = card("Takeovers", { note: "by part of training" }, number.node);
  const latencies = card("Latency", { note: "from the operator's input to its execution, the worst of each episode" }, latency.node);
  const body = h("div", { class: "cards" },
    card("Intervention rate", {}, rate.node),
    card("Success of practice", { note: "of all episodes of practice" }, success.node),
    takeovers, latencies,
    card("By operator", {}, operators), card("By reason", {}, reasons),
    card("Latest interventions", { wide: true }, newest));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Interventions")), tiles, none, body);

  async function draw() {
    const data = await get(`${target}/interventions`);
    const total = data.total?.[0];
    body.hidden = tiles.hidden = !total;
    const why = ON_POLICY.has(data.kind) ? "the policy acts without an operator" : IMITATION.has(data.kind) ? "there are no rollouts: it learns from demonstrations" : null;
    fill(none, total ? null : why ? empty("This kind of run has no interventions", `In a run of ${data.kind}, ${why}.`) : empty("No interventions yet", data.absent || !data.course?.length
      ? "The store has no practice. Start a run in which an operator can intervene:" : "The policy chose every action so far. To intervene while it practises:",
      h("pre", {}, "understudy actor RUN HOST:PORT --human browser\nunderstudy train rlpd RUN --intervention.source script")));
    if (!total) return;
    const scripted = isScript(data.operators.map((one) => one.name)); // which takes over at once
    latencies.hidden = scripted;
    takeovers.classList.toggle("wide", scripted);
    const practice = data.course.reduce((sum, one) => ({ steps: sum.steps + one.steps, human: sum.human + one.human_steps, episodes: sum.episodes + one.episodes }), { steps: 0, human: 0, episodes: 0 });
    fill(tiles,
      tile("takeovers", count(total.takeovers), `in ${plural(total.episodes, "episode")} of ${count(practice.episodes)}`),
      tile("intervention rate", percent(data.recent.human_steps / Math.max(data.recent.steps, 1)), `last ${plural(data.recent.episodes, "episode")}`, "human"),
      tile("mean rate", percent(practice.human / Math.max(practice.steps, 1)), `of all ${count(practice.steps)} steps`),
      tile("success with intervention", percent(total.score.rate), `${percent(total.score.low)} to ${percent(total.score.high)}, of ${plural(total.score.episodes, "episode")}`),
      scripted ? null : tile("median latency", data.latency.p50 === null ? NONE : `${short(data.latency.p50)} ms`, data.latency.p99 === null ? "not measured" : `90 % below ${short(data.latency.p90)} ms, 99 % below ${short(data.latency.p99)} ms`));
    rate.set([{ name: "intervention rate", color: "var(--human)", points: data.course.map((one) => [one.step, one.steps ? one.human_steps / one.steps : null]) }], { yLabel: `practice steps by ${scripted ? "the script" : "a human"}` });
    success.set(practiceCurves(data.course));
    number.set([{ name: "takeovers", color: "var(--human)", bars: true, points: data.course.map((one) => [one.step, one.takeovers]), starts: data.course.map((one) => one.step - one.steps) }]);
    limits = data.histogram.limits;
    latency.set([{ name: "episodes", color: "var(--accent)", bars: true, points: data.histogram.counts.map((value, at) => [at, value]) }]);
    fill(operators, table(data.operators, "operator", total));
    fill(reasons, table(data.reasons, "reason", total));
    fill(newest, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["episode", "when", "operator", "takeovers", "steps by the operator", scripted ? null : "latency", "reason", "outcome"].filter(Boolean).map((name) => h("th", {}, name)))),
      h("tbody", {}, data.newest.map((one) => h("tr", {}, h("td", {}, h("a", { href: `#/${target}/episode/${one.id}` }, `#${one.id}`)), h("td", {}, clock(one.begun_s)), h("td", {}, one.operator ?? NONE),
        h("td", { class: "num" }, count(one.takeovers)), h("td", { class: "num" }, `${count(one.num_human)} of ${count(one.num_steps)}`), scripted ? null : h("td", { class: "num" }, one.latency_ms === null ? NONE : `${short(one.latency_ms)} ms`),
        h("td", {}, one.reasons ?? NONE), h("td", { class: one.success ? "good" : one.success === 0 ? "bad" : "soft" }, one.success ? "success" : one.success === 0 ? "failure" : NONE)))))));
  }

  await draw();
  return { update: throttle(2000, draw) };
}

function table(rows, name, total) {
  return h("table", { class: "bars" }, h("thead", {}, h("tr", {}, [name, "", "takeovers", "success, 0 to 100 %"].map((one) => h("th", {}, one)))), h("tbody", {}, rows.map((row) => h("tr", {},
    h("td", {}, row.name ?? `no ${name}`), h("td", { class: "meter" }, h("i", { style: { width: `${100 * row.takeovers / Math.max(total.takeovers, 1)}%`, background: "var(--human)" } })),
    h("td", { class: "num" }, count(row.takeovers)), h("td", { class: "narrow" }, intervalBar(row.score, "var(--policy)"))))));
}
