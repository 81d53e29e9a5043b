// Cluster: the nodes of a run, the workers on them, the shards of its store, and events. A thousand workers are a few groups, which open on a click.

import { get } from "../api.js";
import { card, empty, fill, h, throttle, tile } from "../dom.js";
import { ago, bytes, clock, count, NONE, percent, plural, short, span } from "../format.js";

const DRIVER = { running: ["good", "running"], silent: ["bad", "silent"], gone: ["bad", "killed"], failed: ["bad", "failed"], ended: ["calm", "ended"] };
const KIND = { running: "good", starting: "now", "pending placement": "now", stuck: "bad", restarting: "bad", lost: "bad", ended: "calm" };
const COLOR = { running: "var(--good)", starting: "var(--script)", "pending placement": "var(--warn)", stuck: "var(--bad)", restarting: "var(--bad)", lost: "var(--bad)", ended: "var(--policy)" };
const BAD = new Set(["worker lost", "stuck", "node lost", "shard lost"]);
const MANY = { inference: "inference workers", rollout: "rollout workers" };

export async function open(page, { target, info }) {
  const parts = Object.fromEntries(["head", "alarms", "tiles", "nodes", "unhealthy", "shards", "events"].map((name) => [name, h("div", { "data-part": name })]));
  parts.head.className = "head";
  parts.alarms.className = "alarms";
  parts.tiles = h("dl", { class: "tiles", "data-part": "tiles" });
  const none = h("div", {});
  fill(page, Object.values(parts).slice(0, 3), none, Object.values(parts).slice(3));
  const rendered = new Map(), opened = new Set(), groups = new Map();
  let timer = null, receivedAt = 0;

  // Only what has changed is redrawn, so that a stack trace can be read and copied.
  function part(name, data, make) {
    const now = JSON.stringify(data);
    if (rendered.get(name) === now) return;
    rendered.set(name, now);
    fill(parts[name], ...make(data));
  }

  async function draw() {
    const data = await get(`${target}/cluster`);
    receivedAt = performance.now();
    fill(none, data.absent ? absent(data, info) : null);
    for (const [name, node] of Object.entries(parts)) node.hidden = data.absent && name !== "head";
    if (data.absent) return part("head", null, () => [h("h1", {}, "Cluster")]);
    part("head", data.driver, heading);
    part("alarms", data.alarms, (all) => all.map((one) => h("div", { class: `alarm ${one.level}` }, h("b", {}, one.what), h("span", {}, one.detail))));
    part("tiles", [data.totals, data.counts, data.groups, data.over], numbers);
    drawNodes(data.nodes, data.over);
    part("unhealthy", [data.unhealthy, data.num_unhealthy], unhealthy);
    part("shards", data.shards, shards);
    part("events", [data.events, data.earlier, data.log], events);
    await Promise.all([...groups.values()].map((group) => group.load()));
    tick();
  }

  function tick() {
    const more = (performance.now() - receivedAt) / 1000;
    for (const item of page.querySelectorAll("[data-silent]")) item.textContent = span(Number(item.dataset.silent) + more);
  }

  // ---- a node and its groups: made once, then updated

  let shape = null, made = [];

  function drawNodes(all, over) {
    const now = JSON.stringify(all.map((one) => [one.id, one.groups.map((group) => group.role)]));
    if (shape !== now) {
      shape = now;
      groups.clear();
      made = all.map(node);
      fill(parts.nodes, card("Nodes", { wide: true, note: "CPUs and GPUs in use; click a group to list its workers" }, h("div", { class: "nodes" }, made.map((one) => one.section))));
    }
    all.forEach((one, at) => made[at].update(one, over));
  }

  function node(one) {
    const top = h("div", { class: "top" }), workerGroups = one.groups.map((group) => workerGroup(one.id, group.role));
    const section = h("section", { "data-node": one.id }, top, workerGroups.map((each) => each.details), workerGroups.length ? null : h("small", {}, "no workers"));
    const update = (now, over) => {
      section.className = now.alive || !now.id ? "node" : "node unhealthy";
      fill(top, about(now, over));
      now.groups.forEach((group, at) => workerGroups[at].update(group));
    };
    return { section, update };
  }

  function workerGroup(id, role) {
    const key = `${id}/${role}`, rows = h("div", { class: "workers" }), summary = h("summary", {});
    const list = new WorkerList(target, id, role, rows, opened);
    const details = h("details", { class: "worker-group", "data-group": role, ontoggle: () => {
      if (details.open) { groups.set(key, list); opened.add(key); list.load(); } else { groups.delete(key); opened.delete(key); }
    } }, summary, rows);
    details.open = opened.has(key);
    return { details, update: (group) => fill(summary, groupSummary(group)) };
  }

  // ---- unhealthy workers

  function unhealthy([all, total]) {
    if (!all.length) return [];
    return [card("Unhealthy workers", { wide: true, note: total > all.length ? `${all.length} of ${count(total)}` : null }, h("div", { class: "workers" }, all.map((one) => workerRow(one, opened, "unhealthy", one.host))))];
  }

  // ---- events

  function events([all, earlier, log]) {
    const lines = all.map((one) => {
      const key = `event ${one.time_s} ${one.name}`;
      return h("div", { class: BAD.has(one.what) ? "event grave" : "event", "data-what": one.what }, h("time", { title: new Date(one.time_s * 1000).toISOString() }, clock(one.time_s)), h("b", {}, one.what), h("span", {}, one.text || one.name), stackOf(one.stack, key, opened));
    });
    const tail = earlier ? h("p", { class: "soft" }, `Older events are in ${log}`) : null;
    return [card("Events", { wide: true, note: "newest first" }, lines.length ? h("div", { class: "events" }, lines) : h("p", { class: "soft" }, "No events yet."), tail)];
  }

  await draw();
  timer = setInterval(tick, 1000);
  return { update: throttle(1000, draw), close: () => clearInterval(timer) };
}

// The workers of an open group, some at a time. One that has not changed is not redrawn.
class WorkerList {
  constructor(target, node, role, rows, opened) {
    Object.assign(this, { target, node, role, rows, opened, limit: 1, names: null, rendered: [], requested: 0, drawn: 0 });
  }

  async load() {
    const turn = ++this.requested;
    const pages = await Promise.all(Array.from({ length: this.limit }, (_, at) => get(`${this.target}/workers?${new URLSearchParams({ node: this.node, role: this.role, offset: String(at * 200) })}`)));
    if (turn < this.drawn) return; // a later response was drawn first
    this.drawn = turn;
    const all = pages.flatMap((one) => one.rows), left = pages[0].total - all.length;
    const names = JSON.stringify([left, all.map((one) => one.name)]), now = all.map((one) => JSON.stringify(one));
    const draw = (one) => workerRow(one, this.opened, `${this.node}/${this.role}`);
    if (names !== this.names) {
      fill(this.rows, all.map(draw), left > 0 ? h("button", { class: "plain", onclick: () => { this.limit += 1; this.load(); } }, `${count(left)} more`) : null);
    } else {
      now.forEach((text, at) => { if (text !== this.rendered[at]) this.rows.children[at].replaceWith(draw(all[at])); });
    }
    this.names = names;
    this.rendered = now;
  }
}

// The head of a node; a group in one line.
function about(one, over) {
  const use = [["CPUs", one.cpus, one.free_cpus], ["GPUs", one.gpus, one.free_gpus]].filter(([, all]) => all);
  return [h("header", {}, h("h3", { title: one.id }, one.id ? one.host || one.id.slice(0, 12) : "Not placed"), h("small", {}, one.id ? one.address : "workers that wait for resources"),
    one.id && !one.alive ? h("span", { class: "pill bad" }, one.seen_s ? `gone, seen ${ago(one.seen_s)}` : "gone") : null,
    one.memory_bytes ? h("small", { class: "memory" }, `${bytes(one.memory_bytes)} of memory`) : null),
  use.map(([what, all, free]) => meter(what, all - free, all, one.alive && !over))];
}

function meter(what, used, all, alive) {
  const filled = alive ? Math.max(used, 0) : 0;
  return h("div", { class: "use" }, h("span", {}, what), h("div", { class: "stack" }, h("i", { style: { flexGrow: String(filled), background: "var(--accent)" } }), h("i", { style: { flexGrow: String(Math.max(all - filled, 0)) } })),
    h("b", {}, alive ? `${short(used)} of ${short(all)}` : NONE));
}

function groupSummary(group) {
  return [h("b", {}, plain(group)), h("span", { class: "states" }, group.states.map(([state, number]) => h("span", { class: `pill ${KIND[state] ?? "calm"}` }, group.total === 1 ? state : `${count(number)} ${state}`))),
    group.restarts ? h("small", {}, plural(group.restarts, "restart")) : null,
    h("div", { class: "stack" }, group.states.map(([state, number]) => h("i", { style: { flexGrow: String(number), background: COLOR[state] ?? "var(--policy)" }, title: `${count(number)} ${state}` }))),
    h("small", { class: "doing" }, group.only ?? group.doing.map(([what, number]) => `${what}${number < group.total ? ` (${count(number)})` : ""}`).join("; "))];
}

function workerRow(one, opened, key, host) {
  return h("div", { class: "worker", "data-name": one.name }, h("b", {}, one.name), h("span", { class: `pill ${KIND[one.state] ?? "calm"}` }, one.state), h("span", { class: "what" }, one.error ?? one.doing),
    h("small", {}, [host, one.since_s ? `since ${clock(one.since_s)}` : null, one.pid ? `process ${one.pid}` : null, one.restarts ? plural(one.restarts, "restart") : null].filter(Boolean).join(", ")),
    stackOf(one.stack, `${key} ${one.name}`, opened));
}

function stackOf(text, key, opened) {
  if (!text) return null;
  const details = h("details", { class: "where", ontoggle: (event) => (event.target.open ? opened.add(key) : opened.delete(key)) }, h("summary", {}, "stack"), h("pre", { class: "stack-text" }, text));
  details.open = opened.has(key);
  return details;
}

function absent(data, info) {
  if (data.problem) return empty("The cluster's file is not valid", `${info.path}/cluster.json: ${data.problem}. The driver replaces it every two seconds while it runs.`);
  return empty("This run has no cluster", "It runs on one machine, or has not been started on a cluster yet.", h("pre", {}, `understudy resume ${info.path} --cluster local\nunderstudy resume ${info.path} --cluster HOST:6379`));
}

function heading(driver) {
  const [kind, says] = DRIVER[driver.state];
  const late = driver.state === "silent" ? [" (", h("span", { "data-silent": String(driver.silent_s) }, span(driver.silent_s)), " ago)"] : [];
  return [h("div", { class: "title" }, h("h1", {}, "Cluster"), h("span", { class: `pill ${kind}` }, says)),
    h("p", { class: "soft" }, `Driver: process ${driver.pid ?? NONE} on ${driver.host || NONE}, Ray at ${driver.address || NONE}; as of ${clock(driver.updated_s)}`, late)];
}

function numbers([totals, counts, groups, over]) {
  const up = (role) => {
    const found = groups.find((group) => group.role === role);
    if (over) return found ? tile(MANY[role] ?? `${role}s`, count(found.total), "at the end") : null;
    return found ? tile(MANY[role] ?? `${role}s`, count(found.states.find(([state]) => state === "running")?.[1] ?? 0), `running, of ${count(found.total)}`) : null;
  };
  const resource = (what, used, all) => (over ? tile(what, short(all), "at the end") : tile(what, all ? percent(used / all) : NONE, `${short(used)} of ${short(all)} in use`));
  return [
    tile("nodes", count(totals.alive), totals.alive < totals.nodes ? `alive, of ${count(totals.nodes)}` : over ? "at the end" : "all alive", totals.alive < totals.nodes ? "bad" : ""),
    resource("CPUs", totals.used_cpus, totals.cpus),
    totals.gpus ? resource("GPUs", totals.used_gpus, totals.gpus) : null,
    ...["learner", "rollout", "inference", "actor"].map(up),
    tile("stored steps", short(totals.steps), totals.lost_steps ? `${short(totals.lost_steps)} lost` : "none lost", totals.lost_steps ? "bad" : ""),
    tile("restarts", count(counts.restarts), `${plural(counts.nodes_lost, "node")} lost`),
    tile("reissued", count(counts.reissued), `episodes; ${count(counts.fenced)} late`),
  ].filter(Boolean);
}

function shards(all) {
  if (!all.length) return [];
  const lost = all.some((one) => one.lost_steps);
  const names = ["shard", "state", "node", "address", "steps", lost ? "lost steps" : null, "commits", "directory"].filter((name) => name !== null);
  return [card("Shards", { wide: true, note: "the stores of this run, each on the disk of its node" }, h("div", { class: "scroll" }, h("table", { class: "shards" },
    h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
    h("tbody", {}, all.map((one) => h("tr", { "data-shard": one.name }, h("td", {}, h("b", {}, one.name)), h("td", {}, h("span", { class: `pill ${KIND[one.state] ?? "calm"}` }, one.state)), h("td", {}, one.host ?? NONE), h("td", {}, h("code", {}, one.address || NONE)),
      h("td", { class: "num" }, count(one.steps)), lost ? h("td", { class: one.lost_steps ? "num bad" : "num" }, count(one.lost_steps)) : null, h("td", { class: "num" }, count(one.commit)), h("td", {}, h("code", {}, one.path)))))))) ];
}

function plain(group) {
  if (group.total === 1) return group.role === "learner" ? "1 learner" : `1 ${group.role}`;
  return `${count(group.total)} ${MANY[group.role] ?? `${group.role}s`}`;
}
