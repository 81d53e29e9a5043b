// Replay: the contents of the store, what was sampled from it, its age, and its integrity.

import { get } from "../api.js";
import { Chart, stack } from "../chart.js";
import { card, empty, fill, h, throttle, tile } from "../dom.js";
import { bytes, count, isScript, ON_POLICY, percent, plural, short, sourceName } from "../format.js";

const KINDS = { demonstration: "var(--script)", practice: "var(--policy)", correction: "var(--human)" };
const STEPS = "environment steps";
const COLORS = ["var(--accent)", "var(--script)", "var(--human)", "var(--random)", "var(--policy)", "var(--good)"];

export async function open(page, { target, info }) {
  const tiles = h("dl", { class: "tiles" }), none = h("div", {}), inside = h("div", { class: "groups" }), sound = h("dl", { class: "tiles plain" });
  const unit = h("span", {}), mixture = h("div", {}), share = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), height: 180, label: "Share of demonstrations", yLabel: "sampled steps that are demonstrations", xLabel: STEPS });
  const ages = h("div", { class: "hist" }), lag = new Chart({ yMin: 0, height: 180, label: "Policy lag", yLabel: "versions behind the newest policy", xLabel: STEPS }), reuse = new Chart({ yMin: 0, height: 180, label: "Reuse", yLabel: "samples per stored step", xLabel: STEPS });
  const learned = [card("Demonstrations in batches", {}, mixture, share.node),
    card("Policy lag", { note: "how old the policy is that chose the sampled action" }, lag.node),
    card("Reuse", { note: "how often a stored step has been sampled so far" }, reuse.node)];
  const body = h("div", { class: "cards" }, card("Contents", { note: unit, wide: true }, inside), ...learned,
    card("Age", { note: "when the episode of a step began", tools: h("div", { class: "legend" }, [["practice", "policy"], ["demonstrations", "script"]].map(([name, color]) => h("span", { vars: { "--c": `var(--${color})` } }, h("i", {}), name))) }, ages), card("Integrity", { note: "counts of the catalog and the writers", wide: true }, sound));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Replay")), tiles, none, body);

  async function draw() {
    const data = await get(`${target}/replay`);
    body.hidden = tiles.hidden = Boolean(data.absent);
    fill(none, data.absent ? empty("There is no store yet", `It will be at ${info.path}/store. Record demonstrations, or start a run:`, h("pre", {}, `understudy record ${info.path}/store --env toy:pick_red --successes 5`)) : null);
    if (data.absent) return;
    const { totals, groups } = data;
    fill(unit, ON_POLICY.has(data.config?.kind) ? "blocks of actions of all episodes, with those of dropped groups" : "steps");
    fill(tiles, tile("episodes", count(totals.episodes), totals.deleted.episodes ? `and ${count(totals.deleted.episodes)} deleted` : ""),
      ON_POLICY.has(data.config?.kind) ? tile("blocks of actions", count(totals.steps), "one row each") : tile("steps", count(totals.steps), totals.human_steps ? `${count(totals.human_steps)} ${scripted(groups) ? "by the script, in takeovers" : "by a human"}` : ""), tile("commits", count(totals.commit), totals.being_written ? "being written" : "not being written"),
      tile("on disk", bytes(totals.disk_bytes), totals.deleted.bytes ? `${bytes(totals.deleted.bytes)} of deleted episodes` : ""),
      tile("disk free", bytes(data.disk.free), `of ${bytes(data.disk.size)}`, data.disk.free < Math.min(0.05 * data.disk.size, 1e10) ? "bad" : ""));
    fill(inside, ["kind", "source", "task", "operator", "actor"].map((name) => group(name, groups)));
    drawLearned(data);
    const most = Math.max(...groups.ages.map((one) => one.practice + one.demonstration), 1);
    fill(ages, groups.ages.map((one) => h("div", {}, h("span", {}, one.name), h("div", { class: "meter" },
      h("i", { style: { width: `${100 * one.practice / most}%`, background: "var(--policy)" } }), h("i", { style: { width: `${100 * one.demonstration / most}%`, background: "var(--script)" } })), h("b", {}, `${short(one.practice + one.demonstration)} steps`))));
    const dropped = data.processes.reduce((sum, role) => sum + (role.delivery?.dropped ?? 0), 0);
    const repeated = data.processes.flatMap((role) => role.writers ?? []).reduce((sum, writer) => sum + (writer.repeated ?? 0), 0);
    fill(sound, tile("lost rows", count(groups.lost), "in the catalog", groups.lost ? "bad" : "good"), tile("duplicate rows", count(groups.duplicates), "in the catalog", groups.duplicates ? "bad" : "good"),
      tile("dropped steps", count(dropped), "actor queue was full", dropped ? "bad" : "good"), tile("repeated chunks", count(repeated), "sent again, stored once"), tile("cut episodes", count(groups.cut), "ended by a crash"));
  }

  function drawLearned(data) {
    const train = data.train;
    const has = (name) => Boolean(train?.values[name]);
    learned[0].hidden = !has("demo_share");
    learned[1].hidden = !has("lag_mean");
    learned[2].hidden = !has("reuse");
    if (!train) return;
    const pair = (name) => (train.values[name] ?? []).map((value, at) => [train.step[at], value]);
    fill(mixture, h("dl", { class: "tiles plain" }, tile("wanted", percent(data.last?.demo_share_wanted), "demonstrations"), tile("sampled", percent(data.last?.demo_share), "since the last metrics line")));
    share.set([{ name: "sampled", color: "var(--accent)", points: pair("demo_share") }, { name: "wanted", color: "var(--soft)", dash: true, points: pair("demo_share_wanted") }]);
    lag.set([{ name: "mean", color: "var(--accent)", points: pair("lag_mean") }, { name: "oldest", color: "var(--policy)", dash: true, points: pair("lag_max") }]);
    reuse.set([{ name: "samples per step", color: "var(--accent)", points: pair("reuse") }]);
  }

  await draw();
  return { update: throttle(2000, draw) };
}

// Whether only the world's script took over.
const scripted = (groups) => isScript(groups.operator.filter((one) => one.human_steps > 0).map((one) => one.name));

function group(name, groups) {
  const parts = name === "source"
    ? Object.entries(groups.source).map(([who, steps]) => [sourceName(who, scripted(groups) ? "script" : null), steps, `var(--${who})`])
    : groups[name].map((one, at) => [one.name ?? `no ${name}`, one.steps, name === "kind" ? KINDS[one.name] : COLORS[at % COLORS.length]]);
  const detail = name === "source" ? "of the action" : `${plural(groups[name].length, name)}`;
  return h("div", { class: "group" }, h("div", { class: "name" }, h("b", {}, name), h("small", {}, detail)), stack(parts.slice(0, 12), { legend: true, format: short }));
}
