// Interventions: when people took over, who, why, and how fast they were obeyed.

import { get } from "./api.js";
import { Chart, intervalBar } from "./chart.js";
import { card, empty, fill, h, seldom, tile } from "./dom.js";
import { clock, count, IMITATION, NONE, ON_POLICY, percent, plural, short } from "./format.js";

export async function open(page, { place }) {
  const tiles = h("dl", { class: "tiles" }), none = h("div", {});
  const rate = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), height: 190, label: "Intervention rate" });
  let course = [];
  const number = new Chart({ yMin: 0, height: 150, label: "Takeovers", x: (at) => (course[at] ? short(course[at].step) : "") });
  const latency = new Chart({ yMin: 0, height: 150, label: "Takeover latency", x: () => "" });
  const operators = h("div", {}), reasons = h("div", {}), newest = h("div", {}), scale = h("div", { class: "scale" });
  const body = h("div", { class: "cards" },
    card("Over training", { note: "share of practice steps by a human, and success", wide: true }, rate.node),
    card("Takeovers", { note: "in each part of training" }, number.node),
    card("Latency", { note: "from a person's act to its execution, worst of an episode" }, latency.node, scale),
    card("By operator", {}, operators), card("By reason", {}, reasons),
    card("Newest", { wide: true }, newest));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Interventions")), tiles, none, body);

  async function draw() {
    const said = await get(`${place}/interventions`);
    const total = said.total?.[0];
    body.hidden = tiles.hidden = !total;
    const alone = ON_POLICY.has(said.kind) ? "a policy rehearses alone: its own successes and failures are compared" : IMITATION.has(said.kind) ? "nobody acts: demonstrations are imitated" : null;
    fill(none, total ? null : alone ? empty("Nobody takes over here", `In a run of ${said.kind}, ${alone}.`) : empty("Nobody has taken over yet", said.absent || !said.course?.length
      ? "There is no practice in the store. Start a run, and let a person help:" : "All practice so far was the policy's own. To help it while it practises:",
      h("pre", {}, "understudy actor RUN --human browser      # drive from a page\nunderstudy train rlpd RUN --human.by script   # a script stands in for a person")));
    if (!total) return;
    course = said.course;
    const practice = said.course.reduce((sum, one) => ({ steps: sum.steps + one.steps, human: sum.human + one.human_steps, episodes: sum.episodes + one.episodes }), { steps: 0, human: 0, episodes: 0 });
    const half = said.course.slice(Math.floor(said.course.length / 2));
    const late = half.reduce((sum, one) => sum + one.human_steps, 0) / Math.max(half.reduce((sum, one) => sum + one.steps, 0), 1);
    fill(tiles,
      tile("takeovers", count(total.takeovers), `in ${plural(total.episodes, "episode")} of ${count(practice.episodes)}`),
      tile("by a human", percent(practice.human / Math.max(practice.steps, 1)), `of ${count(practice.steps)} steps`, "human"),
      tile("lately", percent(late), "in the second half"),
      tile("then succeeded", percent(total.score.rate), `${percent(total.score.low)} to ${percent(total.score.high)}`),
      tile("latency", said.latency.p50 === null ? NONE : `${short(said.latency.p50)} ms`, said.latency.p99 === null ? "not measured" : `p90 ${short(said.latency.p90)}, p99 ${short(said.latency.p99)} ms`));
    rate.set([
      { name: "by a human", color: "var(--human)", points: said.course.map((one) => [one.step, one.steps ? one.human_steps / one.steps : null]) },
      { name: "success", color: "var(--policy)", dash: true, points: said.course.map((one) => [one.step, one.score.rate]) }]);
    number.set([{ name: "takeovers", color: "var(--human)", bars: true, points: course.map((one, at) => [at, one.takeovers]) }]);
    latency.set([{ name: "episodes", color: "var(--accent)", bars: true, points: said.histogram.counts.map((value, at) => [at, value]) }]);
    fill(scale, [...said.histogram.limits.map((limit) => `≤ ${limit}`), "more"].map((text) => h("span", {}, text)), h("em", {}, "ms"));
    fill(operators, table(said.operators, "operator", total));
    fill(reasons, table(said.reasons, "reason", total));
    fill(newest, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["episode", "when", "operator", "takeovers", "human steps", "latency", "reason", "outcome"].map((name) => h("th", {}, name)))),
      h("tbody", {}, said.newest.map((one) => h("tr", {}, h("td", {}, h("a", { href: `#/${place}/episode/${one.id}` }, `#${one.id}`)), h("td", {}, clock(one.begun_s)), h("td", {}, one.operator ?? NONE),
        h("td", { class: "num" }, count(one.takeovers)), h("td", { class: "num" }, `${count(one.num_human)} of ${count(one.num_steps)}`), h("td", { class: "num" }, one.latency_ms === null ? NONE : `${short(one.latency_ms)} ms`),
        h("td", {}, one.reasons ?? NONE), h("td", { class: one.success ? "good" : one.success === 0 ? "bad" : "soft" }, one.success ? "success" : one.success === 0 ? "failure" : NONE)))))));
  }

  await draw();
  return { update: seldom(2000, () => draw().catch(() => {})) };
}

function table(rows, name, total) {
  return h("table", { class: "bars" }, h("tbody", {}, rows.map((row) => h("tr", {},
    h("td", {}, row.name ?? `no ${name}`), h("td", { class: "meter" }, h("i", { style: { width: `${100 * row.takeovers / Math.max(total.takeovers, 1)}%`, background: "var(--human)" } })),
    h("td", { class: "num" }, count(row.takeovers)), h("td", { class: "narrow" }, intervalBar(row.score, "var(--policy)"))))));
}
