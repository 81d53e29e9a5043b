// Overview: is it working, and is it getting better?

import { get } from "./api.js";
import { Chart, intervalBar, stack } from "./chart.js";
import { card, empty, fill, h, seldom, tile } from "./dom.js";
import { ago, chosen, count, IMITATION, NONE, ON_POLICY, percent, plural, short, span } from "./format.js";

const HIDDEN = new Set(["demo_steps", "online_steps", "updates_per_s", "demo_share", "demo_share_wanted", "batch", "steps_per_s", "cpu_s", "bytes_moved", "episodes", "lived", "groups", "carried", "waves"]);
const REASONS = { "too easy": "var(--random)", "too hard": "var(--human)", "failed workers": "var(--bad)", "too old": "var(--soft)", truncated: "var(--script)", "out of bounds": "var(--run-5)" };

export async function open(page, { place, info }) {
  const head = h("div", { class: "head" }), alarms = h("div", { class: "alarms" }), tiles = h("dl", { class: "tiles" });
  const scores = h("div", { class: "scores" });
  const success = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), label: "Success over training", height: 230 });
  const hands = new Chart({ yMin: 0, yMax: 1, y: (v) => percent(v), label: "Share of steps by a human", height: 170 });
  const speed = new Chart({ yMin: 0, label: "Throughput", height: 170 });
  const groups = new Chart({ yMin: 0, label: "Groups of an iteration, kept and dropped", height: 170 }), sum = h("div", {});
  const latest = h("div", { class: "latest" });
  const metrics = h("div", { class: "multiples" });
  const small = new Map();
  const speedNote = h("span", {}), cards = {
    success: card("Success", { note: "with 95 % intervals", wide: true }, h("div", { class: "split" }, scores, success.node)),
    hands: card("Intervention rate", { note: "share of practice steps by a human" }, hands.node),
    groups: card("Groups", { note: "of an iteration: learned from, or dropped and why" }, groups.node, sum),
    speed: card("Throughput", { note: speedNote }, speed.node),
    latest: card("Latest episodes", { wide: true, tools: h("a", { class: "more", href: `#/${place}/episodes` }, "All episodes") }, latest),
    learning: card("Learning", { note: "what the algorithm reports", wide: true }, metrics),
  };
  const body = h("div", { class: "cards" }, Object.values(cards));
  const nothing = h("div", {});
  fill(page, head, alarms, tiles, nothing, body);

  async function draw() {
    const said = await get(`${place}/overview`);
    const there = said.run || said.store;
    fill(nothing, there ? null : empty("Nothing is here yet", `${info.path} is neither a run nor a store so far. It is shown as soon as it is.`,
      h("pre", {}, `understudy record ${info.path}/store --env 'toy:press_button?cameras=false&state=task' --successes 5\nunderstudy train rlpd ${info.path}`)));
    for (const node of [tiles, body]) node.hidden = !there;
    fill(head, ...heading(info, said));
    fill(alarms, said.alarms.map((one) => h("a", { class: `alarm ${one.level}`, href: `#/${place}/${one.view}` }, h("b", {}, one.what), h("span", {}, one.detail))),
      said.pending ? h("a", { class: "alarm note", href: `#/${place}/episodes?deleted=all` }, h("b", {}, `${plural(said.pending, "change")} waiting`), h("span", {}, "the process that writes the store applies them with its next commit")) : null);
    if (!there) return;
    fill(tiles, ...numbers(said));
    fill(scores, ...scoreRows(said));
    success.set(successCurves(said));
    hands.set([{ name: "by a human", color: "var(--human)", points: said.course.map((one) => [one.step, one.steps ? one.human_steps / one.steps : null]) }]);
    const train = said.metrics.curves.train;
    const groupwise = onPolicy(said), rate = groupwise ? "steps_per_s" : "updates_per_s";
    speed.set([{ name: "a second", color: "var(--accent)", points: pair(train, rate) }]);
    fill(speedNote, groupwise ? "environment steps a second, while it collects" : "updates a second");
    drawGroups(said);
    drawMetrics(train, imitates(said) ? "update" : "step");
    success.node.hidden = imitates(said) && !said.metrics.evaluations.length;
    cards.hands.hidden = groupwise || imitates(said);
    cards.groups.hidden = !groupwise;
    cards.speed.hidden = !train?.values[rate];
    cards.learning.hidden = !train;
    cards.latest.hidden = imitates(said) && !said.totals?.episodes;
    await drawLatest(said);
  }

  function drawGroups(said) {
    const curve = said.metrics.curves.collection, { kept, dropped } = said.metrics.practice;
    const reasons = Object.keys(dropped), color = (name) => REASONS[name] ?? "var(--soft)";
    groups.set([{ name: "kept", color: "var(--good)", points: pair(curve, "kept") },
      ...reasons.map((name) => ({ name, color: color(name), dash: true, points: pair(curve, `dropped ${name}`).map(([x, y]) => [x, y ?? 0]) }))]);
    fill(sum, kept || reasons.length ? stack([["kept", kept, "var(--good)"], ...reasons.map((name) => [name, dropped[name], color(name)])], { legend: true, format: count }) : null);
  }

  function drawMetrics(train, against) {
    for (const name of Object.keys(train?.values ?? {})) {
      if (HIDDEN.has(name)) continue;
      if (!small.has(name)) {
        const chart = new Chart({ height: 104, label: name });
        small.set(name, chart);
        metrics.append(h("figure", {}, h("figcaption", {}, name.replaceAll("_", " ")), chart.node));
      }
      small.get(name).set([{ name, color: "var(--accent)", points: pair(train, name, against) }]);
    }
  }

  async function drawLatest(said) {
    if (!said.store) return fill(latest, h("p", { class: "soft" }, "No store yet."));
    const { rows, store } = await get(`${place}/episodes?limit=12`);
    fill(latest, rows.length ? rows.map((row) => h("a", { href: `#/${place}/episode/${row.id}`, class: "mini" },
      row.cameras.length && row.num_rows ? h("img", { src: `api/${place}/thumb/${row.id}?v=${store}-${row.num_rows}`, alt: "", loading: "lazy" }) : h("div", { class: "nopic" }, `#${row.id}`),
      h("span", { class: row.success === true ? "good" : row.success === false ? "bad" : "soft" }, row.state === "open" ? "now" : row.success === true ? "success" : row.success === false ? "failure" : "–"),
      h("small", {}, plural(row.num_steps, onPolicy(said) ? "block" : "step")))) : h("p", { class: "soft" }, "No episodes yet."));
  }

  await draw();
  const again = seldom(1000, () => draw().catch(() => {}));
  return { update: again };
}

function pair(curves, name, against = "step") {
  return (curves?.values[name] ?? []).map((value, at) => [curves[against][at], value]);
}

const onPolicy = (said) => ON_POLICY.has(said.config?.kind);
const imitates = (said) => IMITATION.has(said.config?.kind);

// How far it is, of how much, in what: steps, updates or iterations.
function far(said) {
  const config = said.config?.config, last = said.metrics.last;
  if (onPolicy(said)) return [said.metrics.practice.iterations, config.iterations, "iterations"];
  if (imitates(said)) return [last.train?.update ?? 0, config.updates, "updates"];
  return [Math.max(last.train?.step ?? 0, last.episode?.step ?? 0, last.evaluation?.step ?? 0), config?.steps, "steps"];
}

function heading(info, said) {
  const config = said.config?.config, [step, steps, unit] = far(said);
  const [state, text] = status(said, steps && step >= steps);
  const pages = said.roles.filter((role) => role.page && role.state === "running");
  return [
    h("div", { class: "title" }, h("h1", {}, info.name), h("span", { class: `pill ${state}` }, text),
      pages.map((role) => h("a", { class: "pill link", href: role.page, target: "_blank", rel: "noreferrer" }, `Drive ${role.name}`))),
    h("p", { class: "soft" }, [said.config?.kind, config?.env].filter(Boolean).join(" · ") || info.path),
    steps ? h("div", { class: "progress", title: `${count(step)} of ${count(steps)} ${unit}` }, h("i", { style: { width: `${Math.min(100, 100 * step / steps)}%` } })) : null,
  ];
}

function status(said, finished) {
  const states = said.roles.map((role) => role.state);
  if (said.cluster && said.cluster !== "ended") states.push(said.cluster); // the driver of many machines
  const bad = ["failed", "gone", "stuck", "silent"].find((state) => states.includes(state));
  if (bad) return ["bad", { failed: "failed", gone: "killed", stuck: "stuck", silent: "no heartbeat" }[bad]];
  if (states.includes("running")) return ["good", said.roles.find((role) => role.state === "running" && role.role !== "server")?.doing ?? (said.cluster ? "running on a cluster" : "running")];
  if (said.totals?.being_written) return ["good", "being written"];
  if (finished) return ["calm", "finished"];
  return ["calm", said.run ? "at rest" : said.store ? "at rest" : "not there yet"];
}

function numbers(said) {
  const running = said.roles.filter((role) => role.state === "running");
  const total = (name) => running.map((role) => role[name]).filter((value) => value !== null && value !== undefined).reduce((sum, value) => sum + value, null);
  const stepsPerS = said.totals?.being_written ? said.totals.rate.rows_per_s : null; // what became durable, whoever acted
  const updatesPerS = total("updates_per_s") ?? null;
  const practice = said.course.reduce((sum, one) => ({ steps: sum.steps + one.steps, human: sum.human + one.human_steps }), { steps: 0, human: 0 });
  const last = said.metrics.last.train;
  const steps = said.config?.config?.steps;
  if (onPolicy(said)) return iterations(said);
  if (imitates(said)) return [tile("updates", count(last?.update ?? 0), `of ${count(said.config.config.updates)}`), tile("demonstrations", count(last?.step ?? 0), "steps to begin a block with")];
  return [
    tile("practice", count(practice.steps), steps ? `of ${count(steps)} steps` : "steps"),
    last ? tile("updates", count(last.update), updatesPerS ? `${short(updatesPerS)} a second now` : last.updates_per_s ? `${short(last.updates_per_s)} a second` : "") : null,
    tile("steps a second", stepsPerS === null ? NONE : short(stepsPerS), stepsPerS === null ? "nobody acts now" : "now"),
    tile("episodes", count(said.totals?.episodes ?? 0), said.totals ? `last ${ago(said.totals.rate.last_commit_s)}` : ""),
    tile("by a human", practice.steps ? percent(practice.human / practice.steps) : NONE, "of practice steps", practice.human ? "human" : ""),
    eta(said, practice.steps, steps, stepsPerS),
  ].filter(Boolean);
}

function iterations(said) {
  const { metrics } = said, [iteration, whole] = far(said), last = metrics.last.train, { kept, dropped } = metrics.practice;
  const lost = Object.values(dropped).reduce((sum, number) => sum + number, 0);
  const lived = metrics.practice.tasks.reduce((sum, task) => sum + task.all.episodes, 0);
  const took = last ? last.collect_s + last.learn_s : null;
  return [
    tile("iterations", count(iteration), `of ${count(whole)}${last ? `; ${count(last.update)} updates` : ""}`),
    tile("practice", count(metrics.last.episode?.step ?? 0), "environment steps"),
    tile("episodes", count(lived), said.totals ? `last ${ago(said.totals.rate.last_commit_s)}` : ""),
    tile("groups kept", count(kept), `${count(lost)} dropped`),
    last ? tile("an iteration takes", span(took), `${percent(last.collect_s / took)} of it collecting`) : null,
    last && iteration < whole && said.roles.some((role) => role.state === "running") ? tile("left", span((whole - iteration) * took), "without evaluations") : null,
  ].filter(Boolean);
}

function eta(said, done, steps, rate) {
  if (!steps || !rate || done >= steps) return null;
  return tile("left", span((steps - done) / rate), `${percent(done / steps)} done`);
}

function scoreRows(said) {
  const last = said.metrics.evaluations.at(-1);
  const several = said.scores.length > 1, note = `policy alone, ${chosen(last)}`;
  const rows = said.scores.map((score) => row(score.task ?? "all tasks", several ? "policy alone" : note, score, "var(--accent)", !several));
  if (several) rows.unshift(row("all tasks", note, { episodes: last.episodes, successes: Math.round(last.success * last.episodes), rate: last.success, low: last.low, high: last.high }, "var(--accent)", true));
  if (!rows.length) rows.push(h("p", { class: "soft" }, imitates(said) ? "No evaluation yet: `understudy evaluate` plays held-out episodes with the policy." : said.run ? "No evaluation yet: the curve shows practice." : "A store has no evaluations; this is what was recorded."));
  else rows.unshift(h("p", { class: "soft", title: last.meaning ?? null }, `evaluated ${onPolicy(said) ? `after ${plural(last.iteration, "iteration")}` : `at step ${count(last.step)}`}, ${plural(last.episodes, "episode")}`));
  if (onPolicy(said)) {
    const { tasks, recent } = said.metrics.practice;
    return [...rows, ...tasks.slice(0, 12).map((task) => row(task.task, `practice, all of the last ${plural(recent, "iteration")}`, task.recent, "var(--policy)"))];
  }
  for (const task of said.tasks.slice(0, 12)) {
    const recent = task.recent.episodes < task.all.episodes ? `last ${task.recent.episodes} of ${count(task.episodes)}` : plural(task.episodes, "episode");
    rows.push(row(task.task ?? "no task", `${task.demonstration ? "demonstrations" : "practice, helped or not"}, ${recent}`, task.recent, task.demonstration ? "var(--script)" : "var(--policy)"));
  }
  return rows;
}

function row(name, note, score, color, big) {
  return h("div", { class: big ? "score big" : "score" }, h("div", {}, h("b", {}, name), h("small", {}, note)),
    h("strong", {}, score.episodes ? percent(score.rate) : NONE), intervalBar(score, color),
    h("small", { class: "ends" }, score.episodes ? `${percent(score.low)} to ${percent(score.high)}` : "not judged"));
}

function successCurves(said) {
  const found = [];
  const evaluations = said.metrics.evaluations;
  if (evaluations.length) {
    found.push({ name: "policy alone", color: "var(--accent)", dots: true, points: evaluations.map((one) => [one.step, one.success]), band: evaluations.map((one) => [one.step, one.low, one.high]) });
  }
  const lived = onPolicy(said) ? pair(said.metrics.curves.collection, "success") : said.course.map((one) => [one.step, one.score.rate]);
  if (!imitates(said)) found.push({ name: "practice", color: "var(--policy)", dash: true, always: true, points: lived });
  return found;
}
