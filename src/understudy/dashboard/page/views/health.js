// Health: every process of the run, and the stack of one that is stuck.

import { get } from "../api.js";
import { empty, fill, h, throttle } from "../dom.js";
import { ago, bytes, count, NONE, plural, short, span } from "../format.js";

const KNOWN = new Set(["role", "name", "state", "pid", "host", "version", "started_s", "beat_s", "progress_s", "stuck_after_s", "doing", "step", "update", "policy_version",
  "page", "memory_bytes", "steps_per_s", "updates_per_s", "error", "stack", "queue", "spool_bytes", "silent_s", "idle_s", "writers", "delivery"]);
// What a process reports beside the fields above: the words, and how to write the value; nothing if all is well.
const MORE = {
  away: ["unreachable shards", (value) => named(value) || null, true],
  oldest_pending_s: ["oldest unsaved chunk", (value) => (value > 0 ? `waits for the disk for ${span(value)}` : null), true],
  parameters_problem: ["no newer policy", (value) => value || null, true],
  parameters_unusable: ["unusable policies", (value) => (value ? `${count(value)} were refused` : null), true],
  address: ["address", (value) => value],
  commit: ["commits", (value) => count(value)],
};
const SAYS = { running: "running", stuck: "stuck", silent: "no heartbeat", gone: "killed", failed: "failed", ended: "ended" };
const KIND = { running: "good", stuck: "bad", silent: "bad", gone: "bad", failed: "bad", ended: "calm" };

export async function open(page, { target }) {
  const list = h("div", { class: "processes" }), foot = h("p", { class: "soft" });
  fill(page, h("div", { class: "head" }, h("h1", {}, "Health")), list, foot);
  let data = null, receivedAt = 0, timer = null;
  const opened = new Set();

  async function draw() {
    data = await get(`${target}/health`);
    receivedAt = performance.now();
    const none = empty("No process has reported yet", "Learners, actors and servers write a small file every two seconds while they run. This run has none yet.", h("pre", {}, data.directories.join("\n")));
    fill(list, data.processes.length ? data.processes.map((role) => processCard(role, opened)) : none);
    const lock_owner = data.lock_owner;
    fill(foot, lock_owner ? `The store is written by process ${lock_owner.pid} on ${lock_owner.host}, since ${lock_owner.since}: ${lock_owner.command}` : "Nobody is writing to the store.");
    tick();
  }

  function tick() { // ages grow between two reports
    const more = (performance.now() - receivedAt) / 1000;
    for (const node of list.querySelectorAll("[data-since]")) node.textContent = span(Number(node.dataset.since) + more);
  }

  await draw();
  timer = setInterval(tick, 1000);
  return { update: throttle(1000, draw), close: () => clearInterval(timer) };
}

function processCard(role, opened) {
  const key = `${role.role}-${role.name}`;
  const live = role.state === "running" || role.state === "stuck", over = role.state === "ended" || role.state === "failed";
  const facts = [
    over ? [role.state, since(role.silent_s), role.state === "failed"] : ["last heartbeat", since(role.silent_s), !live],
    over ? null : ["last progress", since((role.idle_s ?? 0) + (live ? role.silent_s : 0)), role.state === "stuck"],
    ["steps", role.step === null ? null : `${count(role.step)}${live ? rate(role.steps_per_s) : ""}`],
    ["updates", role.update === null ? null : `${count(role.update)}${live ? rate(role.updates_per_s) : ""}`],
    ["policy", role.policy_version === null || role.policy_version === undefined ? null : `version ${count(role.policy_version)}`],
    ["queue", role.queue === undefined ? null : `${count(role.queue)} rows`],
    ["spool", role.spool_bytes === undefined ? null : bytes(role.spool_bytes)],
    ["memory", bytes(role.memory_bytes)],
    ["started", ago(role.started_s)],
    ["process", `${role.pid} on ${role.host}`],
    ["Understudy", role.version],
    ...Object.entries(role).filter(([name]) => !KNOWN.has(name)).map(([name, value]) => more(name, value)),
  ].filter((fact) => fact && fact[1] !== null && fact[1] !== undefined);
  const details = h("details", { ontoggle: (event) => (event.target.open ? opened.add(key) : opened.delete(key)) }, h("summary", {}, "stacks of all threads"), h("pre", { class: "stack-text" }, role.stack ?? ""));
  details.open = role.state === "stuck" || opened.has(key);
  return h("section", { class: KIND[role.state] === "bad" ? "card role unhealthy" : "card role", "data-role": key },
    h("header", {}, h("h2", {}, role.name ?? NONE), h("span", { class: "soft" }, role.role), h("span", { class: `pill ${KIND[role.state]}` }, SAYS[role.state])),
    h("p", { class: "doing" }, sentence(role, live), role.page && live ? h("a", { class: "pill link", href: role.page, target: "_blank", rel: "noreferrer" }, "Drive from a page") : null),
    h("dl", { class: "facts" }, facts.map(([name, value, bad]) => h("div", { class: bad ? "bad" : "" }, h("dt", {}, name), h("dd", {}, value)))),
    delivery(role.delivery), writers(role.writers), role.stack ? details : null);
}

const since = (seconds) => h("span", {}, h("span", { "data-since": String(seconds) }, span(seconds)), " ago");
const rate = (value) => (value === null || value === undefined ? "" : `, ${short(value)} per second`);
const named = (value) => (value && typeof value === "object" ? Object.entries(value).map((pair) => pair.join(": ")).join("; ") : "");

function more(name, value) {
  const [words, text, bad] = MORE[name] ?? [name.replace(/_s$/, "").replaceAll("_", " "), (one) => (one !== null && typeof one === "object" ? named(one) || null : name.endsWith("_s") ? span(one) : one === null ? null : String(one))];
  return [words, text(value), bad];
}

// What the process is doing, or how it came to its end. One that was stopped has not failed.
function sentence(role, live) {
  if (live) return role.doing;
  if (role.state === "failed") return role.error;
  if (role.state !== "ended") return `was ${role.doing} when it was last heard of`;
  const said = /^(?:Stopped|QuitAtOnce): (.+)/.exec(role.error ?? "")?.[1]; // what was saved, in a sentence
  if (said) return said;
  const stopped = /^(KeyboardInterrupt|SystemExit)/.exec(role.error ?? "")?.[1];
  return stopped ? `stopped by ${stopped === "KeyboardInterrupt" ? "Ctrl-C" : "a signal"} while ${role.doing}` : "ended well";
}

function delivery(data) {
  if (!data) return null;
  return h("dl", { class: "facts" }, [["connected", data.connected ? "yes" : `no: ${data.problem}`, !data.connected], ["delivered", plural(data.delivered, "row")], ["in the spool", plural(data.recorded, "row")], ["dropped", plural(data.dropped, "row"), data.dropped > 0], ["damaged by the disk", plural(data.damaged_chunks ?? 0, "chunk"), data.damaged_chunks > 0]]
    .map(([name, value, bad]) => h("div", { class: bad ? "bad" : "" }, h("dt", {}, name), h("dd", {}, value))));
}

function writers(data) {
  if (!Array.isArray(data) || !data.length) return null;
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["writer", "address", "last message", "chunks", "chunks sent again", "received"].map((name) => h("th", {}, name)))),
    h("tbody", {}, data.map((one) => h("tr", {}, h("td", {}, one.writer), h("td", {}, one.peer), h("td", {}, one.streams ? "connected" : ago(one.last_seen_s)), h("td", { class: "num" }, count(one.chunks)), h("td", { class: "num" }, count(one.repeated)), h("td", { class: "num" }, bytes(one.received_bytes)))))));
}
