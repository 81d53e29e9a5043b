// Overview: is it working, and is it getting better?

import { get } from "../api.js";
import { Chart, intervalBar, practiceCurves, stack } from "../chart.js";
import { card, empty, fill, h, throttle, tile } from "../dom.js";
import { ago, protocolText, count, helper, IMITATION, NONE, ON_POLICY, percent, plural, short, span } from "../format.js";
import { metricName } from "../metric_names.js";

const HIDDEN = new Set(["demo_steps", "online_steps", "updates_per_s", "demo_share", "demo_share_wanted", "batch_digest", "steps_per_s", "cpu_s", "bytes_moved", "episodes", "rollouts", "groups", "carried", "waves", "iteration"]);
const REASONS = { "too easy": "var(--random)", "too hard": "var(--human)", "failed workers": "var(--bad)", "too old": "var(--soft)", truncated: "var(--script)", "out of bounds": "var(--run-5)" };

export async function open(page, { target, info }) {
  const head = h("div", { class: "head" }), alarms = h("div", { class: "alarms" }), tiles = h("dl", { class: "tiles" });
  const scores = h("div", { class: "scores" });
  const rate = { yMin: 0, yMax: 1, y: (v) => percent(v), xLabel: STEPS };
  const success = new Chart({ ...rate, label: "Success rate", yLabel: "episodes that succeed", height: 300 });
  const interventions = new Chart({ ...rate, label: "Intervention rate", yLabel: "practice steps by an operator", height: 190 });
  const speeds = Object.fromEntries([["updates_per_s", "updates per second"], ["steps_per_s", "environment steps per second"]].map(([name, yLabel]) => [name, new Chart({ yMin: 0, label: "Throughput", yLabel, xLabel: STEPS, height: 190 })]));
  const groups = new Chart({ yMin: 0, label: "Rollout groups of an iteration", yLabel: "groups of an iteration", xLabel: STEPS, height: 190 }), sum = h("div", {});
  const latest = h("div", { class: "latest" });
  const metrics = h("div", { class: "multiples" });
  const small = new Map();
  const speed = h("div", {}), cards = {
    success: card("Success rate", { note: "with 95 % intervals", wide: true }, h("div", { class: "split" }, scores, success.node)),
    interventions: card("Intervention rate", {}, interventions.node),
    groups: card("Rollout groups", { note: "of each iteration: kept, or dropped by reason" }, groups.node, sum),
    speed: card("Throughput", {}, speed),
    latest: card("Latest episodes", { wide: true, tools: h("a", { class: "more", href: `#/${target}/episodes` }, "All episodes") }, latest),
    learning: card("Training metrics", { wide: true }, metrics),
  };
  const body = h("div", { class: "cards" }, Object.values(cards));
  const nothing = h("div", {});
  fill(page, head, alarms, tiles, nothing, body);

  async function draw() {
    const data = await get(`${target}/overview`);
    const there = data.run || data.store;
    fill(nothing, there ? null : empty("Nothing here yet", `${info.path} is not a run or a store yet. This page shows it as soon as it exists.`,
      h("pre", {}, `understudy record ${info.path}/store --env 'toy:press_button?cameras=false&state=task' --successes 5\nunderstudy train rlpd ${info.path}`)));
    for (const node of [tiles, body]) node.hidden = !there;
    fill(head, ...heading(info, data));
    fill(alarms, data.alarms.map((one) => h("a", { class: `alarm ${one.level}`, href: `#/${target}/${one.view}` }, h("b", {}, one.what), h("span", {}, one.detail))),
      data.pending ? h("a", { class: "alarm note", href: `#/${target}/episodes?deleted=all` }, h("b", {}, `${plural(data.pending, "edit")} pending`), h("span", {}, "the process that writes the store applies them with its next commit")) : null);
    if (!there) return;
    fill(tiles, ...numbers(data));
    fill(scores, ...scoreRows(data));
    success.set(successCurves(data));
    interventions.set([{ name: "intervention rate", color: "var(--human)", points: data.course.map((one) => [one.step, one.steps ? one.human_steps / one.steps : null]) }], { yLabel: `practice steps by ${helper(data.operators)}` });
    const train = data.metrics.curves.train;
    const groupwise = onPolicy(data), speedName = groupwise ? "steps_per_s" : "updates_per_s";
    const against = imitates(data) ? "update" : "step";
    speeds[speedName].set([{ name: "per second", color: "var(--accent)", points: pair(train, speedName, against) }], { xLabel: imitates(data) ? UPDATES : STEPS });
    if (speed.firstChild !== speeds[speedName].node) fill(speed, speeds[speedName].node);
    drawGroups(data);
    drawMetrics(train, against);
    success.node.hidden = imitates(data) && !data.metrics.evaluations.length;
    cards.success.hidden = unpractised(data);
    cards.interventions.hidden = unpractised(data) || groupwise || imitates(data);
    cards.groups.hidden = !groupwise;
    cards.speed.hidden = !train?.values[speedName];
    cards.learning.hidden = !train;
    cards.latest.hidden = imitates(data) && !data.totals?.episodes;
    await drawLatest(data);
  }

  function drawGroups(data) {
    const curve = data.metrics.curves.collection, { kept, dropped } = data.metrics.rollout_groups;
    const reasons = Object.keys(dropped), color = (name) => REASONS[name] ?? "var(--soft)";
    groups.set([{ name: "kept", color: "var(--good)", points: pair(curve, "kept") },
      ...reasons.map((name) => ({ name, color: color(name), dash: true, points: pair(curve, `dropped ${name}`).map(([x, y]) => [x, y ?? 0]) }))]);
    fill(sum, kept || reasons.length ? stack([["kept", kept, "var(--good)"], ...reasons.map((name) => [name, dropped[name], color(name)])], { legend: true, format: count }) : null);
  }

  function drawMetrics(train, against) {
    for (const name of Object.keys(train?.values ?? {})) {
      if (HIDDEN.has(name)) continue;
      if (!small.has(name)) {
        const { title, unit, meaning } = metricName(name);
        const chart = new Chart({ height: 132, label: title, yLabel: unit, xLabel: against === "update" ? UPDATES : STEPS });
        small.set(name, chart);
        metrics.append(h("figure", {}, h("figcaption", { title: meaning }, title), chart.node));
      }
      small.get(name).set([{ name: metricName(name).title, color: "var(--accent)", points: pair(train, name, against) }]);
    }
  }

  async function drawLatest(data) {
    if (!data.store) return fill(latest, h("p", { class: "soft" }, "No store yet."));
    const { rows, store } = await get(`${target}/episodes?limit=12`);
    fill(latest, rows.length ? rows.map((row) => h("a", { href: `#/${target}/episode/${row.id}`, class: "mini" },
      row.cameras.length && row.num_rows ? h("img", { src: `api/${target}/thumbnail/${row.id}?v=${store}-${row.num_rows}`, alt: "", loading: "lazy" }) : h("div", { class: "nopic" }, `#${row.id}`),
      h("span", { class: row.success === true ? "good" : row.success === false ? "bad" : "soft" }, row.state === "open" ? "now" : row.success === true ? "success" : row.success === false ? "failure" : "–"),
      h("small", {}, plural(row.num_steps, onPolicy(data) ? "block" : "step")))) : h("p", { class: "soft" }, "No episodes yet."));
  }

  await draw();
  return { update: throttle(1000, draw) };
}

function pair(curves, name, against = "step") {
  return (curves?.values[name] ?? []).map((value, at) => [curves[against][at], value]);
}

const STEPS = "environment steps", UPDATES = "updates";
const onPolicy = (data) => ON_POLICY.has(data.config?.kind);
const unpractised = (data) => !data.run && !data.course.length; // a store of demonstrations, perhaps
const imitates = (data) => IMITATION.has(data.config?.kind);

// The progress, its end, and its unit: steps, updates or iterations.
function progress(data) {
  const config = data.config?.config, last = data.metrics.last;
  if (onPolicy(data)) return [data.metrics.rollout_groups.iterations, config.iterations, "iterations"];
  if (imitates(data)) return [last.train?.update ?? 0, config.updates, "updates"];
  return [Math.max(last.train?.step ?? 0, last.episode?.step ?? 0, last.evaluation?.step ?? 0), config?.steps, "steps"];
}

function heading(info, data) {
  const config = data.config?.config, [step, steps, unit] = progress(data);
  const [state, text] = status(data, steps && step >= steps);
  const pages = data.processes.filter((role) => role.page && role.state === "running");
  return [
    h("div", { class: "title" }, h("h1", {}, info.name), h("span", { class: `pill ${state}` }, text),
      pages.map((role) => h("a", { class: "pill link", href: role.page, target: "_blank", rel: "noreferrer" }, `Drive ${role.name}`))),
    h("p", { class: "soft" }, [data.config?.kind, config?.env].filter(Boolean).join(" · ") || info.path),
    steps ? h("div", { class: "progress", role: "progressbar", "aria-label": "Progress", "aria-valuenow": String(step), "aria-valuemax": String(steps), title: `${count(step)} of ${count(steps)} ${unit}` }, h("i", { style: { width: `${Math.min(100, 100 * step / steps)}%` } })) : null,
  ];
}

function status(data, finished) {
  const states = data.processes.map((role) => role.state);
  if (data.cluster && data.cluster !== "ended") states.push(data.cluster); // the driver of a cluster
  const bad = ["failed", "gone", "stuck", "silent"].find((state) => states.includes(state));
  if (bad) return ["bad", { failed: "failed", gone: "killed", stuck: "stuck", silent: "no heartbeat" }[bad]];
  const busy = data.processes.filter((role) => role.state === "running" && role.role !== "server"); // a server may outlive the run
  if (busy.length) return ["good", (busy.find((role) => role.role !== "actor") ?? busy[0]).doing ?? "running"];
  if (data.cluster === "running") return ["good", "running on a cluster"];
  if (finished) return ["calm", "finished"];
  if (states.includes("running")) return ["calm", "served, not training"];
  if (data.totals?.being_written) return ["good", "being written"];
  return ["calm", data.run ? "stopped" : data.store ? "not being written" : "does not exist yet"];
}

function numbers(data) {
  const running = data.processes.filter((role) => role.state === "running");
  const total = (name) => running.map((role) => role[name]).filter((value) => value !== null && value !== undefined).reduce((sum, value) => sum + value, null);
  const stepsPerS = data.totals?.being_written ? data.totals.rate.rows_per_s : null; // committed steps of all actors
  const updatesPerS = total("updates_per_s") ?? null;
  const practice = data.course.reduce((sum, one) => ({ steps: sum.steps + one.steps, human: sum.human + one.human_steps }), { steps: 0, human: 0 });
  const last = data.metrics.last.train;
  const steps = data.config?.config?.steps;
  if (onPolicy(data)) return iterations(data);
  if (imitates(data)) return [tile("updates", count(last?.update ?? 0), `of ${count(data.config.config.updates)}`), tile("demonstration steps", count(last?.step ?? 0), "to sample from")];
  return [
    unpractised(data) ? tile("steps", count((data.totals?.kinds ?? []).reduce((sum, kind) => sum + kind.steps, 0)), "")
      : tile("environment steps", count(practice.steps), steps ? `of ${count(steps)}` : "of practice"),
    last ? tile("updates", count(last.update), updatesPerS ? `${short(updatesPerS)} per second now` : last.updates_per_s ? `last: ${short(last.updates_per_s)} per second` : "") : null,
    stepsPerS === null ? null : tile("steps per second", short(stepsPerS), "now, of all actors"),
    tile("episodes", count(data.totals?.episodes ?? 0), data.totals ? `last ${ago(data.totals.rate.last_commit_s)}` : ""),
    unpractised(data) ? null : interventionTile(practice, data.recent),
    eta(data, practice.steps, steps, stepsPerS),
  ].filter(Boolean);
}

// How much help the policy needs now; the mean of all practice says how much it has needed.
function interventionTile(practice, recent) {
  const mean = practice.steps ? percent(practice.human / practice.steps) : NONE;
  if (!recent?.steps) return tile("intervention rate", mean, "of practice steps");
  const now = percent(recent.human_steps / recent.steps), last = `last ${plural(recent.episodes, "episode")}`;
  return tile("intervention rate", now, practice.steps > recent.steps ? `${last}; mean ${mean}` : last, practice.human ? "human" : "");
}

function iterations(data) {
  const { metrics } = data, [iteration, whole] = progress(data), last = metrics.last.train, { kept, dropped } = metrics.rollout_groups;
  const lost = Object.values(dropped).reduce((sum, number) => sum + number, 0);
  const rollouts = metrics.rollout_groups.tasks.reduce((sum, task) => sum + task.all.episodes, 0);
  const took = last ? last.collect_s + last.learn_s : null;
  return [
    tile("iterations", count(iteration), `of ${count(whole)}${last ? `; ${count(last.update)} updates` : ""}`),
    tile("environment steps", count(metrics.last.episode?.step ?? 0), "in rollouts"),
    tile("episodes", count(rollouts), data.totals ? `last ${ago(data.totals.rate.last_commit_s)}` : ""),
    tile("groups kept", count(kept), `${count(lost)} dropped`),
    last ? tile("iteration time", span(took), `${percent(last.collect_s / took)} collecting rollouts`) : null,
    last && iteration < whole && data.processes.some((role) => role.state === "running") ? tile("time left", span((whole - iteration) * took), "without evaluations") : null,
  ].filter(Boolean);
}

function eta(data, step, steps, rate) {
  if (!steps || !rate || step >= steps) return null;
  return tile("time left", span((steps - step) / rate), `${percent(step / steps)} finished`);
}

function scoreRows(data) {
  const last = data.metrics.evaluations.at(-1);
  const several = data.scores.length > 1, note = `evaluation, ${protocolText(last)}`;
  const rows = data.scores.map((score) => row(score.task ?? "all tasks", several ? "evaluation" : note, score, "var(--accent)", !several));
  if (several) rows.unshift(row("all tasks", note, { episodes: last.episodes, successes: Math.round(last.success * last.episodes), rate: last.success, low: last.low, high: last.high }, "var(--accent)", true));
  if (!rows.length) rows.push(h("p", { class: "soft" }, imitates(data) ? "No evaluation yet: `understudy evaluate` runs held-out episodes with the policy." : data.run ? "No evaluation yet: the curve shows practice." : "A store has no evaluations; these are the recorded episodes."));
  else rows.unshift(h("p", { class: "soft", title: last.meaning ?? null }, `evaluated ${onPolicy(data) ? `after ${plural(last.iteration, "iteration")}` : `at step ${count(last.step)}`}, ${plural(last.episodes, "episode")}`));
  if (onPolicy(data)) {
    const { tasks, recent } = data.metrics.rollout_groups;
    return [...rows, ...tasks.slice(0, 12).map((task) => row(task.task, `rollouts of the last ${plural(recent, "iteration")}`, task.recent, "var(--policy)"))];
  }
  for (const task of data.tasks.slice(0, 12)) {
    const recent = task.recent.episodes < task.all.episodes ? `last ${task.recent.episodes} of ${plural(task.episodes, "episode")}` : plural(task.episodes, "episode");
    const [what, color] = parts(data.operators)[task.part];
    rows.push(row(task.task ?? "no task", `${what}, ${recent}`, task.recent, color));
  }
  return rows;
}

// Whose success it is: episodes in which somebody intervened say little about the policy.
const parts = (operators) => ({ alone: ["practice that succeeded alone", "var(--policy)"], helped: [`practice that succeeded with an intervention by ${helper(operators)}`, "var(--human)"], demonstration: ["demonstrations", "var(--script)"] });

function row(name, note, score, color, big) {
  return h("div", { class: big ? "score big" : "score" }, h("div", {}, h("b", {}, name), h("small", {}, note)),
    h("strong", {}, score.episodes ? percent(score.rate) : NONE), intervalBar(score, color),
    h("small", { class: "ends" }, score.episodes ? `${percent(score.low)} to ${percent(score.high)}` : "no outcome"));
}

function successCurves(data) {
  const found = [];
  const evaluations = data.metrics.evaluations;
  if (evaluations.length) {
    found.push({ name: "evaluation", color: "var(--accent)", dots: true, points: evaluations.map((one) => [one.step, one.success]), band: evaluations.map((one) => [one.step, one.low, one.high]) });
  }
  if (onPolicy(data)) found.push({ name: "rollouts", color: "var(--policy)", dash: true, always: true, points: pair(data.metrics.curves.collection, "success") });
  else if (!imitates(data)) found.push(...practiceCurves(data.course));
  return found;
}
