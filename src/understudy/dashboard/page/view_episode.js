// Episode: its cameras, its numbers, and who was in control, step by step.

import { get } from "./api.js";
import { card, empty, fill, h, seldom } from "./dom.js";
import { bytes, clock, count, NONE, plural, short, WHO } from "./format.js";
import { labelDialog } from "./labels.js";
import { Film, Lanes } from "./player.js";
import { change } from "./toast.js";

const SPEEDS = [2, 5, 10, 20, 50].map((value) => [value, `${value} steps/s`]);
const AXES = { 2: "x y", 3: "x y z", 4: "x y z grip", 6: "x y z roll pitch yaw", 7: "x y z roll pitch yaw grip" };
const NOTES = /^((intervention|takeover)_.*|ticket|iteration|policy_seed|clipped_steps)$/; // labels that runs write, not people
const ICONS = { play: "M8 5v14l11-7z", pause: "M7 5h4v14H7zM13 5h4v14h-4z", back: "M16 6v12l-8-6z", next: "M8 6v12l8-6z", first: "M6 6h2v12H6zM18 6v12l-9-6z", last: "M16 6h2v12h-2zM6 6v12l9-6z" };

export async function open(page, { place, rest }) {
  const id = Number(rest);
  let said, films = [], at = 0, playing = false, due = 0, frame = 0;
  const head = h("div", { class: "head" }), cameras = h("div", { class: "cameras" }), facts = h("dl", { class: "facts" }), who = h("div", { class: "who-now" });
  const lanes = new Lanes((index) => { stop(); seek(index); });
  const button = (name, title, act) => h("button", { class: "icon", title, "aria-label": title, onclick: act }, icon(ICONS[name]));
  const play = button("play", "Play (space)", () => toggle());
  const counter = h("output", { class: "counter" });
  const speed = h("select", { "aria-label": "Speed" }, SPEEDS.map(([value, text]) => h("option", { value: String(value), selected: value === 10 }, text)));
  const transport = h("div", { class: "transport" }, button("first", "First step (home)", () => { stop(); seek(0); }), button("back", "Step back (left)", () => { stop(); seek(at - 1); }), play,
    button("next", "Step on (right)", () => { stop(); seek(at + 1); }), button("last", "Last step (end)", () => { stop(); seek(Infinity); }), counter, who, h("span", { class: "fill" }), speed);
  const stage = h("div", { class: "stage" }, cameras, transport);
  const legend = h("div", { class: "legend" });
  fill(page, head, h("div", { class: "theatre" }, stage, h("section", { class: "card" }, h("header", {}, h("h2", {}, "Step by step"), legend), lanes.node)), card("What is known", { wide: true }, facts));

  async function load(first) {
    said = await get(`${place}/episode/${id}`);
    const { steps } = said, version = `${said.store}-${said.num_rows}`;
    if (first || films[0]?.version !== version) {
      for (const film of films) film.close();
      films = Object.entries(steps.cameras).map(([camera, shape]) => new Film(place, id, camera, shape, version));
      fill(cameras, films.length ? films.map((film) => h("figure", {}, film.canvas, h("figcaption", {}, film.camera.replace("observation/", "")))) : h("p", { class: "soft" }, "This episode has no cameras; its numbers are below."));
    }
    lanes.set(curves(steps), steps.source);
    const there = new Set(steps.source);
    fill(legend, WHO.map((name, number) => (there.has(number) ? h("span", { vars: { "--c": `var(--${name})` } }, h("i", {}), name) : null)),
      Object.values(steps.curves).some((one) => one.proposal) ? h("span", { class: "dash", vars: { "--c": "var(--ink)" } }, h("i", {}), "what the policy wanted") : null);
    drawHead();
    drawFacts();
    seek(Math.min(at, last()));
  }

  const last = () => Math.max(said.steps.num_rows - 1, 0);

  function seek(index) {
    at = Math.max(0, Math.min(index, last()));
    for (const film of films) film.show(at).catch(() => {});
    lanes.move(at);
    const step = Math.min(at, said.steps.source.length - 1), name = step < 0 ? "" : WHO[said.steps.source[step]];
    counter.textContent = `${at} / ${last()}`;
    const after = at > said.steps.source.length - 1;
    fill(who, h("i", { style: { background: after ? "var(--later)" : `var(--${name})` } }), after ? "the end" : name, !after && said.steps.policy_version[step] >= 0 ? h("small", {}, `version ${count(said.steps.policy_version[step])}`) : null);
  }

  function toggle() {
    if (playing) return stop();
    if (at >= last()) seek(0);
    playing = true;
    due = performance.now();
    fill(play, icon(ICONS.pause));
    frame = requestAnimationFrame(tick);
  }

  function stop() {
    playing = false;
    cancelAnimationFrame(frame);
    fill(play, icon(ICONS.play));
  }

  function tick(now) {
    if (!playing) return;
    const wait = 1000 / Number(speed.value);
    if (now >= due + wait) {
      if (films.every((film) => film.has(at + 1) || at + 1 > last())) {
        due = now - due > 3 * wait ? now : due + wait;
        if (at >= last()) return stop();
        seek(at + 1);
      } else { due = now; for (const film of films) film.load(Math.floor((at + 1) / 32)).catch(() => {}); }
    }
    frame = requestAnimationFrame(tick);
  }

  function drawHead() {
    const done = () => load().catch(() => {});
    const outcome = said.state === "open" ? ["now", "being recorded"] : said.success === true ? ["good", "success"] : said.success === false ? ["bad", "failure"] : ["calm", said.state === "cut" ? "cut" : "not judged"];
    const gone = said.deleted ? h("span", { class: "pill bad" }, said.pending ? "will be deleted" : "deleted") : said.pending ? h("span", { class: "pill calm" }, "change waits") : null;
    fill(head, h("div", { class: "title" }, h("a", { class: "back", href: `#/${place}/episodes` }, "Episodes"), h("h1", {}, `${said.task ?? "Episode"} `, h("span", { class: "soft" }, `#${id}`)), h("span", { class: `pill ${outcome[0]}` }, outcome[1]), gone,
      h("span", { class: "fill" }), step(said.before, "Older"), step(said.after, "Newer")),
    h("div", { class: "row" }, h("p", { class: "soft" }, said.instruction ?? said.kind),
      Object.entries(said.labels).filter(([name]) => !NOTES.test(name)).map(([name, value]) => h("button", { class: "tag", title: "Take this label off", onclick: () => change(place, { action: "label", episodes: [id], labels: { [name]: null } }, `no longer ${name}`, done) }, value === "yes" ? name : `${name}=${value}`, h("i", {}, "×"))),
      h("button", { onclick: () => labelDialog(`episode ${id}`, (labels, text) => change(place, { action: "label", episodes: [id], labels }, `Episode ${id} ${text}`, done)) }, "Label"),
      said.deleted ? h("button", { onclick: () => change(place, { action: "restore", episodes: [id] }, `Episode ${id} restored`, done) }, "Restore")
        : h("button", { class: "bad", onclick: () => change(place, { action: "delete", episodes: [id] }, `Episode ${id} deleted`, done) }, "Delete")));
  }

  const step = (other, text) => (other ? h("a", { class: "button", href: `#/${place}/episode/${other}` }, text) : null);

  function drawFacts() {
    const notes = Object.entries(said.labels).filter(([name]) => NOTES.test(name)).map(([name, value]) => [name.replaceAll("_", " "), value]);
    const shown = said.steps.all_steps > said.steps.num_steps ? `, the first ${count(said.steps.num_steps)} are shown` : "";
    fill(facts, [["kind", said.kind], ["steps", plural(said.num_steps, block(said.steps) > 1 ? `block of up to ${block(said.steps)} steps` : "step", block(said.steps) > 1 ? `blocks of up to ${block(said.steps)} steps` : "steps") + shown], ["chosen by", WHO.filter((name) => said[`num_${name}`]).map((name) => `${name} ${count(said[`num_${name}`])}`).join(", ") || NONE], ["reward", short(said.total_reward)],
      ["actor", said.actor], ["operator", said.operator], ["split", said.split], ["start", said.init_state], ["seed", said.seed], ["group", said.group_key], ["recorded", clock(said.begun_at)], ["size", bytes(said.num_bytes)], ...notes]
      .filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  }

  const keys = (event) => {
    if (event.target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    const act = { ArrowRight: () => { stop(); seek(at + (event.shiftKey ? 10 : 1)); }, ArrowLeft: () => { stop(); seek(at - (event.shiftKey ? 10 : 1)); }, " ": toggle, Home: () => { stop(); seek(0); }, End: () => { stop(); seek(Infinity); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  };
  window.addEventListener("keydown", keys);
  const close = () => { stop(); lanes.close(); for (const film of films) film.close(); window.removeEventListener("keydown", keys); };
  try { await load(true); } catch (error) {
    close();
    if (error.status === 409) { fill(page, empty("This episode is not here", error.message, h("a", { class: "button", href: `#/${place}/episodes` }, "All episodes"))); return {}; }
    throw error;
  }
  return { update: seldom(1000, () => (said.state === "open" || said.pending ? load().catch(() => {}) : null)), close };
}

function icon(path) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("viewBox", "0 0 24 24");
  line.setAttribute("d", path);
  shape.append(line);
  return shape;
}

// How many actions a row holds: more than one if the policy decides on blocks.
const block = (steps) => steps.curves.reward?.size ?? 1;

function curves(steps) {
  const found = [], size = block(steps);
  for (const [path, curve] of Object.entries(steps.curves)) {
    if (size > 1 && /^extras\/(replay|log_prob|executed)/.test(path)) continue; // a number for each of a block's tokens
    const each = curve.size / size, names = AXES[each]?.split(" "), wide = size > 1 && path.startsWith("action");
    const usual = !path.startsWith("action") ? null : wide ? curve.values.map((_, at) => `${Math.floor(at / each)}: ${names?.[at % each] ?? at % each}`) : names;
    curve.values.forEach((values, at) => found.push({
      name: curve.size === 1 ? path.replace("extras/", "") : usual ? `${path === "action" ? "" : `${path.slice(7)} `}${usual[at]}` : `${path.replace("extras/", "")} ${at}`,
      values, proposal: curve.proposal?.[at], plain: !path.startsWith("action"),
    }));
  }
  return found.sort((a, b) => (a.name === "reward" ? -1 : b.name === "reward" ? 1 : 0));
}
