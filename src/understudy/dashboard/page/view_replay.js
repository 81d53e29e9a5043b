// Replay: what is learned from, in which shares, how old it is, and that every row is there exactly once.

import { get } from "./api.js";
import { Chart, stack } from "./chart.js";
import { card, empty, fill, h, seldom, tile } from "./dom.js";
import { bytes, count, ON_POLICY, percent, plural, short } from "./format.js";

const KINDS = { demonstration: "var(--script)", practice: "var(--policy)", correction: "var(--human)" };
const COLORS = ["var(--accent)", "var(--script)", "var(--human)", "var(--random)", "var(--policy)", "var(--good)"];

export async function open(page, { place, info }) {
  const tiles = h("dl", { class: "tiles" }), none = h("div", {}), inside = h("div", { class: "groups" }), sound = h("dl", { class: "tiles plain" });
  const unit = h("span", {}), mixture = h("div", {}), share = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), height: 150, label: "Share of demonstrations" });
  const ages = h("div", { class: "hist" }), lag = new Chart({ yMin: 0, height: 150, label: "Policy lag" }), reuse = new Chart({ yMin: 0, height: 150, label: "Reuse" });
  const learned = [card("Mixture", { note: "demonstrations in what was drawn" }, mixture, share.node),
    card("Policy lag", { note: "versions between the policy that acts and the one that chose a sample" }, lag.node),
    card("Reuse", { note: "samples drawn for each step there is" }, reuse.node)];
  const body = h("div", { class: "cards" }, card("What is in it", { note: unit, wide: true }, inside), ...learned,
    card("Age", { note: "steps by when their episode began" }, ages), card("Every row once", { note: "counted in the catalog and by the writers", wide: true }, sound));
  fill(page, h("div", { class: "head" }, h("h1", {}, "Replay")), tiles, none, body);

  async function draw() {
    const said = await get(`${place}/replay`);
    body.hidden = tiles.hidden = Boolean(said.absent);
    fill(none, said.absent ? empty("There is no store yet", `It will be at ${info.path}/store. Record demonstrations, or start a run:`, h("pre", {}, `understudy record ${info.path}/store --env toy:pick_red --successes 5`)) : null);
    if (said.absent) return;
    const { totals, groups } = said;
    fill(unit, ON_POLICY.has(said.config?.kind) ? "blocks; every episode that was lived, those of dropped groups too" : "steps");
    fill(tiles, tile("episodes", count(totals.episodes), totals.deleted.episodes ? `and ${count(totals.deleted.episodes)} deleted` : ""),
      ON_POLICY.has(said.config?.kind) ? tile("blocks", count(totals.steps), "a row each, of several steps") : tile("steps", count(totals.steps), `${count(totals.human_steps)} by a human`), tile("commit", count(totals.commit), totals.being_written ? "being written now" : "at rest"),
      tile("on disk", bytes(totals.disk_bytes), totals.deleted.bytes ? `${bytes(totals.deleted.bytes)} of deleted episodes` : ""),
      tile("disk free", bytes(said.disk.free), `of ${bytes(said.disk.size)}`, said.disk.free < Math.min(0.05 * said.disk.size, 1e10) ? "bad" : ""));
    fill(inside, ["kind", "source", "task", "operator", "actor"].map((name) => group(name, groups)));
    drawLearned(said);
    const most = Math.max(...groups.ages.map((one) => one.practice + one.demonstration), 1);
    fill(ages, groups.ages.map((one) => h("div", {}, h("span", {}, one.name), h("div", { class: "meter" },
      h("i", { style: { width: `${100 * one.practice / most}%`, background: "var(--policy)" } }), h("i", { style: { width: `${100 * one.demonstration / most}%`, background: "var(--script)" } })), h("b", {}, short(one.practice + one.demonstration)))));
    const dropped = said.roles.reduce((sum, role) => sum + (role.delivery?.dropped ?? 0), 0);
    const repeated = said.roles.flatMap((role) => role.writers ?? []).reduce((sum, writer) => sum + (writer.repeated ?? 0), 0);
    fill(sound, tile("lost rows", count(groups.lost), "in the catalog's count", groups.lost ? "bad" : "good"), tile("duplicates", count(groups.duplicates), "rows placed twice", groups.duplicates ? "bad" : "good"),
      tile("dropped", count(dropped), "by full queues of actors", dropped ? "bad" : "good"), tile("came twice", count(repeated), "chunks sent again, stored once"), tile("cut", count(groups.cut), "episodes that ended early"));
  }

  function drawLearned(said) {
    const train = said.train;
    const has = (name) => Boolean(train?.values[name]);
    learned[0].hidden = !has("demo_share");
    learned[1].hidden = !has("lag_mean");
    learned[2].hidden = !has("reuse");
    if (!train) return;
    const pair = (name) => (train.values[name] ?? []).map((value, at) => [train.step[at], value]);
    fill(mixture, h("dl", { class: "tiles plain" }, tile("wanted", percent(said.last?.demo_share_wanted), "demonstrations"), tile("drawn", percent(said.last?.demo_share), "since the last report")));
    share.set([{ name: "drawn", color: "var(--accent)", points: pair("demo_share") }, { name: "wanted", color: "var(--soft)", dash: true, points: pair("demo_share_wanted") }]);
    lag.set([{ name: "mean", color: "var(--accent)", points: pair("lag_mean") }, { name: "oldest", color: "var(--policy)", dash: true, points: pair("lag_max") }]);
    reuse.set([{ name: "samples a step", color: "var(--accent)", points: pair("reuse") }]);
  }

  await draw();
  return { update: seldom(2000, () => draw().catch(() => {})) };
}

function group(name, groups) {
  const parts = name === "source"
    ? Object.entries(groups.source).map(([who, steps]) => [who, steps, `var(--${who})`])
    : groups[name].map((one, at) => [one.name ?? `no ${name}`, one.steps, name === "kind" ? KINDS[one.name] : COLORS[at % COLORS.length]]);
  const detail = name === "source" ? "who chose the action" : `${plural(groups[name].length, name)}`;
  return h("div", { class: "group" }, h("div", { class: "name" }, h("b", {}, name === "source" ? "chosen by" : name), h("small", {}, detail)), stack(parts.slice(0, 12), { legend: true, format: short }));
}
